"""Launch configurations, and what device and kernel allow of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import expect
from ..driver.table import FuncAttribute
from ..driver.trace import caller
from ..errors import ArgumentError, LaunchLimit

if TYPE_CHECKING:
    from ..compile import Kernel
    from .launch import Launcher

__all__ = ["ConfigLike", "LaunchConfig", "check_limits", "config_of", "dim3", "occupancy"]

Dim3 = tuple[int, int, int]
Extent = int | Sequence[int]
_PORTABLE_CLUSTER = 8
_FIELDS = {"grid", "block", "shared_bytes", "cluster", "programmatic", "cooperative"}


@dataclass(frozen=True, eq=True)
class LaunchConfig:
    """How a kernel is launched.

    Parameters
    ----------
    grid, block : int or up to three ints
        Blocks of the grid and threads of a block; missing axes are 1.
    shared_bytes : int
        Dynamic shared memory; above 48 KiB the library opts in by itself.
    cluster : int or up to three ints, optional
        Blocks of a cluster; must divide the grid.
    programmatic : bool
        Programmatic dependent launch: the kernel may start before its predecessor ends and must
        wait by itself before it reads what that one wrote.
    cooperative : bool
        All blocks must be resident at once; checked against the occupancy.
    """

    grid: Extent
    block: Extent
    shared_bytes: int = 0
    cluster: Extent | None = None
    programmatic: bool = False
    cooperative: bool = False
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "grid", dim3("grid", self.grid))
        put(self, "block", dim3("block", self.block))
        put(self, "shared_bytes", expect.integer("shared_bytes", self.shared_bytes, high=None))
        if self.cluster is not None:
            put(self, "cluster", dim3("cluster", self.cluster))
        key = (self.grid, self.block, self.shared_bytes, self.cluster, self.programmatic)
        put(self, "_hash", hash((key, self.cooperative)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def n_threads(self) -> int:
        """Threads of a block."""
        return math.prod(dim3("block", self.block))

    @property
    def n_blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(dim3("grid", self.grid))


ConfigLike = LaunchConfig | Mapping[str, Any]


def occupancy(kernel: Kernel, config: ConfigLike) -> int:
    """Count the blocks of ``kernel`` that one multiprocessor can hold at once."""
    config = config_of(config)
    return kernel.module.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        kernel.handle, config.n_threads, config.shared_bytes
    )


def check_limits(launcher: Launcher, config: LaunchConfig) -> None:
    """Refuse what device or kernel cannot do; opt in to large shared memory."""
    context, kernel = launcher.context, launcher.kernel
    limits, attributes = context.limits, kernel.attributes
    for what, asked, allowed in (
        ("grid", dim3("grid", config.grid), limits.grid),
        ("block", dim3("block", config.block), limits.block),
    ):
        for axis, n, most in zip("xyz", asked, allowed, strict=True):
            if not 1 <= n <= most:
                raise _limit(kernel, f"{what}.{axis}", most, n, f"1 … {most}")
    own = attributes.get("max_threads_per_block", limits.threads_per_block)
    most = min(limits.threads_per_block, own)
    if config.n_threads > most:
        text = f"at most {most}"
        if own < limits.threads_per_block:
            text += (
                ", by the kernel's __launch_bounds__ or registers; launch smaller blocks, or give "
                "__launch_bounds__ more in its source"
            )
        raise _limit(kernel, "threads per block", most, config.n_threads, text)
    static = attributes.get("shared_size_bytes", 0)
    room = limits.shared_optin_bytes - static
    if not 0 <= config.shared_bytes <= room:
        text = f"0 … {room} beside {static} static bytes"
        raise _limit(kernel, "shared_bytes", room, config.shared_bytes, text)
    _check_cluster(launcher, config)
    if config.cooperative:
        if not limits.cooperative:
            raise _limit(kernel, "cooperative launch", 0, 1, f"not offered by {context}")
        resident = occupancy(kernel, config) * limits.n_sms
        if config.n_blocks > resident:
            text = f"at most {resident} blocks resident at once"
            raise _limit(kernel, "cooperative grid", resident, config.n_blocks, text)
    if config.programmatic and (context.arch == "host" or int(context.arch[3:]) < 90):
        raise _limit(kernel, "programmatic launch", 0, 1, "sm_90 or later")
    if config.shared_bytes + static > limits.shared_bytes > launcher.dynamic_limit:
        # The driver's own limit is 48 KiB, static shared memory included.
        kernel.set_attribute(FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, room)
        launcher.dynamic_limit = limits.shared_optin_bytes


def _check_cluster(launcher: Launcher, config: LaunchConfig) -> None:
    if config.cluster is None:
        return
    kernel, context = launcher.kernel, launcher.context
    cluster = dim3("cluster", config.cluster)
    size = math.prod(cluster)
    if not context.limits.clusters:
        raise _limit(kernel, "cluster", 1, size, f"clusters are not offered by {context}")
    if size > _PORTABLE_CLUSTER:
        raise _limit(kernel, "cluster", _PORTABLE_CLUSTER, size, f"at most {_PORTABLE_CLUSTER}")
    for axis, n, of in zip("xyz", dim3("grid", config.grid), cluster, strict=True):
        if of < 1 or n % of:
            raise _limit(kernel, f"cluster.{axis}", n, of, f"a divisor of grid.{axis} = {n}")


def _limit(kernel: Kernel, what: str, limit: int, got: int, expected: str) -> LaunchLimit:
    return LaunchLimit(
        f"{kernel.name}: {what} = {got}, allowed: {expected} (from {caller()}).",
        what=what,
        limit=limit,
        got=got,
    )


def config_of(config: ConfigLike) -> LaunchConfig:
    """Give a configuration itself, or one made of a mapping of its fields."""
    if isinstance(config, LaunchConfig):
        return config
    expected = (
        "a LaunchConfig, or a mapping with grid, block and perhaps shared_bytes, cluster, "
        "programmatic, cooperative"
    )
    if not isinstance(config, Mapping):
        raise expect.refusal("launch configuration", config, expected)
    fields = dict(config)
    unknown = [repr(key) for key in fields if key not in _FIELDS]
    missing = [repr(key) for key in ("grid", "block") if key not in fields]
    if unknown or missing:
        got = ", ".join(
            [f"the unknown key {key}" for key in unknown] + [f"no key {key}" for key in missing]
        )
        raise ArgumentError(
            f"launch configuration: a mapping with {got} (from {caller()}). Expected {expected}.",
            name="launch configuration", expected=expected, got=got,
        )  # fmt: skip
    return LaunchConfig(**fields)


def dim3(what: str, value: Extent) -> Dim3:
    """Give one to three extents as three; missing ones are 1."""
    dims = value if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(dims) <= 3:
        raise ArgumentError(
            f"{what} = {value!r}: give one to three extents.", name=what,
            expected="1 to 3 ints", got=repr(value),
        )  # fmt: skip
    # One extent says itself what it is; of several the whole is shown.
    shown = what if dims == (value,) else f"{what} = {value!r}: an extent"
    x, y, z = (*(expect.integer(shown, d, high=None) for d in dims), 1, 1)[:3]
    return x, y, z
