"""Instruction mix and resources of the hot kernels, from offline compilation."""

import copy
import importlib.util
import sys
from collections import Counter

import pytest

from memra_lowlevel.bench.result import REPOSITORY

spec = importlib.util.spec_from_file_location(
    "kernel_budgets", REPOSITORY / "tools" / "kernel_budgets.py"
)
budgets = importlib.util.module_from_spec(spec)
sys.modules["kernel_budgets"] = budgets
spec.loader.exec_module(budgets)


@pytest.fixture(scope="module")
def record():
    return budgets.load()


@pytest.mark.parametrize("arch", budgets.ARCHS)
def test_hot_kernels_stay_within_their_record(record, arch):
    faults = budgets.differences(budgets.measure([arch]), {arch: record[arch]})
    assert faults == [], "if this is meant: python tools/kernel_budgets.py --write"


def test_kinds_of_instructions():
    mix = Counter(
        {"IMMA.16832.S8.S8.SAT": 4, "LDG.E.128.CONSTANT": 1, "FFMA": 9, "LDGSTS.E.128": 2}
    )
    assert budgets.kinds(mix) == ["int8 tensor cores", "asynchronous copy", "128-bit load"]
    assert budgets.kinds(Counter({"UBLKCP.S.G": 1, "ACQBULK": 1, "LDG.E.64": 1})) == [
        "bulk copy", "waits for its predecessor",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"registers": 8}, "registers, on record"),
        ({"shared_bytes": 4096}, "shared_bytes, on record"),
        ({"local": 2}, "local memory"),
        ({"has": []}, "lost 128-bit load"),
    ],
)
def test_what_breaks_the_record(change, expected):
    good = {"sm_90": {"f<1>": {
        "registers": 64, "shared_bytes": 0, "local": 0, "has": ["128-bit load"],
    }}}  # fmt: skip
    assert budgets.differences(good, good) == []
    now = copy.deepcopy(good)
    for key, value in change.items():
        facts = now["sm_90"]["f<1>"]
        facts[key] = value if key == "has" else facts[key] + value
    (fault,) = budgets.differences(now, good)
    assert expected in fault
    less = copy.deepcopy(good)
    less["sm_90"]["f<1>"]["registers"] = 32
    less["sm_90"]["f<1>"]["has"] = ["bulk copy", "128-bit load"]
    assert budgets.differences(less, good) == []
    assert budgets.differences({"sm_90": {}}, good) == ["sm_90 f<1>: on record, but gone"]
    assert budgets.differences(good, {}) == ["sm_90 f<1>: not on record"]


def test_a_tensor_core_and_a_bulk_copy_are_seen():
    """The disassembler's names for what the record watches, from code that must have them."""
    from memra_lowlevel.compile import compile_source

    text = """
    extern "C" __global__ void k(int* out, const int4* in, unsigned bar, unsigned to) {
        int c[4] = {0, 0, 0, 0};
        int4 a = in[threadIdx.x];
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7},"
                     " {%4,%5}, {%0,%1,%2,%3};"
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], 64, [%2];" :: "r"(to), "l"(in), "r"(bar) : "memory");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        out[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
    }"""
    image = compile_source(text, arch="sm_90", name="watched.cu")
    mix = budgets.opcodes(image.data)[image.entries["k"]]
    assert {
        "int8 tensor cores", "bulk copy", "128-bit load", "waits for its predecessor",
    } <= set(budgets.kinds(mix)), mix  # fmt: skip
