"""The set of kernels whose cold compilation is timed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from memra_lowlevel import formats
from memra_lowlevel.bench import compiling
from memra_lowlevel.kernels import kv_attend, kv_attend_f16, kv_attend_mma, kv_attend_simt, registry

ROOM = 232_448
DEVICE = SimpleNamespace(kind="cuda", arch="sm_90")
PAIRS = [
    ("Q8_0", "Q5_1"), ("Q8_0", "Q8_0"), ("Q8_0", "Q4_0"), ("E4M3", "E4M3"), ("F16", "F16"),
    ("BF16", "BF16"),
]  # fmt: skip
HEADS = {64: 8, 128: 4, 256: 2}


@pytest.fixture(scope="module")
def found():
    return {name for spec in compiling.default_set() for name in spec.expressions}


@pytest.mark.parametrize("n_queries", [1, 4])
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_what_a_row_takes_is_in_it(found, pair, head_dim, n_queries):
    k, v = (getattr(formats, name) for name in pair)
    n_kv_heads = HEADS[head_dim]
    chosen = kv_attend.choose(DEVICE, k, v, head_dim, n_kv_heads=n_kv_heads, rows=8192).kernel
    if chosen == "mma":
        for rows in (1, kv_attend_mma.MOST_ROWS):
            most = kv_attend_mma._block_warps(head_dim, rows)
            shape = kv_attend_mma._shape(head_dim, n_kv_heads, n_queries, ROOM, most)
            name = f"attend_mma<{head_dim}, {shape.queries}, {shape.heads}>"
            assert name in found
    elif chosen == "f16":
        shape = kv_attend_f16._shape(k, v, head_dim, n_kv_heads, n_queries, ROOM)
        of_it = f"{pair[0]}, {pair[1]}, {head_dim}, {shape.sets}, {shape.heads}, {shape.stages}"
        assert f"attend_f16<{of_it}>" in found
    else:
        queries = kv_attend_simt.queries_at_once(n_queries, head_dim)
        assert f"attend_partial<{pair[0]}, {pair[1]}, {head_dim}, {head_dim}, {queries}>" in found
    combine = "attend_combine" if chosen == "simt" else "attend_mma_combine"
    assert f"{combine}<{head_dim}>" in found
    assert {f"append_few<{pair[0]}, {pair[1]}>", f"append_kv<{pair[0]}, {pair[1]}>"} <= found


def test_attention_for_nothing_else_is_in_it(found):
    attention = [name for name in found if name.startswith("attend_") and "_combine" not in name]
    # One a pair and head size, and one for short planes of large heads.
    assert len(attention) == len(PAIRS) * len(HEADS) + 1


def test_every_other_kernel_of_a_step_is_in_it(found):
    for spec in registry.all_specs():
        family = spec.source.partition("/")[0]
        if family in ("model", "speculative") or spec.name in ("append_heads", "move_rows"):
            assert set(spec.expressions) <= found, spec.name
        if family in ("latent", "recur", "layer_kv", "bench"):
            assert not set(spec.expressions) & found, spec.name


def test_cores_that_share_nothing_come_first(tmp_path, monkeypatch):
    for cpu, siblings in {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}.items():
        told = tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        told.parent.mkdir(parents=True)
        told.write_text(f"{siblings}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert compiling.cores_apart(2, str(tmp_path)) == [0, 2]
    assert compiling.cores_apart(3, str(tmp_path)) == [0, 2, 1]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 3})
    assert compiling.cores_apart(2, str(tmp_path)) == [1, 3]
    assert compiling.cores_apart(2, str(Path(tmp_path, "none"))) == [1, 3]  # nothing is told
