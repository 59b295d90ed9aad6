import pytest
from latent_rig import Rig

from memra_lowlevel.cache import policy


@pytest.fixture
def rig(stream):
    return Rig(stream)


@pytest.fixture(autouse=True)
def fresh_doors(monkeypatch):
    monkeypatch.delenv("MEMRA_DSA_INDEX_RING", raising=False)
    policy.forget_environment()
    yield
    monkeypatch.undo()
    policy.forget_environment()
