"""The indexer of latent attention (``cuda_src/latent/index.cu``, ``select.cu``).

Index rows go to a plane (flat, or the ring of its tail), whole pools of them become keys; queries
score the keys, and the best pools become lists of rows. All of it is the same bits on every device.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from ..runtime.launch import LaunchConfig, launch
from . import registry
from .latent_refusal import refused
from .registry import KernelSpec, Tolerance

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Buffer, Device, Stream

__all__ = [
    "MAX_HEADS",
    "MAX_POOL",
    "append",
    "list_width",
    "prepare",
    "score",
    "scratch_bytes",
    "select",
]

MAX_POOL = 16
"""Most rows of a pool."""

MAX_HEADS = 1024
"""Most heads of the indexer."""

_THREADS = 128
_SEGMENT = 2048
_LEAST_GROUP = 32
_AT_ONCE = 16384
"""Most pools that one thread block chooses from without help."""

_SCORE_SHAPES = (
    {"heads": 8, "pools": 2, "groups": 4, "slice": 32},
    {"heads": 8, "pools": 4, "groups": 4, "slice": 32},
)
"""Heads and pools of a thread, threads that share a pool, channels that are staged at once: for few
pools, and for many."""

_BITS = Tolerance("bitwise", 0.0, "every rounding is fixed, because scores decide ties")
_INTEGERS = Tolerance("bitwise", 0.0, "integer comparisons")
_SELECT_EDGES = (
    "no pool", "fewer pools than wanted", "all equal", "few levels", "all masked", "not finite",
    "-0 and +0", "many segments", "no tail",
)  # fmt: skip

registry.register(
    KernelSpec(
        name="index_append",
        source="latent/index.cu",
        entry="index_append",
        oracle="memra_lowlevel.reference.latent:pool_keys",
        tolerance=Tolerance(
            "relative", 2e-6, "f32 softmax over at most 16 rows with an exponential within 2 ulp"
        ),
        edges=("one row", "many pools", "ring", "odd widths", "no room", "pool of one"),
        hot=True,
        same_bits=True,
    ),
    KernelSpec(
        name="index_scores",
        source="latent/index.cu",
        entry="index_scores<{heads}, {pools}, {groups}, {slice}>",
        instances=_SCORE_SHAPES,
        oracle="memra_lowlevel.reference.latent:scores",
        tolerance=_BITS,
        edges=("no pool", "pools no multiple of a block", "odd widths", "many heads", "masked"),
        hot=True,
        same_bits=True,
    ),
    *(
        KernelSpec(
            name=name,
            source="latent/select.cu",
            entry=entry,
            instances=instances,
            oracle="memra_lowlevel.reference.latent:select",
            tolerance=_INTEGERS,
            edges=_SELECT_EDGES,
            hot=True,
            same_bits=True,
            pdl="waits",
        )
        for name, entry, instances in (
            ("select_maxima", "select_maxima", ({},)),
            ("select_filter", "select_filter", ({},)),
            ("select_choose", "select_choose<{own}>", ({"own": 8}, {"own": 16})),
        )
    ),
)


def prepare(device: Device) -> None:
    """Load the kernels, so that later calls may be captured."""
    registry.kernels(
        device,
        [
            ("index_append", {}),
            *(("index_scores", shape) for shape in _SCORE_SHAPES),
            ("select_maxima", {}), ("select_filter", {}), ("select_choose", {"own": 8}),
            ("select_choose", {"own": 16}),
        ],
    )  # fmt: skip


def append(
    stream: Stream,
    rows: Buffer,
    ape: Buffer,
    plane: Buffer,
    keys: Buffer,
    len_d: Buffer,
    *,
    pool: int,
    capacity: int,
    ring: int = 0,
    first: int = 0,
) -> None:
    """Write n index rows behind the length and build the keys of the pools that they complete.

    Parameters
    ----------
    stream : Stream
    rows : Buffer
        f32 ``[n, 2 * d]``, ``[k | gate]``.
    ape : Buffer
        f32 ``[pool, d]``.
    plane : Buffer
        f32, ``ring`` rows, or ``capacity`` if that is 0. The rows that are still to be read and
        the n rows must fit in a ring together (``cache.index_ring_take``).
    keys : Buffer
        f32 ``[at least capacity // pool, d]``.
    len_d : Buffer
        i32[1]; row r goes to absolute row ``len + first + r``.
    pool : int
        Rows per key, at most 16.
    capacity : int
        Most absolute rows.
    ring : int
        Effective rows of the ring, a multiple of ``pool``; 0 for a flat plane.
    first : int
        Rows of the same call that were appended before.
    """
    if len(rows.shape) != 2 or rows.shape[1] < 2 or rows.shape[1] % 2:
        raise refused("index_append", "rows", "f32 [n, 2 * d]", str(rows.shape))
    n, d = rows.shape[0], rows.shape[1] // 2
    if not 1 <= pool <= MAX_POOL:
        raise refused("index_append", "pool", f"1 to {MAX_POOL}", str(pool))
    if ring < 0 or ring % pool or first < 0:
        raise refused("index_append", "ring", f"a multiple of {pool}, first not negative",
                       f"{ring}, {first}")  # fmt: skip
    if 0 < ring < n:
        raise refused("index_append", "rows", f"at most the {ring} rows of the ring", str(n))
    if ape.size != pool * d:
        raise refused("index_append", "ape", f"f32 [{pool}, {d}]", str(ape.shape))
    if plane.size < (ring or capacity) * 2 * d:
        raise refused("index_append", "plane", f"f32[{(ring or capacity) * 2 * d}]",
                       str(plane.shape))  # fmt: skip
    if keys.size < capacity // pool * d:
        raise refused("index_append", "keys", f"f32[{capacity // pool * d}]", str(keys.shape))
    if n == 0:
        return
    launch(
        stream, LaunchConfig(n // pool + 2, _THREADS), _kernel(stream.device, "index_append"),
        rows, ape, plane, keys, n, first, d, pool, ring, capacity, len_d,
    )  # fmt: skip


def score(
    stream: Stream,
    q: Buffer,
    weights: Buffer,
    keys: Buffer,
    scores: Buffer,
    len_d: Buffer,
    *,
    pool: int,
    counted: int = 0,
) -> None:
    """Score the pools that each query sees; the rounding is part of the contract.

    Parameters
    ----------
    stream : Stream
    q : Buffer
        f32 ``[n, heads, d]``.
    weights : Buffer
        f32 ``[n, heads]``.
    keys : Buffer
        f32, ``[n_pools, d]`` or longer.
    scores : Buffer
        f32 ``[n, n_pools]``. Pools that the last query sees are written, -inf where the own query
        does not see them; the others are left alone.
    len_d : Buffer
        i32[1]: query r sees pools below ``(len + r + 1 - counted) // pool``.
    counted : int
        Rows by which ``len_d`` runs ahead; negative to skip rows of a call made in parts.
    """
    if len(q.shape) != 3 or not 1 <= q.shape[1] <= MAX_HEADS or q.shape[2] < 1:
        raise refused("index_scores", "q", f"f32 [n, up to {MAX_HEADS} heads, d]", str(q.shape))
    n, heads, d = q.shape
    if weights.size != n * heads:
        raise refused("index_scores", "weights", f"f32 [{n}, {heads}]", str(weights.shape))
    if len(scores.shape) != 2 or scores.shape[0] != n or pool < 1:
        raise refused("index_scores", "scores", f"f32 [{n}, n_pools]", str(scores.shape))
    n_pools = scores.shape[1]
    if keys.size < n_pools * d:
        raise refused("index_scores", "keys", f"f32 [{n_pools}, {d}]", str(keys.shape))
    if d % 4 == 0 and (keys.ptr | q.ptr) % 16:
        raise refused("index_scores", "keys and q", "16-byte aligned", hex(keys.ptr | q.ptr))
    if n == 0 or n_pools == 0:
        return
    shape, config = _score_plan(n, n_pools, stream.device.limits.n_sms)
    launch(
        stream, config, _kernel(stream.device, "index_scores", **shape),
        q, weights, keys, scores, n, heads, d, pool, n_pools, n_pools, counted,
        float(np.float32(d**-0.5)), float(np.float32(heads**-0.5)), len_d,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _score_plan(n: int, n_pools: int, n_sms: int) -> tuple[dict[str, int], LaunchConfig]:
    for shape in _SCORE_SHAPES:
        groups, at_once = shape["groups"], _THREADS // shape["groups"] * shape["pools"]
        blocks = -(-n_pools // at_once)
        if n * blocks <= 2 * n_sms:  # two blocks live on a multiprocessor at once
            break
    heads = shape["heads"] * groups
    stage = at_once * (shape["slice"] + 4) + heads * shape["slice"]
    floats = 2 * stage + (heads - shape["heads"]) * at_once
    return shape, LaunchConfig(
        (min(blocks, max(1, -(-4 * n_sms // n))), n, 1), _THREADS, 4 * floats
    )


def list_width(top_k: int, pool: int, n_pools: int) -> int:
    """Entries of a list: the rows of the chosen pools, and the longest raw tail."""
    return min(top_k // pool, n_pools) * pool + pool - 1


def scratch_bytes(n: int, n_pools: int) -> int:
    """Bytes of scratch that :func:`select` needs for n queries over ``n_pools`` pools."""
    if n_pools <= _AT_ONCE:
        return 4
    return 4 * n * (-(-n_pools // _LEAST_GROUP) + _segments(n_pools) + n_pools)


def select(
    stream: Stream,
    scores: Buffer,
    out: Buffer,
    scratch: Buffer,
    len_d: Buffer,
    *,
    top_k: int,
    pool: int,
    counted: int = 0,
    width_d: Buffer | None = None,
    always_tail: bool = True,
) -> None:
    """Choose the ``top_k // pool`` best pools of each query and list their rows.

    Score descending, then pool ascending; -0 equals +0; scores that are not finite are never
    chosen. A list has the rows of the chosen pools in ascending order, the rows of the pool that
    is not complete, then -1.

    Parameters
    ----------
    stream : Stream
    scores : Buffer
        f32 ``[n, n_pools]`` of :func:`score`.
    out : Buffer
        i32 ``[n, at least list_width(top_k, pool, n_pools)]``.
    scratch : Buffer
        i32, at least :func:`scratch_bytes`; content undefined.
    len_d, counted
        As in :func:`score`.
    width_d : Buffer, optional
        i32[1]: receives the entries that can differ from -1 in the last list.
    always_tail : bool
        Must be true: there is no selection without the raw tail.
    """
    if len(scores.shape) != 2 or len(out.shape) != 2 or out.shape[0] != scores.shape[0]:
        raise refused("select", "out", f"i32 [{scores.shape[0]}, width]", str(out.shape))
    n, n_pools = scores.shape
    if not 1 <= pool <= MAX_POOL or top_k < 0:
        raise refused("select", "pool", f"1 to {MAX_POOL}, top_k not negative", f"{pool}, {top_k}")
    if not always_tail:
        raise refused("select", "always_tail", "true: rows of an open pool have no key", "false")
    need = list_width(top_k, pool, n_pools)
    if out.shape[1] < need:
        raise refused("select", "out", f"at least {need} entries wide", str(out.shape))
    if scratch.n_bytes < scratch_bytes(n, n_pools):
        raise refused("select", "scratch", f"{scratch_bytes(n, n_pools)} bytes",
                       str(scratch.n_bytes))  # fmt: skip
    if n == 0:
        return
    device, segments = stream.device, _segments(n_pools)
    counts: Buffer | None = None
    lists: Buffer | None = None
    following = device.kind == "cuda" and int(device.arch[3:]) >= 90
    if n_pools > _AT_ONCE:
        n_groups = -(-n_pools // _LEAST_GROUP)
        maxima = scratch.view(0, (n * n_groups,), np.uint32)
        counts = scratch.view(4 * n * n_groups, (n * segments,), np.uint32)
        lists = scratch.view(4 * n * (n_groups + segments), (n * n_pools,), np.uint32)
        launch(
            stream, LaunchConfig((segments, n, 1), 256), _kernel(device, "select_maxima"),
            scores, maxima, pool, n_pools, n_pools, counted, len_d,
        )  # fmt: skip
        launch(
            stream, LaunchConfig((segments, n, 1), 256, programmatic=following),
            _kernel(device, "select_filter"),
            scores, maxima, counts, lists, pool, n_pools, n_pools, top_k, counted, len_d,
        )  # fmt: skip
    launch(
        stream, LaunchConfig(n, 1024, programmatic=following and counts is not None),
        _kernel(device, "select_choose", own=8 if counts is not None or n_pools <= 8192 else 16),
        scores, counts, lists, segments, out, width_d, pool, n_pools, n_pools, top_k,
        out.shape[1], counted, len_d,
    )  # fmt: skip


def _segments(n_pools: int) -> int:
    return max(1, -(-n_pools // _SEGMENT))


def _kernel(device: Device, name: str, **template: object) -> Kernel:
    key = (name, *template.values())
    found: Kernel | None = device.memo.get(key)
    if found is None:
        found = device.memo[key] = registry.kernel(device, name, **template)
    return found
