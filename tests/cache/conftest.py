import pytest

from memra_lowlevel.cache import policy


@pytest.fixture(autouse=True)
def fresh_doors(monkeypatch):
    for name in policy.DOORS:
        monkeypatch.delenv(name, raising=False)
    policy.forget_environment()
    policy.set_swa_ring_default(False)
    policy.KV_FP8_FORCE.set(-1)
    yield
    monkeypatch.undo()
    policy.forget_environment()
    policy.set_swa_ring_default(False)
    policy.KV_FP8_FORCE.set(-1)
