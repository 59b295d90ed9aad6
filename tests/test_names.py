"""Every documented name is there, under its name and with its parameters."""

from __future__ import annotations

import importlib
import inspect

import pytest

FUNCTIONS = {
    "memra_lowlevel.cache": {
        "kv_cache_formats": "",
        "kv_blk_bytes": "k v",
        "gkv_on": "",
        "wkv_on": "",
        "kv_fp8_on": "",
        "swa_ring_on": "",
        "set_swa_ring_default": "on",
        "swa_ring_rows": "window max_ctx chunk slack",
        "swa_retain_from": "first_row window base",
        "prime_chunk_tokens": "n",
        "cache_bytes_per_token": "model",
        "cache_bytes_per_token_for_layers": "model lo hi",
        "cache_bytes_per_token_for_plan": "model plan lo hi",
        "cache_ring_bytes_per_token": "model",
        "cache_ring_bytes_per_token_for_layers": "model lo hi",
        "cache_ring_bytes_per_token_for_plan": "model plan lo hi",
        "cache_ring_row_cap": "model",
        "cache_ring_row_cap_for_plan": "model plan",
        "latent_kv_bytes_per_token_for_plan": "model plan lo hi",
        "index_ring_rows": "max_ctx",
        "index_ring_rows_for": "explicit max_ctx",
        "index_ring_default_rows": "max_ctx",
        "index_plane_physical_row": "ring_rows pool abs_row",
        "index_ring_take": "ring pool ready cur remaining",
    },
    "memra_lowlevel.layer_kv": {"hash64": "data", "attention_head": "q k v"},
    "memra_lowlevel.formats": {"encode": "", "decode": "", "block_bytes": ""},
    "memra_lowlevel.speculative": {"rewind_amounts": "k accepted"},
    "memra_lowlevel": {
        "launch": "stream config kernel",
        "compile_source": "source",
        "compile_file": "path",
    },
}

CLASSES = {
    "memra_lowlevel": {
        "Device": "stream event alloc empty zeros from_numpy pinned arena module close",
        "Stream": "record wait sync capture close closed",
        "Event": "close closed",
        "Buffer": "ptr view copy_from copy_to fill to_numpy close",
        "PinnedBuffer": "array ptr close",
        "Arena": "take close",
        "LaunchConfig": "",
        "Module": "kernel",
        "Kernel": "",
        "GraphExec": "launch upload describe audit update close closed",
        "DeviceCounter": "set value",
    },
    "memra_lowlevel.cache": {
        "KvLayer": "allocate append advance attend prepare_kv_append set_len physical_rows len",
        "KvRing": "append_plan apply_rebase physical_range can_rewind_to restore_plan",
        "KvRingAppend": "",
        "KvDev": "zeros uninit alloc_u8 htod_i32 clone_dtod copy_into set_i32_one copy_range_into",
        "ModelPlan": "",
        "LayerPlan": "",
        "KvCache": "",
        "SlidingKvCache": "",
        "Recurrent": "",
        "LatentKvCache": "",
        "Cache": "new new_ppn snapshot snapshot_into can_rollback rollback mark_tainted "
        "ensure_usable has_swa_ring describe close",
        "CacheSnapshot": "",
        "RecurLayer": "conv_assemble_and_roll step scan select_slot",
        "DflashTapSink": "",
        "HcTapSink": "",
    },
    "memra_lowlevel.speculative": {
        "DraftChain": "capture replay rewind describe",
        "SpecRound": "step",
        "ChainIo": "",
    },
    "memra_lowlevel.layer_kv": {
        "LayerKvCache": "install_bounded bounded_step bounded_state_bytes bounded_snapshot "
        "bounded_restore set_linear_wire_allowed discard_linear_scratch k_heads v_heads head_keys "
        "head_values head_len o1_begin o1_push_q o1_sealed o1_seal o1_views o1_step "
        "o1_memory_bytes append attend attend_group attend_group_upto truncate_last "
        "accumulate_imp trim_window clear export_wire import_wire memory_bytes copy copy_from "
        "__copy__ __deepcopy__ __repr__",
        "KvMode": "from_env",
        "KvCache": "",
        "O1State": "",
        "O1Rect": "",
        "O1DeviceView": "",
        "BoundedState": "",
        "BoundedWeights": "",
        "BoundedRope": "",
        "BoundedSnapshot": "",
        "WireKind": "",
    },
}

CONSTANTS = {
    "INDEX_RING_WORKING_ROWS": 5120,
    "PRIME_CHUNK_MAX_TOKENS": 4096,
    "SWA_REWIND_SLACK_ROWS": 512,
}


def cases(table):
    return [(module, name, rest) for module, names in table.items() for name, rest in names.items()]


@pytest.mark.parametrize(("module", "name", "parameters"), cases(FUNCTIONS))
def test_function_has_its_parameters(module, name, parameters):
    function = getattr(importlib.import_module(module), name)
    have = list(inspect.signature(function).parameters)
    assert have[: len(parameters.split())] == parameters.split()


@pytest.mark.parametrize(("module", "name", "members"), cases(CLASSES))
def test_class_has_its_members(module, name, members):
    cls = getattr(importlib.import_module(module), name)
    missing = [
        m
        for m in members.split()
        if not hasattr(cls, m) and m not in getattr(cls, "__annotations__", {})
    ]
    assert not missing


@pytest.mark.parametrize(("name", "value"), CONSTANTS.items())
def test_constant(name, value):
    assert getattr(importlib.import_module("memra_lowlevel.cache"), name) == value


def test_the_fp8_door_of_a_model():
    door = importlib.import_module("memra_lowlevel.cache").KV_FP8_FORCE
    before = door.get()
    try:
        for value in (-1, 0, 1):
            door.set(value)
            assert door.get() == value
        with pytest.raises(Exception, match="2"):
            door.set(2)
    finally:
        door.set(before)
