"""The environment doors that shape a cache, each read once; an explicit argument always wins.

==========================  =====================================================================
``MEMRA_KV_K``              K format: unset or empty or ``q8_0``, ``fp8``; anything else raises
``MEMRA_KV_V``              V format: unset or empty or ``q5_1``, ``q4_0``, ``fp8``; else raises
``MEMRA_GEMMA_GKV``         fp8 planes of gemma global layers: on unless ``0``
``MEMRA_GEMMA_WKV``         fp8 planes of gemma windowed layers: if set, on unless ``0``; if unset,
                            on unless ``MEMRA_DRAFT`` is set
``MEMRA_KV_FP8``            fp8 planes of other full-attention layers: if set, on iff ``1``; if
                            unset, on iff ``KV_FP8_FORCE`` is 1
``MEMRA_SWA_RING``          rings under sliding windows: ``1`` on, ``0`` off, else the model's
                            default (:func:`set_swa_ring_default`); other text warns once
``MEMRA_DSA_INDEX_RING``    row count of the indexer's ring, 0 = flat; other text warns once and
                            counts as unset (5120 rows)
==========================  =====================================================================

The three class doors act only through a layer plan that names the class.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

from ..errors import FormatUnsupported, PlaneError
from ..formats import E4M3, Q4_0, Q5_1, Q8_0, Format, block_bytes
from .ring import PRIME_CHUNK_MAX_TOKENS

__all__ = [
    "DOORS",
    "KV_FP8_FORCE",
    "Fp8Force",
    "class_formats",
    "doors",
    "forget_environment",
    "gkv_on",
    "index_ring_door",
    "kv_blk_bytes",
    "kv_cache_formats",
    "kv_fp8_on",
    "prime_chunk_tokens",
    "set_swa_ring_default",
    "swa_ring_on",
    "wkv_on",
]

DOORS = (
    "MEMRA_KV_K",
    "MEMRA_KV_V",
    "MEMRA_GEMMA_GKV",
    "MEMRA_GEMMA_WKV",
    "MEMRA_KV_FP8",
    "MEMRA_DRAFT",
    "MEMRA_SWA_RING",
    "MEMRA_DSA_INDEX_RING",
)

_K_CHOICES = {"": Q8_0, "q8_0": Q8_0, "fp8": E4M3}
_V_CHOICES = {"": Q5_1, "q5_1": Q5_1, "q4_0": Q4_0, "fp8": E4M3}


class Fp8Force:
    """A per-model door with three positions: -1 no opinion, 0 off, 1 on."""

    def __init__(self) -> None:
        self._value = -1

    def get(self) -> int:
        """Return the position."""
        return self._value

    def set(self, v: int) -> None:
        """Move the door; it is read whenever a layer plan is sized, so set it before."""
        if v not in (-1, 0, 1):
            raise PlaneError(f"KV_FP8_FORCE.set: {v!r} is none of -1, 0, 1")
        self._value = int(v)


KV_FP8_FORCE = Fp8Force()
_swa_ring_default = False


@cache
def _door(name: str) -> str | None:
    return os.environ.get(name)


def forget_environment() -> None:
    """Read the doors again at their next use (for tests; planes that exist keep what they have)."""
    _door.cache_clear()
    kv_cache_formats.cache_clear()
    _ring_door.cache_clear()
    index_ring_door.cache_clear()


def _choose(name: str, choices: dict[str, Format]) -> Format:
    text = _door(name) or ""
    if text not in choices:
        known = tuple(key for key in choices if key)
        raise FormatUnsupported(
            f"kv_cache_formats: {name}={text!r} names no format; use one of {', '.join(known)} or "
            "leave it unset",
            op="kv_cache_formats",
            nearest=known,
        )
    return choices[text]


@cache
def kv_cache_formats() -> tuple[Format, Format]:
    """Return the formats of K and V that the process selected (``MEMRA_KV_K``, ``MEMRA_KV_V``).

    Raises
    ------
    FormatUnsupported
        One of the two variables names nothing that is known.
    """
    return _choose("MEMRA_KV_K", _K_CHOICES), _choose("MEMRA_KV_V", _V_CHOICES)


def kv_blk_bytes(k: Format | None = None, v: Format | None = None) -> tuple[int, int]:
    """Bytes that 32 elements of K and of V take; None stands for the selected format."""
    if k is None or v is None:
        selected_k, selected_v = kv_cache_formats()
        k, v = k or selected_k, v or selected_v
    return block_bytes(k), block_bytes(v)


def gkv_on() -> bool:
    """Whether gemma global layers hold fp8 planes."""
    return _door("MEMRA_GEMMA_GKV") != "0"


def wkv_on() -> bool:
    """Whether gemma windowed layers hold fp8 planes; by default not where a draft runs."""
    text = _door("MEMRA_GEMMA_WKV")
    return _door("MEMRA_DRAFT") is None if text is None else text != "0"


def kv_fp8_on() -> bool:
    """Whether other full-attention layers hold fp8 planes."""
    text = _door("MEMRA_KV_FP8")
    return KV_FP8_FORCE.get() == 1 if text is None else text == "1"


def class_formats(kind: str) -> tuple[Format, Format]:
    """Return the formats of a layer of class ``full``, ``gemma_global`` or ``gemma_window``.

    The allocator and every byte count take the formats from here, so they cannot disagree.
    """
    on = {"full": kv_fp8_on, "gemma_global": gkv_on, "gemma_window": wkv_on}[kind]()
    return (E4M3, E4M3) if on else kv_cache_formats()


@cache
def _ring_door() -> bool | None:
    text = _door("MEMRA_SWA_RING")
    if text in ("0", "1"):
        return text == "1"
    if text:
        warnings.warn(
            f"MEMRA_SWA_RING={text!r} is neither 0 nor 1; the model's default is used",
            RuntimeWarning,
            stacklevel=3,
        )
    return None


def swa_ring_on() -> bool:
    """Whether sliding-window layers get a ring."""
    forced = _ring_door()
    return _swa_ring_default if forced is None else forced


def set_swa_ring_default(on: bool) -> None:
    """Set what :func:`swa_ring_on` answers where the environment has no opinion."""
    global _swa_ring_default
    _swa_ring_default = bool(on)


@cache
def index_ring_door() -> int | None:
    """Row count of ``MEMRA_DSA_INDEX_RING``; None where it is unset or no number."""
    text = _door("MEMRA_DSA_INDEX_RING")
    if text is None:
        return None
    try:
        rows = int(text)
        if rows >= 0:
            return rows
    except ValueError:
        pass
    warnings.warn(
        f"MEMRA_DSA_INDEX_RING={text!r} is no row count; the default ring is used",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def prime_chunk_tokens(n: int) -> int:
    """Tokens of the next prefill chunk out of ``n`` that are left.

    With rings in use a chunk is bounded, because a ring has room for one bounded append only.
    """
    return min(n, PRIME_CHUNK_MAX_TOKENS) if swa_ring_on() else n


def doors() -> dict[str, str | None]:
    """Return the doors as they were read, for ``doctor``; None where a variable is unset."""
    return {name: _door(name) for name in DOORS}
