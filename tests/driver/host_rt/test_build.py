"""Finding a compiler, the cache of built libraries, and what a refused source says."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from memra_lowlevel import errors
from memra_lowlevel.compile.hostcxx import compile_host, plain_kernels
from memra_lowlevel.driver.host import build, runner
from memra_lowlevel.driver.host.translate import launch_bounds

TEXT = '#include "common/device.cuh"\nKERNEL void one(int* out) { out[0] = VALUE; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, but for the runtime that this process has loaded."""
    loaded = build.runtime_library()
    folder = tmp_path / "cache"
    (folder / "host").mkdir(parents=True)
    (folder / "host" / loaded.name).write_bytes(loaded.read_bytes())
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(folder))
    return folder / "host"


def compiled(value: int, **options) -> Path:
    return compile_host(TEXT, [], [runner.cuda_src()], {"VALUE": value}, **options).path


def result(path: Path) -> int:
    import ctypes

    func = runner.get_function(runner.load(path), "one")
    out = runner.alloc(4)
    pointer = ctypes.c_uint64(out)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    runner.run(func, 1, 1, 0, ctypes.addressof(params))
    value = np.zeros(1, np.int32)
    runner.copy_out(value, out)
    runner.free(out)
    return int(value[0])


def test_the_key_covers_defines_flags_and_text(cache):
    paths = {compiled(1), compiled(2), compiled(1, check=True), compiled(1, sanitize="undefined")}
    assert len(paths) == 4 and all(p.parent == cache for p in paths)
    assert compiled(1) in paths
    assert (result(compiled(1)), result(compiled(2))) == (1, 2)
    leftovers = [p.name for p in cache.iterdir() if p.suffix not in (".so", ".lock")]
    assert not leftovers


def test_the_key_covers_included_files(cache, tmp_path):
    (tmp_path / "value.cuh").write_text("#pragma once\n#define VALUE 5\n")
    source = tmp_path / "k.cu"
    source.write_text('#include "common/device.cuh"\n#include "value.cuh"\n' + TEXT.split("\n")[1])
    first = compile_host(source, [], [runner.cuda_src()]).path
    assert compile_host(source, [], [runner.cuda_src()]).path == first and result(first) == 5
    (tmp_path / "value.cuh").write_text("#pragma once\n#define VALUE 6\n")
    second = compile_host(source, [], [runner.cuda_src()]).path
    assert second != first and result(second) == 6


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty"])
def test_a_damaged_library_is_built_again_with_one_log_line(cache, caplog, damage):
    path = compiled(7)
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "one bit":
        data[len(data) // 2] ^= 4
    else:
        data = bytearray()
    path.unlink()
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert result(compiled(7)) == 7
    assert sum("damaged" in r.getMessage() for r in caplog.records) == 1


def test_many_processes_build_the_same_kernel_at_once(cache):
    program = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        from test_build import compiled, result
        assert result(compiled(11)) == 11
        """
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    jobs = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    for job in jobs:
        _, err = job.communicate(timeout=120)
        assert job.returncode == 0, err.decode()
    assert (
        len([p for p in cache.iterdir() if p.name.startswith("kernel_") and p.suffix == ".so"]) == 1
    )


def test_a_cache_that_cannot_be_written_is_told_of_once(tmp_path, monkeypatch, caplog):
    built = build.runtime_library()
    (build._private_folder() / built.name).write_bytes(built.read_bytes())  # spares a build
    file = tmp_path / "file"
    file.write_text("in the way of the folder")
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(file / "cache"))
    for value in (21, 22):
        path = compiled(value)
        assert str(tmp_path) not in str(path) and result(path) == value
    assert len([r for r in caplog.records if "cannot write" in r.getMessage()]) == 1


def test_compile_errors_are_data(cache):
    text = TEXT.replace("VALUE", "undefined_name") + "KERNEL void two() { int x = ; }\n"
    with pytest.raises(errors.CompileError, match=r"source.cu:2: .*undefined_name") as caught:
        compile_host(text, [], [runner.cuda_src()])
    found = [d for d in caught.value.diagnostics if d.severity == "error"]
    assert [(Path(d.file).name, d.line) for d in found] == [("source.cu", 2), ("source.cu", 3)]
    assert "undefined_name" in found[0].source_line and caught.value.log
    assert not [
        p for p in cache.iterdir() if p.name.startswith((".", "kernel_")) and p.suffix != ".lock"
    ]
    with pytest.raises(errors.CompileError, match="cannot read"):
        compile_host(Path("/nonexistent.cu"))
    with pytest.raises(errors.HeaderNotFound, match=r"missing\.cuh") as lost:
        compile_host('#include "missing.cuh"\n', [], [runner.cuda_src()])
    assert str(runner.cuda_src()) in lost.value.searched


def test_the_compiler_is_cxx_or_named_as_missing(tmp_path, monkeypatch):
    log = tmp_path / "log"
    wrapper = tmp_path / "mycxx"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec c++ "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", f"{wrapper} -DUNUSED")
    assert build.find_compiler().command == (str(wrapper), "-DUNUSED")
    monkeypatch.delenv("CXX")
    assert build.find_compiler().command == ("c++",)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.CompilerNotFound, match=r"apt install g\+\+") as caught:
        build.find_compiler()
    assert "clang++: not found" in str(caught.value)


def test_plain_kernels_are_found_and_templates_are_not():
    text = """
    // KERNEL void commented(int* x)
    /* __global__ void also(int*); */
    #define MAKE(name) KERNEL void name() {}
    KERNEL void plain(int* x) {}
    extern "C" __global__ void spelled() {}
    KERNEL __launch_bounds__(128, 2) void bounded(const float* x) {}
    extern "C" __global__ void __launch_bounds__(THREADS(4)) late() {}
    template <int D, typename T = float> __global__ void templated(T* x) {}
    template <int A>
    __global__ void __launch_bounds__(256) another() {}
    __device__ bool less(int a, int b) { return a > b; }
    __global__ void after() { const char* s = "KERNEL void quoted("; }
    """
    assert plain_kernels(text) == ["plain", "spelled", "bounded", "late", "after"]


BOUNDED = """#include "common/device.cuh"
#define MOST(n) (32 * (n))
template <int A, int B> __device__ constexpr int times() { return A * B; }
KERNEL void plain(int* x) {}
KERNEL __launch_bounds__(128, 2) void before(int* x) {}
extern "C" __global__ void __launch_bounds__(MOST(3)) by_macro(int* x);
extern "C" __global__ void __launch_bounds__(MOST(3)) by_macro(int* x) {}
#undef MOST
namespace inner {
constexpr int UNIT = 16;
// A remark; with braces { and a template <int Z>.
template <int A, int B = 4>
__global__ void __launch_bounds__(times<A,
                                        B>() * UNIT, 1)
    product(int* x) {}
}
#if 1
template <class T>
__global__ void __launch_bounds__(sizeof(T) * 64) sized(T* x) {}
#else
template <class T>
__global__ void __launch_bounds__(1) sized(T* x) {}
#endif
template <int A> __global__ void unbounded(int* x) {}
__noinline__ __global__ void __launch_bounds__(32) with_words(int* x) {}
KERNEL void __launch_bounds__(4096) too_many(int* x) {}
KERNEL void last(int* x) { x[0] = __LINE__; }
"""


def test_launch_bounds_are_read_with_the_scope_and_parameters_of_their_kernel():
    names = ("inner::product<2>", "inner::product<2, 3>", "sized<double>", "unbounded<1>")
    image = compile_host(BOUNDED, names, [runner.cuda_src()])
    module = runner.load(image.path)
    found = {name: runner.max_threads(runner.get_function(module, name)) for name in image.entries}
    runner.unload(module)
    assert found == {
        "plain": 1024, "before": 128, "by_macro": 96, "with_words": 1024, "too_many": 1024,
        "last": 1024, "inner::product<2>": 128, "inner::product<2, 3>": 96,
        "sized<double>": 512, "unbounded<1>": 1024,
    }  # fmt: skip


def test_what_is_added_for_launch_bounds_moves_no_line():
    translated, bounded = launch_bounds(BOUNDED)
    assert bounded == {"before", "by_macro", "product", "sized", "too_many"}
    lines, before = translated.splitlines(), BOUNDED.splitlines()
    assert len(lines) == len(before)
    assert all(line.endswith(old) for line, old in zip(lines, before, strict=True))
    assert launch_bounds("KERNEL void f() {}") == ("KERNEL void f() {}", frozenset())


UNCLEAR = {
    "bounds that a directive chooses": """
KERNEL void
#ifdef SMALL
__launch_bounds__(64)
#else
__launch_bounds__(256)
#endif
k(int* x) {}
""",
    "a specialisation with others": """
template <int W> __global__ void __launch_bounds__(W * 32) k(int* x) {}
template <> __global__ void __launch_bounds__(512) k<1>(int* x) {}
""",
    "a default that stands at the declaration": """
template <int W, int X = 2> __global__ void k(int* x);
template <int W, int X> __global__ void __launch_bounds__(W * X) k(int* x) {}
""",
    "a name from elsewhere": """
namespace a { __global__ void __launch_bounds__(64) k(int* x) {} }
using a::k;
""",
    "overloads": """
template <class T, decltype(T(0) / 1.5) = 0> __global__ void __launch_bounds__(64) k(T* x) {}
template <class T, decltype(T(0) / 1.5) = 0> __global__ void __launch_bounds__(32) k(T* x, T* y) {}
KERNEL void plain(int* x) {}
""",
}


@pytest.mark.parametrize("text", UNCLEAR.values(), ids=UNCLEAR)
def test_a_bound_that_nobody_can_ask_for_is_none(text):
    """Never one of another kernel, and never a reason not to compile."""
    wanted = {"k<1>", "k<3>"} if "template <int W>" in text else set()
    wanted |= {"k<3>"} if "int X = 2" in text else set()
    wanted |= {"k"} if "using" in text else set()
    image = compile_host(
        '#include "common/device.cuh"\n' + text, sorted(wanted), [runner.cuda_src()]
    )
    module = runner.load(image.path)
    found = {name: runner.max_threads(runner.get_function(module, name)) for name in image.entries}
    runner.unload(module)
    assert found and set(found.values()) == {1024} and wanted <= found.keys()
