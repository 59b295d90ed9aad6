"""The eight operations, the taps, and the table of public names."""

import inspect

import numpy as np
import pytest

import memra_lowlevel.cache as cache
from memra_lowlevel import speculative
from memra_lowlevel.cache import DflashTapSink, HcTapSink, KvDev, StreamKvDev
from memra_lowlevel.errors import ArgumentError, PlaneError


def test_operations(device, stream):
    dev = StreamKvDev(device, stream)
    zeros = dev.zeros(10)
    assert zeros.dtype == np.float32 and not zeros.to_numpy(stream).any()
    assert dev.uninit(7).shape == (7,) and dev.alloc_u8(9).dtype == np.uint8
    ints = dev.htod_i32([3, -1, 2**31 - 1])
    assert ints.to_numpy(stream).tolist() == [3, -1, 2**31 - 1]
    src = device.from_numpy(np.arange(6, dtype=np.float32), stream)
    copy = dev.clone_dtod(src)
    assert copy.ptr != src.ptr and copy.to_numpy(stream).tolist() == [0, 1, 2, 3, 4, 5]
    dev.copy_into(zeros, 4, src, 3)
    dev.copy_range_into(zeros, 8, src, 4, 2)
    assert zeros.to_numpy(stream).tolist() == [0, 0, 0, 0, 0, 1, 2, 0, 4, 5]
    before = zeros.to_numpy(stream).tobytes()
    for args in ((zeros, 8, src, 0, 3), (zeros, 0, src, 5, 2), (zeros, -1, src, 0, 1)):
        with pytest.raises(ArgumentError):
            dev.copy_range_into(*args)
    with pytest.raises(ArgumentError):
        dev.copy_into(ints, 0, src, 1)
    with pytest.raises(ArgumentError):
        dev.clone_dtod(ints)
    assert zeros.to_numpy(stream).tobytes() == before
    one, address = dev.htod_i32([5]), None
    address = one.ptr
    for value in (-7, 0, 2**31 - 1):
        dev.set_i32_one(one, value)
        assert one.ptr == address and one.to_numpy(stream)[0] == value
    for bad in ((ints, 1), (one, 2**31), (zeros, 1)):
        with pytest.raises(ArgumentError):
            dev.set_i32_one(*bad)


def test_writes_of_one_word_wait_for_nothing(device, stream):
    dev = StreamKvDev(device, stream)
    one = dev.htod_i32([5])
    before = dict(device.driver.counts())
    dev.set_i32_one(one, 9)
    calls = {k: n - before.get(k, 0) for k, n in device.driver.counts().items()}
    assert {k for k, n in calls.items() if n} == {"cuMemsetD32Async"}
    with stream.capture("word") as graph:
        dev.set_i32_one(one, 4)
    exec_ = graph.instantiate()
    exec_.launch(stream)
    assert one.to_numpy(stream)[0] == 4
    exec_.close()


def test_dflash_taps(device, stream):
    sink = DflashTapSink(device, stream, [2, 5], 4, 3, base=2)
    assert sink.offset(0, 0) == 16 and sink.slot_of(5) == 1 and sink.slot_of(3) is None
    sink = DflashTapSink(device, stream, [2, 5], 4, 5, base=2)
    assert sink.offset(1, 0) == 24
    rng = np.random.default_rng(0)
    want = np.zeros((5, 2, 4), np.float32)
    for layer, slot in ((2, 0), (5, 1), (4, None)):
        x = rng.normal(size=(3, 4)).astype(np.float32)
        sink.write(stream, layer, device.from_numpy(x, stream))
        if slot is not None:
            want[2:, slot] = x
    assert np.array_equal(sink.buf.to_numpy(stream), want)
    four = device.zeros((4, 4), np.float32, stream)
    with pytest.raises(PlaneError):
        sink.write(stream, 2, four)
    with pytest.raises(ArgumentError):
        sink.write(stream, 2, device.zeros((2, 5), np.float32, stream))
    assert np.array_equal(sink.buf.to_numpy(stream), want), "refused before a row was written"
    x = device.from_numpy(rng.normal(size=(1, 4)).astype(np.float32), stream)
    with stream.capture("tap") as graph:
        sink.write(stream, 5, x)
    exec_ = graph.instantiate()
    exec_.launch(stream)
    assert np.array_equal(sink.buf.to_numpy(stream)[2, 1], x.to_numpy(stream)[0])
    exec_.close()
    sink.close()


@pytest.mark.parametrize("staged", [False, True])
def test_hc_taps(device, stream, staged):
    sink = HcTapSink(device, stream, [2, 5], 4, 3, base=10, origin=8, device_stage=staged)
    with pytest.raises(PlaneError):
        sink.offset(1, 1)
    sink = HcTapSink(device, stream, [2, 5], 4, 4, base=10, origin=8, device_stage=staged)
    assert sink.offset(1, 1) == 28
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 4)).astype(np.float32)
    sink.write(stream, 5, device.from_numpy(x, stream))
    if staged:
        assert not sink.rows.any()
        sink.drain(stream)
    want = np.zeros((4, 2, 4), np.float32)
    want[2:, 1] = x
    assert np.array_equal(sink.rows, want)
    streams = rng.normal(size=(1, 3, 4)).astype(np.float32)
    sink.put(2, streams)
    np.testing.assert_allclose(sink.rows[2, 0], streams[0].mean(axis=0), rtol=1e-6)
    with pytest.raises(PlaneError):
        sink.put(2, rng.normal(size=(3, 4)))
    with pytest.raises(PlaneError):
        HcTapSink(device, stream, [2, 2], 4, 3)
    with pytest.raises(PlaneError):
        DflashTapSink(device, stream, [], 4, 3)
    sink.close()


def test_a_staged_walk_is_captured_and_drained_once(device, stream):
    sink = HcTapSink(device, stream, [1], 4, 6, device_stage=True)
    x = device.zeros((2, 4), np.float32, stream)
    with stream.capture("staged") as graph:
        sink.write(stream, 1, x)
    exec_ = graph.instantiate()
    rng = np.random.default_rng(2)
    want = np.zeros((6, 1, 4), np.float32)
    for at in (0, 2, 4):
        new = rng.normal(size=(2, 4)).astype(np.float32)
        x.copy_from(stream, new)
        sink.base = at
        exec_.launch(stream)
        sink.drain(stream)
        want[at : at + 2, 0] = new
    assert np.array_equal(sink.rows, want)
    exec_.close()
    sink.close()


FUNCTIONS = {
    "kv_cache_formats": "", "kv_blk_bytes": "k v", "gkv_on": "", "wkv_on": "", "kv_fp8_on": "",
    "swa_ring_on": "", "set_swa_ring_default": "on", "swa_ring_rows": "window max_ctx chunk slack",
    "swa_retain_from": "first_row window base", "prime_chunk_tokens": "n",
    "cache_bytes_per_token": "model", "cache_bytes_per_token_for_layers": "model lo hi",
    "cache_bytes_per_token_for_plan": "model plan lo hi", "cache_ring_bytes_per_token": "model",
    "cache_ring_bytes_per_token_for_layers": "model lo hi",
    "cache_ring_bytes_per_token_for_plan": "model plan lo hi", "cache_ring_row_cap": "model",
    "cache_ring_row_cap_for_plan": "model plan",
    "latent_kv_bytes_per_token_for_plan": "model plan lo hi", "index_ring_rows": "max_ctx",
    "index_ring_rows_for": "explicit max_ctx", "index_ring_default_rows": "max_ctx",
    "index_plane_physical_row": "ring_rows pool abs_row",
    "index_ring_take": "ring pool ready cur remaining",
}  # fmt: skip
METHODS = {
    ("KvLayer", "allocate"): "device max_ctx n_kv_heads head_dim head_dim_v k_format v_format "
    "window ring",
    ("KvLayer", "append"): "stream k v", ("KvLayer", "advance"): "stream n",
    ("KvLayer", "attend"): "stream q out scale window sinks softcap lse counted numeric",
    ("KvLayer", "prepare_kv_append"): "stream retain_from n", ("KvLayer", "set_len"): "stream n",
    ("KvLayer", "physical_rows"): "start end",
    ("KvRing", "append_plan"): "len retain_from n", ("KvRing", "apply_rebase"): "new_base",
    ("KvRing", "physical_range"): "start end", ("KvRing", "can_rewind_to"): "len",
    ("KvRing", "restore_plan"): "len",
    ("RecurLayer", "conv_assemble_and_roll"): "stream", ("RecurLayer", "step"): "stream",
    ("RecurLayer", "scan"): "stream", ("RecurLayer", "select_slot"): "stream",
    ("Cache", "new"): "dev model max_ctx", ("Cache", "new_ppn"): "devs model max_ctx fence",
    ("Cache", "snapshot"): "", ("Cache", "snapshot_into"): "", ("Cache", "can_rollback"): "snap",
    ("Cache", "rollback"): "snap accept", ("Cache", "mark_tainted"): "",
    ("Cache", "ensure_usable"): "path", ("Cache", "has_swa_ring"): "", ("Cache", "describe"): "",
    ("Cache", "close"): "",
}  # fmt: skip
SPECULATIVE = {
    ("DraftChain", "capture"): "stream body io planes k_max", ("DraftChain", "replay"): "stream k",
    ("DraftChain", "rewind"): "stream to", ("DraftChain", "describe"): "",
    ("SpecRound", "__init__"): "target chain k", ("SpecRound", "step"): "stream",
}  # fmt: skip


def parameters(thing):
    return set(inspect.signature(thing).parameters)


def test_every_name_with_its_parameters():
    for name, want in FUNCTIONS.items():
        assert parameters(getattr(cache, name)) >= set(want.split()), name
    for module, table in ((cache, METHODS), (speculative, SPECULATIVE)):
        for (owner, method), want in table.items():
            assert parameters(getattr(getattr(module, owner), method)) >= set(want.split()), method
    assert parameters(speculative.rewind_amounts) == {"k", "accepted"}
    assert (cache.INDEX_RING_WORKING_ROWS, cache.PRIME_CHUNK_MAX_TOKENS) == (5120, 4096)
    assert cache.SWA_REWIND_SLACK_ROWS == 512 and cache.KV_FP8_FORCE.get() in (-1, 0, 1)
    operations = {n for n in dir(KvDev) if not n.startswith("_")} - {"device", "stream"}
    assert operations == {
        "zeros", "uninit", "alloc_u8", "htod_i32", "clone_dtod", "copy_into", "copy_range_into",
        "set_i32_one",
    }  # fmt: skip
    for module in (cache, speculative):
        for name in module.__all__:
            assert getattr(module, name) is not None


def test_fields_of_a_layer(device):
    layer = cache.KvLayer.allocate(device, 8, 1, 64)
    for name in ("k", "v", "kv_dim_k", "kv_dim_v", "k_tok_bytes", "v_tok_bytes", "len", "len_d"):
        assert getattr(layer, name) is not None, name
    assert layer.ring is None and layer.base_d is None
    layer.close()
    recur = cache.RecurLayer.allocate(device, cache.Recurrent(96, 4, 1024), 2)
    assert recur.conv_state.shape == (96, 3) and recur.ssm_state.shape == (1024,)
    assert recur.n_slots == 3 and recur.slot_d.shape == (1,)
    recur.close()
