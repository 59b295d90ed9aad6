import random

import pytest

from memra_lowlevel.cache import policy
from memra_lowlevel.cache.accounting import (
    cache_bytes_per_token,
    cache_bytes_per_token_for_layers,
    cache_bytes_per_token_for_plan,
    cache_ring_bytes_per_token,
    cache_ring_bytes_per_token_for_layers,
    cache_ring_bytes_per_token_for_plan,
    cache_ring_row_cap,
    cache_ring_row_cap_for_plan,
    latent_kv_bytes_per_token_for_plan,
    layer_row_bytes,
)
from memra_lowlevel.cache.plan import (
    KvCache,
    LatentKvCache,
    LayerPlan,
    ModelPlan,
    Recurrent,
    SlidingKvCache,
    compile_plan,
)
from memra_lowlevel.errors import PlaneError


def kv(state, dim=1024, head=128, kind="full", v=None):
    return LayerPlan(state, dim, v or dim, head, head, kind)


def step35(n_mtp=0):
    layers = [kv(SlidingKvCache(512)) if i % 4 else kv(KvCache()) for i in range(44)]
    layers.append(kv(KvCache()))
    assert sum(isinstance(p.state, SlidingKvCache) for p in layers) == 33
    return ModelPlan((*layers, *[kv(SlidingKvCache(512))] * n_mtp), n_mtp=n_mtp)


def test_one_layer():
    model = ModelPlan((kv(KvCache()),))
    assert layer_row_bytes(model, 0) == (1088, 768)
    assert cache_bytes_per_token(model) == 1856


def test_mixed_model():
    model = step35()
    assert cache_bytes_per_token(model) == 83_520
    assert cache_ring_bytes_per_token(model) == 0 == cache_ring_row_cap(model)
    policy.set_swa_ring_default(True)
    assert cache_ring_bytes_per_token(model) == 61_248
    assert cache_ring_row_cap(model) == 5151
    with_mtp = step35(1)
    assert cache_bytes_per_token(with_mtp) == 83_520, "the trunk only"
    assert cache_ring_bytes_per_token_for_layers(with_mtp, 0, 46) == 63_104
    with pytest.raises(PlaneError):
        cache_bytes_per_token_for_layers(with_mtp, 0, 46)
    with pytest.raises(PlaneError):
        cache_ring_bytes_per_token_for_layers(with_mtp, 0, 47)
    with pytest.raises(PlaneError):
        cache_bytes_per_token_for_layers(with_mtp, 3, 2)


def test_latent(monkeypatch):
    layer = LayerPlan(LatentKvCache(512, 256))
    model = ModelPlan((layer,) * 11, index_pool=4)
    assert cache_bytes_per_token(model) == 23_936
    plan = compile_plan(model)
    assert latent_kv_bytes_per_token_for_plan(model, plan, 0, 1) == 2176
    assert latent_kv_bytes_per_token_for_plan(model, plan, 0, 1, max_ctx=5120) == 3200
    monkeypatch.setenv("MEMRA_DSA_INDEX_RING", "0")
    policy.forget_environment()
    assert latent_kv_bytes_per_token_for_plan(model, plan, 0, 1) == 3200
    assert (
        latent_kv_bytes_per_token_for_plan(ModelPlan((layer,)), plan, 0, 1) == 4 * 512 + 512 + 1024
    )
    assert cache_bytes_per_token(ModelPlan((LayerPlan(LatentKvCache(576)),))) == 2304


def test_classes_and_shared_layers():
    layers = (
        kv(KvCache(), kind="gemma_global"),
        kv(SlidingKvCache(512), 256, 64, "gemma_window"),
        LayerPlan(Recurrent(64, 4, 4096)),
        kv(KvCache(), 256, 64, v=128),
        kv(KvCache()),
    )
    model = ModelPlan(layers, shared_kv_layers=1)
    assert not model.owns_plane(4) and model.owns_plane(3)
    assert cache_bytes_per_token(model) == 2048 + 512 + 0 + (8 * 34 + 4 * 24)
    draft = ModelPlan((kv(KvCache(), kind="gemma_global"),) * 2, n_mtp=1)
    assert [sum(layer_row_bytes(draft, i)) for i in (0, 1)] == [2048, 1856], "drafts keep the base"


def test_random_plans_against_a_plain_sum():
    rng = random.Random(5)
    policy.set_swa_ring_default(True)
    for _ in range(200):
        layers = []
        for _ in range(rng.randint(1, 12)):
            state = rng.choice(
                [
                    KvCache(),
                    SlidingKvCache(rng.randint(1, 900)),
                    Recurrent(32, 4, 64),
                    LatentKvCache(96),
                ]
            )
            head = rng.choice([32, 64, 96])
            heads = rng.randint(1, 6)
            layers.append(kv(state, head * heads, head, v=head * heads * rng.choice([1, 2])))
        n_mtp = rng.randint(0, min(2, len(layers) - 1))
        shared = rng.randint(0, len(layers) - n_mtp - 1)
        model = ModelPlan(tuple(layers), n_mtp, shared)
        plan = compile_plan(model)
        lo = rng.randint(0, model.n_layer)
        hi = rng.randint(lo, model.n_layer)
        total = ring = 0
        for il in range(lo, hi):
            if model.n_layer - shared <= il < model.n_layer:
                continue
            layer = layers[il]
            row = layer.kv_dim_k * 34 // 32 + layer.kv_dim_v * 24 // 32
            if isinstance(layer.state, LatentKvCache):
                total += 4 * 96
            elif not isinstance(layer.state, Recurrent):
                total += row
                ring += row * isinstance(layer.state, SlidingKvCache)
        assert cache_bytes_per_token_for_plan(model, plan, lo, hi) == total
        assert cache_ring_bytes_per_token_for_plan(model, plan, lo, hi) == ring
        cap = cache_ring_row_cap_for_plan(model, plan)
        windows = [
            s.window
            for i, s in enumerate(plan)
            if isinstance(s, SlidingKvCache) and model.owns_plane(i)
        ]
        assert cap == (max(windows) + 4096 + 512 + 31 if windows else 0)


def test_plan_that_is_not_the_models():
    model = ModelPlan((kv(KvCache()), LayerPlan(Recurrent(32, 4, 64))))
    with pytest.raises(PlaneError):
        cache_bytes_per_token_for_plan(model, (KvCache(), KvCache()), 0, 2)
    with pytest.raises(PlaneError):
        cache_bytes_per_token_for_plan(model, (KvCache(),), 0, 2)


@pytest.mark.parametrize(
    "args",
    [(KvCache(), 1000, 1000, 125, 125), (KvCache(), 320, 320, 80, 80), (KvCache(), 96, 96, 64, 64)],
)
def test_geometry_is_checked(args):
    with pytest.raises(PlaneError):
        LayerPlan(*args)


def test_head_dim_96_is_fine():
    LayerPlan(KvCache(), 192, 96, 96, 96)
    with pytest.raises(PlaneError):
        ModelPlan((kv(KvCache()),), n_mtp=2)
    with pytest.raises(PlaneError):
        ModelPlan((kv(KvCache()),), shared_kv_layers=2)
