import warnings

import pytest

from memra_lowlevel.cache import policy
from memra_lowlevel.cache.index_ring import (
    INDEX_RING_WORKING_ROWS,
    index_plane_physical_row,
    index_ring_default_rows,
    index_ring_rows,
    index_ring_rows_for,
    index_ring_take,
)
from memra_lowlevel.errors import FormatUnsupported, PlaneError
from memra_lowlevel.formats import E4M3, F16, Q4_0, Q5_1, Q8_0


def test_formats(monkeypatch):
    assert policy.kv_cache_formats() == (Q8_0, Q5_1)
    assert policy.kv_blk_bytes() == (34, 24)
    assert policy.kv_blk_bytes(Q8_0, Q4_0) == (34, 18)
    assert policy.kv_blk_bytes(E4M3, F16) == (32, 64)
    assert policy.kv_blk_bytes(k=F16) == (64, 24)
    for k, v, want in [
        ("fp8", "q4_0", (E4M3, Q4_0)),
        ("", "", (Q8_0, Q5_1)),
        ("q8_0", "fp8", (Q8_0, E4M3)),
    ]:
        monkeypatch.setenv("MEMRA_KV_K", k)
        monkeypatch.setenv("MEMRA_KV_V", v)
        policy.forget_environment()
        assert policy.kv_cache_formats() == want
    monkeypatch.setenv("MEMRA_KV_K", "q5_1")
    assert policy.kv_cache_formats() == (Q8_0, E4M3), "read once"


@pytest.mark.parametrize(
    ("name", "text"), [("MEMRA_KV_K", "q4_0"), ("MEMRA_KV_V", "Q5_1"), ("MEMRA_KV_V", "0")]
)
def test_unknown_format_is_refused(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    policy.forget_environment()
    with pytest.raises(FormatUnsupported, match=name):
        policy.kv_cache_formats()


@pytest.mark.parametrize(
    ("env", "force", "want"),
    [
        ({}, -1, (True, True, False)),
        ({"MEMRA_GEMMA_GKV": "0"}, -1, (False, True, False)),
        ({"MEMRA_GEMMA_GKV": "x", "MEMRA_DRAFT": "m"}, 1, (True, False, True)),
        ({"MEMRA_GEMMA_WKV": "1", "MEMRA_DRAFT": "m", "MEMRA_KV_FP8": "0"}, 1, (True, True, False)),
        ({"MEMRA_GEMMA_WKV": "0", "MEMRA_KV_FP8": "1"}, 0, (True, False, True)),
        ({"MEMRA_KV_FP8": "yes"}, 1, (True, True, False)),
    ],
)
def test_class_doors(monkeypatch, env, force, want):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    policy.KV_FP8_FORCE.set(force)
    assert (policy.gkv_on(), policy.wkv_on(), policy.kv_fp8_on()) == want
    base = (Q8_0, Q5_1)
    for kind, on in zip(("gemma_global", "gemma_window", "full"), want, strict=True):
        assert policy.class_formats(kind) == ((E4M3, E4M3) if on else base)


def test_force_has_three_positions():
    with pytest.raises(PlaneError):
        policy.KV_FP8_FORCE.set(2)
    assert policy.KV_FP8_FORCE.get() == -1


def test_ring_door(monkeypatch):
    assert not policy.swa_ring_on()
    assert policy.prime_chunk_tokens(10_000) == 10_000
    policy.set_swa_ring_default(True)
    assert policy.swa_ring_on()
    assert policy.prime_chunk_tokens(10_000) == 4096 and policy.prime_chunk_tokens(7) == 7
    monkeypatch.setenv("MEMRA_SWA_RING", "0")
    policy.forget_environment()
    assert not policy.swa_ring_on()
    monkeypatch.setenv("MEMRA_SWA_RING", "yes")
    policy.forget_environment()
    with pytest.warns(RuntimeWarning, match="MEMRA_SWA_RING"):
        assert policy.swa_ring_on()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy.swa_ring_on()
    assert policy.doors()["MEMRA_SWA_RING"] == "yes"


def test_index_ring_rows(monkeypatch):
    cases = [
        (None, 4096, None),
        (None, 5120, None),
        (None, 5121, 5120),
        (16, 64, 16),
        (64, 64, None),
        (0, 1 << 20, None),
    ]
    for explicit, max_ctx, want in cases:
        assert index_ring_rows_for(explicit, max_ctx) == want
    for max_ctx in (8192, 262_144, 1 << 20):
        assert (
            index_ring_rows(max_ctx) == index_ring_default_rows(max_ctx) == INDEX_RING_WORKING_ROWS
        )
    monkeypatch.setenv("MEMRA_DSA_INDEX_RING", "18")
    policy.forget_environment()
    assert index_ring_rows(8192) == 18 and index_ring_default_rows(8192) == 5120
    monkeypatch.setenv("MEMRA_DSA_INDEX_RING", "on")
    policy.forget_environment()
    with pytest.warns(RuntimeWarning, match="MEMRA_DSA_INDEX_RING"):
        assert index_ring_rows(8192) == 5120
    with pytest.raises(PlaneError):
        index_ring_rows_for(-1, 10)


def test_index_physical_row():
    assert [index_plane_physical_row(18, 4, r) for r in (0, 15, 16, 17, 31, 32)] == [
        0,
        15,
        0,
        1,
        15,
        0,
    ]
    assert index_plane_physical_row(0, 4, 12345) == 12345
    with pytest.raises(PlaneError):
        index_plane_physical_row(1, 4, 0)
    for rows in range(4, 40):
        assert rows // 4 * 4 >= rows - 4 + 1


def test_index_ring_take():
    assert index_ring_take(0, 4, 0, 0, 1 << 20) == 1 << 20
    assert index_ring_take(64, 4, 0, 0, 1024) == 64
    assert all(61 <= index_ring_take(64, 4, cur // 4, cur, 1024) <= 64 for cur in range(64))
    assert index_ring_take(64, 4, 4, 16, 1) == 1
    assert index_ring_take(16, 4, 0, 64, 1) is None
    assert index_ring_take(16, 4, 0, 16, 1) is None
    assert index_ring_take(16, 4, 0, 15, 1) == 1
    for max_ctx, steps in ((8192, 2), (262_144, 52), (1 << 20, 205)):
        cur = ready = count = 0
        while cur < max_ctx:
            cur += index_ring_take(5120, 4, ready, cur, max_ctx - cur)
            ready, count = cur // 4, count + 1
        assert count == steps
