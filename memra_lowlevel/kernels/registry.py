"""Every kernel of the library: where it is, which instances exist, what proves it right.

A family module (``kv_append``, ``model`` …) calls :func:`register` when it is imported;
:func:`all_specs` imports all families first. :func:`kernel` compiles for the device's architecture
and loads once per device.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from ..compile import CompiledImage, Job, compile_each, cuda_src_root, recorded
from ..errors import ArgumentError, CaptureForbidden, CompileError
from ..runtime.recording import forbid

if TYPE_CHECKING:
    from ..compile import Kernel
    from ..runtime import Device

__all__ = [
    "Instance",
    "KernelSpec",
    "Tolerance",
    "all_specs",
    "kernel",
    "kernels",
    "loaded",
    "preload",
    "register",
    "spec",
]

Instance = Mapping[str, Any]
"""Values of the template fields of one instance, by name."""


@dataclass(frozen=True)
class Tolerance:
    """How far a kernel may be from its oracle, and why.

    Attributes
    ----------
    kind : str
        ``"bitwise"``: equal bytes; ``"relative"``: largest difference over the largest magnitude
        of the oracle's row; ``"absolute"``: largest difference.
    value : float
    reason : str
    """

    kind: Literal["bitwise", "relative", "absolute"]
    value: float
    reason: str


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of ``cuda_src``.

    Attributes
    ----------
    name : str
        Name in this registry.
    source : str
        Path below ``cuda_src``.
    entry : str
        Kernel name; of a template the name expression with fields: ``"append_kv<{k}, {v}>"``.
    instances : tuple of mapping
        The instances that are compiled ahead of time and checked for every architecture; others
        of the same template are compiled when they are asked for. ``({},)`` without fields.
    oracle : str
        ``"module:function"`` that computes the same independently.
    tolerance : Tolerance
    edges : tuple of str
        Cases that the tests of this kernel cover.
    hot : bool
        Runs in every decode step: no spills and no local memory are allowed.
    numeric_class : str
        ``"exact"`` …: the name under which a model states what it computes with.
    same_bits : bool
        No transcendentals: host device and GPU give the same bytes.
    pdl : str
        ``"waits"``: the kernel reads and writes nothing that another one writes before it has
        waited for its predecessor, but what its caller calls settled, so it may be launched
        ``programmatic``; else ``"none"``.
    """

    name: str
    source: str
    entry: str
    oracle: str
    tolerance: Tolerance
    instances: tuple[Instance, ...] = ({},)
    edges: tuple[str, ...] = ()
    hot: bool = False
    numeric_class: str = "exact"
    same_bits: bool = False
    pdl: Literal["none", "waits"] = "none"
    fields: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = (name for _, name, _, _ in Formatter().parse(self.entry) if name)
        object.__setattr__(self, "fields", tuple(dict.fromkeys(names)))

    def expression(self, **template: Any) -> str:
        """Name expression of one instance.

        Raises
        ------
        ArgumentError
            If ``template`` does not have exactly the fields of the entry.
        """
        if set(template) != set(self.fields):
            raise ArgumentError(
                f"{self.name}: instance {template or '{}'}, but the template has the fields "
                f"{', '.join(self.fields) or 'none'}",
                kernel=self.name,
                expected=", ".join(self.fields),
                got=", ".join(template),
            )
        return self.entry.format(**template)

    @property
    def expressions(self) -> tuple[str, ...]:
        """Name expressions of the instances that are compiled ahead of time."""
        return tuple(self.expression(**instance) for instance in self.instances)


_TOGETHER = 6  # instances of a source that are compiled and loaded as one module

_specs: dict[str, KernelSpec] = {}
_families_loaded = False
_lock = threading.RLock()


def register(*specs: KernelSpec) -> None:
    """Add specs; a second one of the same name must be equal."""
    for new in specs:
        if _specs.setdefault(new.name, new) != new:
            raise ArgumentError(
                f"two different kernels are registered as {new.name!r}: {_specs[new.name].source} "
                f"and {new.source}",
                kernel=new.name,
            )


def all_specs() -> tuple[KernelSpec, ...]:
    """Return the specs of all families, by name."""
    global _families_loaded
    if not _families_loaded:
        package = importlib.import_module(__package__)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{__package__}.{module.name}")
        _families_loaded = True
    return tuple(_specs[name] for name in sorted(_specs))


def spec(name: str) -> KernelSpec:
    """Return the spec of a name."""
    if name not in _specs:
        all_specs()
    if name not in _specs:
        raise ArgumentError(
            f"there is no kernel {name!r}; known are {', '.join(sorted(_specs))}", kernel=name
        )
    return _specs[name]


def kernel(device: Device, name: str, **template: Any) -> Kernel:
    """Compile, load and return one instance; kept for the life of the device's context.

    The first call for an instance may take a second; the families have a ``prepare`` for it.

    Raises
    ------
    CompileError, CaptureForbidden
        The latter if the first call for an instance comes during a capture.
    """
    return kernels(device, [(name, template)])[0]


def loaded(device: Device, name: str, **template: str) -> bool:
    """Whether an instance is loaded, so that :func:`kernel` gives it in a capture too."""
    found = spec(name)
    return (__name__, found.source, found.expression(**template)) in device.memo


def kernels(device: Device, wanted: Sequence[tuple[str, Instance]]) -> list[Kernel]:
    """Return several instances; those of one source that are missing share one compilation."""
    memo = device.memo
    pairs = [(spec(name), template) for name, template in wanted]
    keys = [(__name__, s.source, s.expression(**template)) for s, template in pairs]
    missing = [key for key in dict.fromkeys(keys) if key not in memo]
    if missing:
        _check_capture(missing)
        _note(device.arch, keys)
        with _lock:
            _load(device, [key for key in missing if key not in memo])
    return [memo[key] for key in keys]


def preload(
    device: Device, specs: Iterable[KernelSpec] | None = None, *, workers: int | None = None
) -> int:
    """Compile, in parallel or from the cache, and load every ahead-of-time instance.

    Afterwards nothing of ``specs`` is compiled or loaded any more, so that it may first be launched
    inside a capture. A start that finds everything in the cache does not load NVRTC.

    Parameters
    ----------
    device : Device
    specs : iterable of KernelSpec, optional
        Default: all.
    workers : int, optional
        Threads; default one per core.

    Returns
    -------
    int
        Modules that were loaded.
    """
    chosen = specs if specs is not None else all_specs()
    keys = dict.fromkeys((__name__, s.source, name) for s in chosen for name in s.expressions)
    _note(device.arch, keys)
    with _lock:
        return _load(device, [key for key in keys if key not in device.memo], workers)


def compiled(
    arch: str, specs: Iterable[KernelSpec] | None = None, *, workers: int | None = None
) -> list[CompiledImage]:
    """Compile what :func:`preload` would load on a device of an architecture, without one."""
    chosen = specs if specs is not None else all_specs()
    keys = dict.fromkeys((__name__, s.source, name) for s in chosen for name in s.expressions)
    return [image for _, _, image in _images(arch, _jobs(keys), workers)]


def images(
    arch: str, specs: Iterable[KernelSpec] | None = None, *, workers: int | None = None
) -> dict[str, CompiledImage]:
    """Compile the ahead-of-time instances for an architecture, one image per source.

    Several sources are compiled in parallel threads.
    """
    by_source: dict[str, list[str]] = {}
    for s in specs if specs is not None else all_specs():
        by_source.setdefault(s.source, []).extend(s.expressions)
    jobs = [(source, names) for source, names in by_source.items()]
    found = {source: image for source, _, image in _images(arch, jobs, workers)}
    return {source: found[source] for source in by_source}


def oracle(name: str) -> Callable[..., Any]:
    """Return the oracle of a kernel."""
    module, _, function = spec(name).oracle.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _check_capture(missing: Sequence[tuple[str, str, str]]) -> None:
    """Refuse to compile under capture in the words of whoever has steps, not modules."""
    try:
        forbid("cuModuleLoadData", what=f"kernel {', '.join(name for _, _, name in missing)}")
    except CaptureForbidden as error:
        error.args = (
            f"{error} Which kernel a step takes depends on its number of rows: run the same step "
            "once before the capture, with as many rows, or load the usual kernels with "
            "kernels.registry.preload(device).",
        )
        raise


def _note(arch: str, keys: Iterable[tuple[str, str, str]]) -> None:
    """Note the whole request, of which another process may lack another part."""
    by_source: dict[str, list[str]] = {}
    for _, source, name in keys:
        by_source.setdefault(source, []).append(name)
    for source, names in by_source.items():
        recorded.note(Job(cuda_src_root() / source, arch, _templates(names)))


def _load(device: Device, keys: Iterable[tuple[str, str, str]], workers: int | None = None) -> int:
    jobs = _jobs(keys)
    # A module is loaded while the next images are still read or compiled.
    for source, names, image in _images(device.arch, jobs, workers):
        module = device.module(image)
        for name in names:
            device.memo[(__name__, source, name)] = module.kernel(name)
    return len(jobs)


def _jobs(keys: Iterable[tuple[str, str, str]]) -> list[tuple[str, Sequence[str]]]:
    """Divide the instances of each source, so that no thread has most of the work to itself."""
    by_source: dict[str, list[str]] = {}
    for _, source, name in keys:
        by_source.setdefault(source, []).append(name)
    jobs: list[tuple[str, Sequence[str]]] = []
    for source, names in by_source.items():
        n = -(-len(names) // _TOGETHER)
        jobs += [(source, names[i::n]) for i in range(n)]
    return jobs


def _images(
    arch: str, jobs: Sequence[tuple[str, Sequence[str]]], workers: int | None
) -> Iterator[tuple[str, Sequence[str], CompiledImage]]:
    # The largest first, so that no thread begins a long one when the others are done.
    root = cuda_src_root()
    order = sorted(jobs, key=lambda job: -len(job[1]))
    made = compile_each(
        [Job(root / source, arch, _templates(names)) for source, names in order], workers=workers
    )
    for (source, names), image in zip(order, made, strict=True):
        if isinstance(image, CompileError):
            raise image
        yield source, names, image


def _templates(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in set(names) if "<" in name))
