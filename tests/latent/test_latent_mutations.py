"""Faults planted in kernels and book-keeping: the comparison with the oracles must notice each."""

import functools

import numpy as np
import pytest
from latent_layers import HEADS, POOL, RANK, D, Driver, Sequence
from latent_rig import Rig, same

from memra_lowlevel import Device, errors
from memra_lowlevel.cache.latent_tail import IndexTail
from memra_lowlevel.compile import compile_source, cuda_src_root
from memra_lowlevel.kernels import latent_index
from memra_lowlevel.reference import latent as oracle

SEQ, TOP_K = Sequence(64, seed=5), 16
SEQ.weights[40:] = np.abs(SEQ.weights[40:])
SEQ.index_q[48:56] = 0  # every score is +0 or -0 there
SEQ.weights[48:52] *= -1

INDEX = (
    ("reader takes a smaller ring", ": plane + (ring > 0 ? a % ring : a)",
     ": plane + (ring > 0 ? a % (ring - 4) : a)"),
    ("slot off by one", "int64_t(len_d[0]) + first;", "int64_t(len_d[0]) + first + 1;"),
    ("keys are not collapsed", "key = key + e / total * row(s)[c];", "key = row(s)[c];"),
    ("gates without offsets", "row(s)[d + c] + ape[s * d + c] - high", "row(s)[d + c] - high"),
    ("no causality in scores", "p < visible ? total[j] : -INF_F32", "total[j]"),
    ("products are not fused", "dot[h][j] = fmaf(q_at[h * SLICE + c], key, dot[h][j]);",
     "dot[h][j] = dot[h][j] + q_at[h * SLICE + c] * key;"),
    ("scores are not cut at 0", "scaled > 0.0f || scaled != scaled ? scaled : 0.0f", "scaled"),
    ("head scale is applied last", "__fmul_rn(positive, weight)",
     "__fmul_rn(__fmul_rn(positive, head_scale), own_weights[head])"),
)  # fmt: skip
SELECT = (
    ("no raw tail", "int32_t(visible % pool)", "0"),
    ("-0 below +0", "__float_as_uint(score + 0.0f)", "__float_as_uint(score)"),
    ("ties from the end", "keys[at] = near[i], pools[at] = thread * OWN + i, at++;",
     "keys[n - 1 - at] = near[i], pools[n - 1 - at] = thread * OWN + i, at++;"),
    ("a bound above the wanted key", "high.z < wanted || key == 0 ? 1u : key;", "key + 1024u;"),
    ("segments in another order", "to_segment = blockIdx.x",
     "to_segment = gridDim.x - 1 - blockIdx.x"),
    ("one pool too few", "top_k / pool < own ? top_k / pool : own",
     "top_k / pool < own ? top_k / pool - 1 : own"),
    ("no causality in the choice", "(int64_t(len_d[0]) + row + 1 - counted) / pool;",
     "(int64_t(len_d[0]) + 3 + 1 - counted) / pool;"),
)  # fmt: skip


@functools.cache
def host():
    return Device("host")


@functools.cache
def clean():
    """Keys and lists: by the kernels as they are, and by the oracles from those keys."""
    stream = host().stream(name="clean")
    a = Driver(stream, SEQ, 64)
    a.append(64)
    keys = a.keys()
    wanted = oracle.pool_keys(SEQ.index, SEQ.ape, POOL)
    assert np.abs(keys - wanted).max() < 1e-5
    lists = []
    for at in range(64):
        score = oracle.scores(SEQ.index_q[at : at + 1], SEQ.weights[at : at + 1], keys, at, POOL)
        lists.append(oracle.select(score[0], at + 1, TOP_K, POOL, width=TOP_K + POOL - 1))
    a.close()
    stream.close()
    return keys, np.array(lists)


def scenario():
    """A ring of 16, chunks of 7, a rejected round now and then; True if all is as it should be."""
    keys, lists = clean()
    draft = Sequence(64, seed=6)
    draft.ape = SEQ.ape
    stream = host().stream(name="mutant")
    a = Driver(stream, SEQ, 64, ring=16)
    try:
        while a.layer.len < 64:
            at = a.layer.len
            n = min(7, 64 - at)
            if 0 < at < 56:
                a.append(5, seq=draft)
                a.layer.set_len(stream, at)
            a.append(n, advance=False)
            a.layer.advance(stream, n)
            got = a.select(n, top_k=TOP_K)
            if not same(got, lists[at : at + n]):
                return False
        return same(a.keys(), keys) and scores_and_zeros(stream, keys)
    finally:
        a.close()
        stream.close()


def scores_and_zeros(stream, keys):
    """Bits of scores, also where no list depends on them; zeros of both signs."""
    rig = Rig(stream)
    q, w = SEQ.index_q[20:23], SEQ.weights[20:23]
    wanted = oracle.scores(q, w, keys, 29, POOL)
    if not same(rig.score(q, w, keys, 29, POOL)[:, :8], wanted[:, :8]):
        return False
    zeros = np.where(np.arange(32) % 3 == 0, np.float32(0), np.float32(-0.0))[None]
    many = np.random.default_rng(7).standard_normal((1, 5000), np.float32)
    for scores, top_k, at_once in ((zeros, TOP_K, 16384), (zeros, TOP_K, 0), (many, 400, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(latent_index, "_AT_ONCE", at_once)
            listed, _ = rig.select(scores, 20_002, top_k, POOL)
        if listed[0].tolist() != oracle.select(scores[0], 20_003, top_k, POOL).tolist():
            return False
    return True


def test_without_a_fault_the_comparison_holds():
    assert scenario()


def plant(monkeypatch, file, old, new):
    """Let every kernel of a file come from the changed source."""
    text = (cuda_src_root() / "latent" / file).read_text()
    assert old in text, old
    changed = text.replace(old, new)
    names = {
        "index.cu": {("index_append",): "index_append",
                     ("index_scores", 8, 2, 4, 32): "index_scores<8, 2, 4, 32>"},
        "select.cu": {
            ("select_maxima",): "select_maxima", ("select_filter",): "select_filter",
            ("select_choose", 8): "select_choose<8>",
        },
    }[file]  # fmt: skip
    templates = tuple(n for n in names.values() if "<" in n)
    image = compile_source(
        changed, arch="host", name=file, name_expressions=templates,
        include_dirs=(cuda_src_root(),),
    )  # fmt: skip
    module = host().module(image)
    for key, name in names.items():
        monkeypatch.setitem(host().memo, key, module.kernel(name))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [pytest.param("index.cu", *f[1:], id=f[0]) for f in INDEX]
    + [pytest.param("select.cu", *f[1:], id=f[0]) for f in SELECT],
)
def test_a_fault_in_a_kernel_is_noticed(monkeypatch, file, old, new):
    clean()
    plant(monkeypatch, file, old, new)
    assert not scenario()


BOOKS = {
    "the keys are not clamped": ("truncate", lambda self: None),
    "a build starts one pool late": (
        "_drained",
        lambda self, slot, n: iter([(0, n)]),
    ),
    "the ring is not drained": (
        "_drained",
        lambda self, slot, n: self.__class__._captured(self, n) if n < 3 else iter([(0, n)]),
    ),
}


@pytest.mark.parametrize("fault", BOOKS)
def test_a_fault_in_the_books_is_noticed(monkeypatch, fault):
    clean()
    name, wrong = BOOKS[fault]
    monkeypatch.setattr(IndexTail, name, wrong)
    with pytest.raises(errors.MemraError) as caught:
        assert scenario(), "noticed by its values"
        pytest.fail("not noticed")
    assert "index_pools_ready" in str(caught.value)


def test_a_lost_tail_that_nobody_checks_gives_wrong_keys(monkeypatch):
    """What the check of the ring guards against does happen."""
    stream = host().stream(name="lapped")
    a, b = (Driver(stream, SEQ, 64, ring=r) for r in (8, None))
    monkeypatch.setattr(IndexTail, "has_tail_of", lambda self, length: True)
    for d in (a, b):
        d.append(30)
        d.layer.set_len(stream, 18)
        d.append(9)
    assert not same(a.keys(), b.keys())
    monkeypatch.undo()
    c = Driver(stream, SEQ, 64, ring=8)
    c.append(30)
    with pytest.raises(errors.RewindRefused):
        c.layer.set_len(stream, 18)
    for d in (a, b, c):
        d.close()
    stream.close()
    assert D and HEADS and RANK
