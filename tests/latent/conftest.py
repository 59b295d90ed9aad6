import pytest
from latent_layers import Driver
from latent_rig import Rig

from memra_lowlevel.cache import policy


@pytest.fixture
def rig(stream):
    return Rig(stream)


@pytest.fixture
def make(stream):
    """Give a maker of layers with their streams, closed afterwards."""
    made = []

    def build(*args, **options):
        made.append(Driver(stream, *args, **options))
        return made[-1]

    yield build
    for driver in made:
        driver.close()


@pytest.fixture(autouse=True)
def fresh_doors(monkeypatch):
    monkeypatch.delenv("MEMRA_DSA_INDEX_RING", raising=False)
    policy.forget_environment()
    yield
    monkeypatch.undo()
    policy.forget_environment()
