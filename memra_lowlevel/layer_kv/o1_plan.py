"""Which layers of a model get the O(1) override, and with what numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memra_lowlevel.errors import KvStateError

from .inputs import count
from .modes import O1Rect

__all__ = ["O1Plan", "parse_layers"]

#: ``"all"``, a tuple of layer indices, or a negative-free ``("deep", n)``.
Layers = str | tuple[int, ...] | tuple[str, int]


def parse_layers(text: str | None) -> Layers | None:
    """Read a layer list: ``all``, ``deepN`` (the last N layers), ``i,j,k``; None when off.

    Off is spelt ``off``, ``0``, ``none`` or the empty string.

    Raises
    ------
    KvStateError
        For anything else.
    """
    if text is None or text.strip() in ("", "off", "0", "none"):
        return None
    word = text.strip()
    if word == "all":
        return "all"
    deep = re.fullmatch(r"deep([1-9][0-9]*)", word)
    if deep:
        return ("deep", int(deep[1]))
    parts = [part.strip() for part in word.split(",")]
    if all(re.fullmatch(r"[0-9]+", part) for part in parts):
        return tuple(int(part) for part in parts)
    raise KvStateError(f"{text!r} is no layer list; use all, deepN, i,j,k, or off")


@dataclass(frozen=True)
class O1Plan:
    """Settings of the override for a model.

    Attributes
    ----------
    layers : "all", ("deep", n), tuple of int, or None
        None is off.
    m, window, sink : int
        Landmarks, rows of the exact window, rows kept for ever.
    rect : O1Rect
    """

    layers: Layers | None
    m: int = 32
    window: int = 128
    sink: int = 4
    rect: O1Rect = O1Rect.AGGREGATE

    @staticmethod
    def from_hint(hint: Mapping[str, Any]) -> O1Plan:
        """Read a file's hint ``{"layers": ..., "m": ..., "w": ..., "sink": ...}``."""
        if not isinstance(hint, Mapping):
            raise KvStateError(f"hint: {type(hint).__name__} is no mapping")
        given = hint.get("layers")
        if isinstance(given, str) or given is None:
            layers = parse_layers(given)
        elif isinstance(given, Sequence):
            layers = tuple(count(i, "layers") for i in given)
        else:
            raise KvStateError(f"layers: {given!r} is no layer list")
        return O1Plan(
            layers,
            max(count(hint.get("m", 32), "m"), 4),
            max(count(hint.get("w", 128), "w"), 1),
            count(hint.get("sink", 4), "sink"),
        )

    @staticmethod
    def resolve(
        explicit: O1Plan | None = None,
        hint: Mapping[str, Any] | None = None,
        *,
        bounded: bool = False,
    ) -> O1Plan:
        """Choose among an explicit plan, the door ``CMF_O1`` and a file's hint, in this order.

        Parameters
        ----------
        bounded : bool
            Whether the file has a bounded anchor, which excludes the override.

        Raises
        ------
        KvStateError
            For a malformed door, and on a file with an anchor for anything but an explicit off.
        """
        door = os.environ.get("CMF_O1")
        own = O1Plan(None) if hint is None else O1Plan.from_hint(hint)
        if explicit is not None:
            plan = explicit
        elif door is not None:
            plan = O1Plan(parse_layers(door), own.m, own.window, own.sink)
        else:
            plan = own
        if bounded and (plan.layers is not None or hint is not None):
            raise KvStateError(
                "an O(1) override is asked for on a file with a bounded anchor; turn it off"
            )
        return plan

    def on(self, n_layers: int) -> list[bool]:
        """Return which of `n_layers` layers get the override; indices beyond are ignored."""
        if self.layers is None:
            return [False] * n_layers
        if self.layers == "all":
            return [True] * n_layers
        if self.layers[0] == "deep":
            return [i >= n_layers - int(self.layers[1]) for i in range(n_layers)]
        return [i in self.layers for i in range(n_layers)]
