"""The probes of doctor: each looks at one thing and answers, whatever it finds.

The standard library only; everything else is imported inside the probe that asks for it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["DOORS", "PROBES", "Probe"]

DOORS: Mapping[str, str] = {
    "MEMRA_CACHE_DIR": "folder of all caches",
    "MEMRA_CUBINS": "store of kernels compiled ahead of time",
    "MEMRA_COMMIT": "commit that result files name",
    "MEMRA_TEST_SCALE": "length of the long tests",
    "MEMRA_KV_K": "format of cached keys",
    "MEMRA_KV_V": "format of cached values",
    "MEMRA_KV_FP8": "e4m3 planes",
    "MEMRA_SWA_RING": "rings for sliding windows",
    "MEMRA_DSA_INDEX_RING": "rows of the index ring",
    "MEMRA_GEMMA_GKV": "formats of global planes",
    "MEMRA_GEMMA_WKV": "formats of windowed planes",
    "MEMRA_DRAFT": "a draft model shares the cache",
    "MEMRA_RECORD_JOBS": "folder where processes note what they compile",
    "CMF_KV": "storage of LayerKvCache",
    "CMF_O1": "layers of LayerKvCache with bounded memory",
    "CXX": "C++ compiler of the host device",
    "CUDA_VISIBLE_DEVICES": "devices that the driver shows",
    "XDG_CACHE_HOME": "parent of the default cache folder",
}
"""Environment variables that the library, or what it stands on, reads."""

_WITHOUT_GPU = "Device() takes the host device, if it can be built"

_REFUSALS = {
    100: "the driver is here but sees no device (check CUDA_VISIBLE_DEVICES, and /dev/nvidia* in "
    "containers)",
    802: "the system is not ready yet (on NVSwitch machines the fabric manager must run)",
    803: "libcuda and the kernel module have different versions: reboot, or use the libcuda of the "
    "installed driver",
    804: "forward compatibility is not available on this hardware: remove the compat libraries "
    "from LD_LIBRARY_PATH",
}


@dataclass(frozen=True)
class Probe:
    """One answer.

    Attributes
    ----------
    name : str
    state : str
        ``"ok"``, ``"missing"`` or ``"warning"``.
    found : str
        What there is, in one line.
    advice : str
        What is lost without it, what still works, what to do; empty where all is well.
    data : dict
        The same for programs.
    """

    name: str
    state: str
    found: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def _python() -> Probe:
    version = platform.python_version()
    found = f"{version} ({sys.executable})"
    old = sys.version_info < (3, 10)
    advice = "Python 3.10 or newer is needed" if old else ""
    return Probe("python", "warning" if old else "ok", found, advice, {"version": version})


def _platform() -> Probe:
    linux = sys.platform == "linux"
    found = f"{platform.platform()}, {os.cpu_count()} cores"
    advice = "" if linux else "only Linux is supported; the host device needs its memory calls"
    return Probe("platform", "ok" if linux else "warning", found, advice)


def _package() -> Probe:
    from importlib import metadata

    try:
        version = metadata.version("memra-lowlevel")
    except metadata.PackageNotFoundError:
        version = "not installed, run from its folder"
    root = _ours("compile.source").cuda_src_root()
    n = len(list(root.rglob("*.cu")))
    found = f"memra-lowlevel {version}; {n} kernel sources in {root}"
    return Probe("package", "ok", found, "", {"version": version, "cuda_src": str(root)})


def _dependencies() -> Probe:
    from importlib import metadata

    versions, absent = {}, []
    for name in ("numpy", "cffi", "cuda-pathfinder", "platformdirs", "filelock"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
    found = ", ".join(f"{k} {v}" for k, v in versions.items()) or "none"
    if absent:
        advice = f"nothing but this report works without: pip install {' '.join(absent)}"
        return Probe("dependencies", "missing", found, advice, versions)
    return Probe("dependencies", "ok", found, "", versions)


def _native() -> Probe:
    native = _ours("native")
    if native.available():
        return Probe("compiled module", "ok", "used for launches")
    return Probe(
        "compiled module",
        "missing",
        str(native.reason() or "not built"),
        "everything works through Python, launches cost some µs more; for speed install a C "
        "compiler and Python's headers (apt-get install gcc python3-dev), then pip install again",
    )


def _compiler() -> Probe:
    lost = (
        "without a C++ compiler there is no host device; install one (apt-get install g++) or "
        "pip install ziglang. GPUs are not concerned"
    )
    try:
        found = _ours("driver.host.build").find_compiler()
        text = f"{found.version} ({' '.join(found.command)})"
        return Probe("c++ compiler", "ok", text, "", {"command": list(found.command)})
    except ImportError:
        names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
        path = next((p for n in names if n and (p := shutil.which(n))), None)
        state = "ok" if path else "missing"
        return Probe("c++ compiler", state, path or "none", "" if path else lost)
    except Exception as error:
        if type(error).__name__ != "CompilerNotFound":
            raise
        return Probe("c++ compiler", "missing", "none", lost)


def _bindings() -> Probe:
    from importlib import metadata

    try:
        version = metadata.version("cuda-bindings")
        importlib.import_module("cuda.bindings")
    except ImportError as error:  # PackageNotFoundError is one
        return Probe(
            "bindings",
            "missing",
            f"cuda.bindings cannot be imported ({error})",
            "no GPU and no NVRTC without them; the host device needs neither. "
            "pip install 'cuda-python==12.9.*'",
        )
    return Probe("bindings", "ok", f"cuda.bindings {version}", "", {"version": version})


def _nvrtc() -> Probe:
    try:
        library = _ours("compile.nvrtc").library()
    except Exception as error:
        if type(error).__name__ != "ToolkitMismatch":
            raise
        return Probe(
            "nvrtc",
            "missing",
            str(error).split(". ")[0],
            "kernels for GPUs cannot be compiled here; ready-made kernels (MEMRA_CUBINS) load, and "
            "the host device needs no NVRTC. pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'",
        )
    version = f"{library.version[0]}.{library.version[1]}"
    archs = [f"sm_{n}" for n in library.archs]
    found = f"{version}, {archs[0]} to {archs[-1]} ({library.path})"
    data = {"version": version, "path": library.path, "digest": library.digest, "archs": archs}
    return Probe("nvrtc", "ok", found, "", data)


def _driver() -> Probe:
    cuda = _libcuda()
    if cuda is None:
        return Probe(
            "driver",
            "missing",
            "libcuda.so.1 cannot be loaded",
            "no GPU can be used, only the host device, if it can be built. Install NVIDIA's "
            "driver, or start the container with --gpus all",
        )
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    try:
        kernel = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        kernel = "kernel module not visible"
    return Probe("driver", "ok", f"CUDA {version}; {kernel}", "", {"version": version})


def _devices() -> Probe:
    cuda = _libcuda()
    if cuda is None:
        return Probe("devices", "missing", "no GPU (no driver)", _WITHOUT_GPU)
    code = int(cuda.cuInit(0))
    count = ctypes.c_int()
    if code == 0:
        cuda.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        why = _REFUSALS.get(code or 100, f"cuInit answers {code}")
        return Probe("devices", "missing", "no GPU", f"{why}. {_WITHOUT_GPU}")
    devices = [_device(cuda, i) for i in range(count.value)]
    text = "; ".join(
        f"cuda:{i} {d['name']} {d['arch']} {d['total_bytes'] / 2**30:.0f} GiB"
        for i, d in enumerate(devices)
    )
    return Probe("devices", "ok", text, "", {"devices": devices})


def _device(cuda: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device, value, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    capability = []
    for attribute in (75, 76):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    arch = f"sm_{capability[0]}{capability[1]}"
    return {"name": name.value.decode(), "arch": arch, "total_bytes": size.value}


def _host_device() -> Probe:
    path = _ours("driver.host.build").runtime_library()
    return Probe("host device", "ok", f"built ({path})", "", {"path": str(path)})


def _cache() -> Probe:
    folder = _ours("paths").cache_root()
    data: dict[str, Any] = {"folder": str(folder)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as scratch:
            scratch.write(b"x" * 4096)
            scratch.flush()
    except OSError as error:
        data["writable"] = False
        return Probe(
            "cache",
            "warning",
            f"{folder} cannot be written ({error.strerror or error})",
            "kernels are compiled anew by every process; everything works. Name another folder "
            "in MEMRA_CACHE_DIR",
            data,
        )
    kernels = [p.stat().st_size for p in folder.glob("kernels/*.kernel")]
    free = shutil.disk_usage(folder).free
    data |= {"writable": True, "kernels": len(kernels), "kernel_bytes": sum(kernels)}
    found = f"{folder}: {len(kernels)} kernels, {sum(kernels) / 1e6:.1f} MB; "
    return Probe("cache", "ok", f"{found}{free / 1e9:.1f} GB free", "", data)


def _environment() -> Probe:
    here = {k: v for k, v in sorted(os.environ.items()) if k in DOORS}
    unknown = sorted(k for k in os.environ if k.startswith("MEMRA_") and k not in DOORS)
    found = ", ".join(f"{k}={v}" for k, v in here.items()) or "no variable set"
    advice = f"unknown, and read by nothing: {', '.join(unknown)}" if unknown else ""
    data = {"set": here, "unknown": unknown}
    return Probe("environment", "warning" if unknown else "ok", found, advice, data)


def _model() -> Probe:
    from importlib import metadata

    folder = _ours("paths").cache_root()
    files = sorted(folder.rglob("*.gguf"))
    data = {"files": [str(f) for f in files]}
    try:
        reader = f"gguf {metadata.version('gguf')}"
    except metadata.PackageNotFoundError:
        return Probe(
            "model",
            "missing",
            "gguf is not installed",
            "the demo reads its model with it: pip install 'gguf==0.19.0' regex",
            data,
        )
    there = ", ".join(f.name for f in files) or "no model fetched yet (the demo fetches one)"
    return Probe("model", "ok", f"{reader}; {there}", "", data)


PROBES: dict[str, Callable[[], Probe]] = {
    "python": _python,
    "platform": _platform,
    "package": _package,
    "dependencies": _dependencies,
    "compiled module": _native,
    "c++ compiler": _compiler,
    "host device": _host_device,
    "bindings": _bindings,
    "nvrtc": _nvrtc,
    "driver": _driver,
    "devices": _devices,
    "cache": _cache,
    "environment": _environment,
    "model": _model,
}
"""The probes by name, in the order of the report."""


def _ours(module: str) -> Any:
    """Import a module of this package."""
    return importlib.import_module(f"{__package__.rpartition('.')[0]}.{module}")


def _libcuda() -> ctypes.CDLL | None:
    for name in ("libcuda.so.1", "libcuda.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
