"""Names, parameters, and long random lives of a layer against a plain model of it."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lkv_data import MODES, SCALE, gen, poisoned, same_bits, softmax64, state_of

import memra_lowlevel.layer_kv as package
from memra_lowlevel.errors import KvShapeError, KvStateError, KvWireError
from memra_lowlevel.layer_kv import KvCache, KvMode, LayerKvCache, Mass, compiled
from memra_lowlevel.layer_kv.evict import evict_mass, evict_recent, mass_rows

FIELDS = (
    "mode seq_len num_kv_heads head_dim linear_state linear_scratch o1 sinks bounded wire_kind "
    "wire_layer wire_identity base"
).split()
METHODS = {
    "install_bounded": "window",
    "bounded_step": "q k v w rope scale num_heads out",
    "bounded_state_bytes": "",
    "bounded_snapshot": "",
    "bounded_restore": "s",
    "set_linear_wire_allowed": "allowed",
    "discard_linear_scratch": "",
    "k_heads": "",
    "v_heads": "",
    "head_keys": "h",
    "head_values": "h",
    "head_len": "h",
    "o1_begin": "m w sink rect",
    "o1_push_q": "q_all",
    "o1_sealed": "",
    "o1_seal": "num_heads",
    "o1_views": "",
    "o1_step": "q_all k_new v_new num_heads",
    "o1_memory_bytes": "",
    "append": "k_new v_new alive",
    "attend": "q kv_head",
    "attend_group": "q_group kv_head out imp_acc scale first softcap sinks",
    "attend_group_upto": "q_group kv_head out imp_acc scale first softcap upto sinks",
    "truncate_last": "n_drop",
    "accumulate_imp": "probs",
    "trim_window": "w slack align",
    "clear": "",
    "export_wire": "f16",
    "import_wire": "buf",
    "memory_bytes": "",
    "copy": "",
    "copy_from": "other",
}


def test_names_and_parameters():
    c = LayerKvCache(1, 2, mode=KvMode.F32)
    for name in FIELDS:
        getattr(c, name)
    for name, params in METHODS.items():
        got = [p for p in inspect.signature(getattr(LayerKvCache, name)).parameters if p != "self"]
        assert got == params.split(), name
        assert inspect.getdoc(getattr(LayerKvCache, name)), name
    for name in (
        "LayerKvCache KvMode KvCache O1State O1Rect O1DeviceView BoundedState BoundedWeights "
        "BoundedRope BoundedSnapshot WireKind hash64 attention_head"
    ).split():
        assert name in package.__all__ and inspect.getdoc(getattr(package, name))
    assert all(hasattr(package, name) for name in package.__all__)
    for special in ("__copy__", "__deepcopy__", "__repr__"):
        assert special in vars(LayerKvCache)


def test_imports_go_downwards_only():
    allowed = {"memra_lowlevel.errors", "memra_lowlevel.formats"}
    for path in Path(package.__file__).parent.glob("*.py"):
        if path.name == "mirror.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                assert not node.module.startswith("memra") or node.module in allowed, path


THREE = np.ones(3, np.float32)
WRONG: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
    (KvShapeError, "append", (THREE, THREE)),
    (KvShapeError, "attend", (THREE, 0)),
    (KvWireError, "import_wire", (b"CMFS" + bytes(40),)),
    (KvStateError, "bounded_restore", (None,)),
    (KvStateError, "o1_step", (None, None, None, 1)),
]


class Model:
    """What a float32 layer should hold, in lists."""

    def __init__(self) -> None:
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []
        self.imp: list[np.float32] = []
        self.base = 0


@pytest.mark.parametrize("mode", MODES)
def test_a_long_random_life(mode):
    """Every operation in any order; each refusal leaves the bytes; each read matches the model."""
    rng = np.random.default_rng(MODES.index(mode))
    nkv, hd = 2, 33
    c, model, done = LayerKvCache(nkv, hd, mode=mode), Model(), Counter[str]()
    copies: list[tuple[LayerKvCache, Any]] = []
    for _ in range(int(2000 * SCALE)):
        op = rng.choice(
            ["append"] * 12
            + ["attend"] * 3
            + "truncate imp mass recent trim copy refuse wire clear".split()
        )
        if op == "append":
            k, v = rng.standard_normal((2, nkv * hd)).astype(np.float32)
            c.append(k, v)
            model.rows.append((k.reshape(nkv, hd), v.reshape(nkv, hd)))
            model.imp.append(np.float32(0))
        elif op == "attend" and model.rows:
            h = int(rng.integers(nkv))
            q = rng.standard_normal(hd).astype(np.float32)
            out, imp = poisoned(hd), np.zeros(len(model.rows), np.float32)
            first = int(rng.integers(0, len(model.rows) + 2))
            c.attend_group(q, h, out, imp, None, first)
            k = np.array([r[0][h] for r in model.rows])
            v = np.array([r[1][h] for r in model.rows])
            want, probs = softmax64(q, k, v, hd**-0.5, first=first)
            tol = 0.2 if mode.quantised else 5e-6  # codes are coarse; exact laws are elsewhere
            assert np.abs(out - want).max() < tol
            assert np.abs(imp - probs).max() < tol
        elif op == "truncate":
            n = int(rng.integers(0, 6))
            c.truncate_last(n)
            n = min(n, len(model.rows))
            model.rows, model.imp = (x[: len(x) - n] for x in (model.rows, model.imp))
        elif op == "imp":
            p = rng.random(int(rng.integers(0, 90))).astype(np.float32)
            c.accumulate_imp(p)
            for i, x in enumerate(p[: len(model.imp)]):
                model.imp[i] = model.imp[i] + x
        elif op in ("mass", "recent") and rng.random() < 0.4 and not c.tail:
            keep = int(rng.integers(60, 110))
            n = len(model.rows)
            if op == "mass":
                evict_mass(c, keep, 3)
                kept = range(n) if n <= keep else mass_rows(
                    np.array(model.imp, np.float32), keep, 3, keep // 2
                )  # fmt: skip
            else:
                evict_recent(c, keep)
                kept = range(max(n - keep, 0), n)
            model.rows = [model.rows[i] for i in kept]
            model.imp = [model.imp[i] for i in kept]
        elif op == "trim" and (c.tail or rng.random() < 0.05):
            n = c.trim_window(40, 3, 8)
            model.rows, model.imp = model.rows[n:], model.imp[n:]
            model.base += n
            done["trimmed"] += n > 0
        elif op == "copy":
            copies = [*copies[-2:], (c, state_of(c))]
            c = c.copy()
        elif op == "refuse":
            before = state_of(c)
            error, name, args = WRONG[int(rng.integers(len(WRONG)))]
            with pytest.raises(error):
                getattr(c, name)(*args)
            assert state_of(c) == before
        elif op == "wire" and not mode.quantised:
            d = LayerKvCache(nkv, hd, mode=mode)
            d.import_wire(c.export_wire())
            assert state_of(d)[1:] == state_of(c)[1:]
            d.trim_window(c.tail, 10**6)
            c = d
        elif op == "clear" and rng.random() < 0.1:
            c.clear()
            if rng.random() < 0.5:
                c = LayerKvCache(nkv, hd, mode=mode)
            model = Model()
        else:
            continue
        done[op] += 1
        assert (c.seq_len, c.base) == (len(model.rows), model.base)
        assert c.imp.tolist() == [float(x) for x in model.imp]
        assert [c.head_len(h) for h in range(nkv)] == [len(model.rows)] * nkv
        if not mode.quantised and model.rows:
            same_bits(c.head_keys(1), np.array([r[0][1] for r in model.rows]))
    for other, then in copies:
        assert state_of(other) == then or other is c
    print(mode, dict(done))
    assert done["append"] > 500 and done["attend"] > 100 and done["truncate"] > 50
    assert done["refuse"] > 50 and done["copy"] > 50 and done["trimmed"] >= 3


def test_truncate_all_or_none():
    """One layer that cannot undo holds every layer back."""
    rows = LayerKvCache(1, 4, mode=KvMode.F32)
    for p in range(100):
        rows.append(gen(p, 4), gen(p, 4))
    ring = LayerKvCache(1, 4, mode=KvMode.F32)
    ring.install_bounded(2)
    ring.bounded.seen = ring._seq_len = 100  # a ring restored from a snapshot has no history
    cache = KvCache([rows, ring], policy=Mass())
    before = [state_of(x) for x in cache]
    with pytest.raises(KvStateError):
        cache.truncate_last(3)
    assert [state_of(x) for x in cache] == before
    cache.truncate_last(0)
    cache.clear()
    assert cache.seq_len == 0 and len(cache) == 2 and cache[0] is rows


def test_growth_is_amortised():
    """Appends copy each row a bounded number of times."""
    c = LayerKvCache(1, 4, mode=KvMode.F32)
    caps = set()
    for _ in range(3000):
        c.append(gen(1, 4), gen(2, 4))
        caps.add(c._stores.cap)
    assert len(caps) <= 8


def test_work_of_attention_is_what_it_reads():
    """Windows read the window: rows outside are poisoned and never seen."""
    for path in compiled.available():
        with compiled.use(path):
            c = LayerKvCache(1, 40, mode=KvMode.F32)
            for p in range(50):
                c.append(gen(p, 40), gen(99 + p, 40))
            want, out = poisoned(40), poisoned(40)
            c.attend_group_upto(gen(7, 40), 0, want, None, None, 20, None, 30)
            c._stores.k[0, :20] = c._stores.v[0, 30:50] = np.nan
            c._stores.v[0, :20] = c._stores.k[0, 30:50] = np.nan
            c.attend_group_upto(gen(7, 40), 0, out, None, None, 20, None, 30)
            same_bits(out, want)
