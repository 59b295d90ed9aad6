from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memra_lowlevel.compile import (
    DEFAULT_ARCHS,
    CompileOptions,
    Job,
    compile_file,
    compile_many,
    compile_source,
    logs,
    nvrtc,
)
from memra_lowlevel.compile.build import plain_entries
from memra_lowlevel.errors import ArchUnsupported, ArgumentError, CompileError, HeaderNotFound

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float a[48];
#pragma unroll
  for (int i = 0; i < 48; i++) a[i] = x[i * blockDim.x + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 48; i++) x[i * 77 + threadIdx.x] = a[i] * a[(i * 7 + 1) % 48];
}
extern "C" __global__ void tidy(float* x) {
  __shared__ float s[96];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[95 - threadIdx.x];
}
"""


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
def test_every_architecture(arch: str, sample: str) -> None:
    image = compile_source(sample, arch=arch, name_expressions=["scale<64, float>"], cache=False)
    assert (image.kind, image.arch, image.rung, image.want) == ("cubin", arch, "exact", arch)
    assert image.data[:4] == b"\x7fELF"
    assert set(image.entries) == {"plain", "scale<64, float>"}
    symbol = image.entries["scale<64, float>"]
    assert symbol.startswith("_Z5scaleILi64Ef") and image.symbol("scale<64,float>") == symbol
    assert image.layouts == {symbol: ((0, 8), (8, 8), (16, 4)), "plain": ((0, 8), (8, 8))}
    assert [p.ctype for p in image.signatures["scale<64, float>"].params] == [
        "float*", "float*", "int",
    ]  # fmt: skip
    assert set(image.resources) == {symbol, "plain"}
    assert all(4 <= r.registers <= 64 and r.spills_bytes == 0 for r in image.resources.values())


def test_ptx_by_name(sample: str) -> None:
    image = compile_source(sample, arch="compute_80", cache=False)
    assert (image.kind, image.rung) == ("ptx", "ptx") and b".target sm_80" in image.data
    assert image.entries == {"plain": "plain"} and not image.layouts


def test_lower_rungs_are_taken_and_said(
    sample: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that does not know the device: with its list shortened, the ladder is walked."""
    import dataclasses

    real = nvrtc.library()
    older = dataclasses.replace(real, archs=(75, 80, 86, 90, 100))
    monkeypatch.setattr(nvrtc, "library", lambda: older)
    family = compile_source(sample, arch="sm_103", cache=False)
    assert (family.arch, family.rung, family.want) == ("sm_100f", "family", "sm_103")
    ptx = compile_source(sample, arch="sm_120", cache=False)
    assert (ptx.arch, ptx.rung, ptx.kind) == ("compute_100", "ptx", "ptx")
    compile_source(sample, arch="sm_120", cache=False)
    assert [r.getMessage()[:6] for r in caplog.records] == ["sm_103", "sm_120"]
    with pytest.raises(ArchUnsupported):
        compile_source(sample, arch="sm_103a", cache=False)


def test_kernels_in_headers_and_plain_mangled_names(tmp_path: Path) -> None:
    (tmp_path / "inner.cuh").write_text("__global__ void mangled(int* a, short n) { *a = n; }\n")
    text = '#include "inner.cuh"\nnamespace n { __global__ void hidden(int* a) { *a = 1; } }\n'
    text += "__global__ void twice(int* a) { *a = 1; }\n"
    text += "__global__ void twice(int* a, int n) { *a = n; }\n"
    image = compile_source(
        text, arch="sm_80", include_dirs=[tmp_path], name_expressions=["n::hidden"], cache=False
    )
    # Overloads have no plain name; what sits in a namespace is asked for by expression.
    assert image.entries == {"mangled": "_Z7mangledPis", "n::hidden": "_ZN1n6hiddenEPi"}
    assert [p.name for p in image.signatures["mangled"].params] == ["a", "n"]
    assert [p.name for p in image.signatures["n::hidden"].params] == ["a"]


def test_resources_and_spills() -> None:
    image = compile_source(SPILLING, arch="sm_90", cache=False)
    tidy, spilling = image.resources["tidy"], image.resources["spilling"]
    assert (tidy.spills_bytes, tidy.local_bytes, tidy.shared_bytes, tidy.barriers) == (0, 0, 384, 1)
    assert spilling.registers == 32 and spilling.spills_bytes > 0 and spilling.local_bytes > 0
    loose = SPILLING.replace("__launch_bounds__(1024, 2)", "")
    free = compile_source(loose, arch="sm_90", cache=False).resources["spilling"]
    tight = compile_source(loose, arch="sm_90", options={"max_registers": 24}, cache=False)
    assert free.registers > 32 and free.spills_bytes == 0
    assert tight.resources["spilling"].registers <= 24
    assert tight.resources["spilling"].spills_bytes > 0


def test_fusion_happens_only_where_it_is_written() -> None:
    text = """extern "C" __global__ void k(float* x) {
        x[0] = x[1] * x[2] + x[3];
        x[4] = fmaf(x[5], x[6], x[7]); }"""
    ptx = compile_source(text, arch="compute_80", cache=False).data.decode()
    assert ptx.count("fma.rn") == 1 and ptx.count("mul.f32") + ptx.count("mul.rn.f32") == 1


def test_diagnostics_have_positions(tmp_path: Path) -> None:
    (tmp_path / "part.cuh").write_text("\n\n__device__ int f() {\n  return nothing;\n}\n")
    text = '#include "part.cuh"\n\n__global__ void k(int* a) {\n'
    text += "    int unused = 1;\n    a = undefined_name;\n}\n"
    with pytest.raises(CompileError) as caught:
        compile_source(text, arch="sm_90", name="k.cu", include_dirs=[tmp_path])
    error = caught.value
    errors = [d for d in error.diagnostics if d.severity == "error"]
    assert [(d.file, d.line, d.column) for d in errors] == [("part.cuh", 4, 10), ("k.cu", 5, 9)]
    assert errors[0].message == 'identifier "nothing" is undefined'
    assert errors[1].source_line == "    a = undefined_name;"
    warnings = [d for d in error.diagnostics if d.severity == "warning"]
    assert ("k.cu", 4, 9) in [(d.file, d.line, d.column) for d in warnings]
    assert "part.cuh:4:10" in str(error) and "1 more" in str(error) and "undefined" in error.log


def test_warnings_of_good_code_are_kept() -> None:
    image = compile_source("__global__ void k() { int unused = 1; }", arch="sm_90", cache=False)
    assert [(d.severity, d.line, d.column) for d in image.diagnostics] == [("warning", 1, 27)]


def test_context_of_an_instance_is_in_the_message() -> None:
    text = "template <class T> __device__ T g(T t) { return t.x; }\n"
    text += "__global__ void k(int* a) { *a = g(*a); }"
    with pytest.raises(CompileError) as caught:
        compile_source(text, arch="sm_90")
    (found,) = caught.value.diagnostics
    assert "must have class type" in found.message and "[with T=int]" in found.message


def test_errors_of_the_assembler() -> None:
    with pytest.raises(CompileError) as caught:
        compile_source('__global__ void k() { asm volatile("foo.bar;"); }', arch="sm_90")
    assert caught.value.diagnostics[0].file == "<ptx>" and caught.value.diagnostics[0].line > 0
    text = "__global__ void k(int* a) { __shared__ int s[100000]; s[threadIdx.x] = 1; "
    text += "__syncthreads(); *a = s[5]; }"
    with pytest.raises(CompileError, match="too much shared data"):
        compile_source(text, arch="sm_90")


def test_wrong_options_and_names(sample: str) -> None:
    with pytest.raises(CompileError, match="--bogus"):
        compile_source(sample, arch="sm_90", options=CompileOptions(extra=("--bogus",)))
    with pytest.raises(ArgumentError, match=r"'fmad'.*one of std, lineinfo"):
        compile_source(sample, arch="sm_90", options={"fmad": True})
    with pytest.raises(CompileError, match=r"'lost<3>' names no kernel.*plain, scale"):
        compile_source(sample, arch="sm_90", name_expressions=["scale<1, int>", "lost<3>"])


def test_header_needed_under_a_condition() -> None:
    text = "#if {}\n#include <nope.h>\n#endif\n__global__ void k() {{}}\n"
    assert compile_source(text.format(0), arch="sm_90").entries
    with pytest.raises(HeaderNotFound, match=r"source\.cu:2") as caught:
        compile_source(text.format(1), arch="sm_90")
    assert caught.value.name == "nope.h" and caught.value.searched and caught.value.log


def test_defines(sample: str) -> None:
    text = sample + "#ifdef EXTRA\n__global__ void extra(int* a) { *a = EXTRA; }\n#endif\n"
    assert "extra" not in compile_source(text, arch="sm_90", defines={"EXTRA": False}).entries
    assert "extra" in compile_source(text, arch="sm_90", defines={"EXTRA": 7}).entries


def test_many_keep_order_and_errors(sample: str) -> None:
    jobs = [Job(sample, a) for a in ("sm_75", "sm_90")] + [Job("int x = ;", "sm_90", name="bad.cu")]
    first, second, bad = compile_many(jobs, workers=3, cache=False)
    assert isinstance(bad, CompileError) and "bad.cu" in str(bad)
    assert not isinstance(first, CompileError) and not isinstance(second, CompileError)
    assert (first.arch, second.arch) == ("sm_75", "sm_90")


def test_own_kernels_agree_with_their_signatures() -> None:
    """Every parameter that the source names has the size that the compiler gave it."""
    from memra_lowlevel.compile import kernel_sources
    from memra_lowlevel.compile.signature import CTYPES

    checked = 0
    for image in compile_many([Job(path, "sm_90") for path in kernel_sources()]):
        assert not isinstance(image, CompileError), image
        for name, symbol in image.entries.items():
            declared, layout = image.signatures[name].params, image.layouts[symbol]
            assert len(declared) == len(layout), name
            for p, (_, size) in zip(declared, layout, strict=True):
                assert p.name, name
                assert size == (8 if p.pointer else CTYPES[p.ctype][0]), (name, p)
                checked += 1
    assert checked > 20


def test_relative_files_are_found_below_cuda_src(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    from memra_lowlevel.compile import cuda_src_root, kernel_sources

    name = kernel_sources()[0].relative_to(cuda_src_root()).as_posix()
    assert compile_file(name, arch="sm_80").name == name


def test_missing_compiler_is_named() -> None:
    """Without the bindings nothing fails at import, and the error says what to install."""
    program = (
        "import sys; sys.modules['cuda.bindings.nvrtc'] = None\n"
        "from memra_lowlevel.compile import compile_source\n"
        "from memra_lowlevel.errors import ToolkitMismatch\n"
        "try: compile_source('', arch='sm_90')\n"
        "except ToolkitMismatch as e: print(e)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'nvidia-cuda-nvrtc-cu12" in out.stdout


def test_import_loads_no_compiler() -> None:
    program = (
        "import sys, memra_lowlevel.compile\n"
        "print([m for m in sys.modules if m.startswith('cuda.')])\n"
        "print(any('nvrtc' in line for line in open('/proc/self/maps')))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.split("\n")[:2] == ["[]", "False"]


def test_log_parser_on_foreign_text() -> None:
    assert logs.diagnostics("") == () and logs.diagnostics("hello\n  world ^\n") == ()
    assert logs.resources("Used 3 registers\nnonsense") == {}
    (internal,) = logs.diagnostics("a.cu(3): internal error: assertion failed\n")
    assert (internal.severity, internal.line) == ("error", 3)
    assert plain_entries(["_Z1fPi", "_Z1fi", "_Z2ghILi3EEvv", "k"]) == {"k": "k"}
