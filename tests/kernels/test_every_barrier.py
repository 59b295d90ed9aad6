"""Check mode reports the removal of any barrier of any kernel of ``cuda_src``.

The tests of each family run its kernels in check mode; here every source is taken, whatever its
family. A source with a barrier that nothing drives fails.
"""

from __future__ import annotations

import numpy as np
import pytest
from families import family

from memra_lowlevel import errors
from memra_lowlevel.compile import cuda_src_root
from memra_lowlevel.driver.host import mutate
from memra_lowlevel.formats import Q8_0

ORDERS = ("forward", "reverse")
ROOT = cuda_src_root()
SOURCES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.cu"))
MUTANTS = [(source, i) for source in SOURCES for i in range(len(mutate.mutations(ROOT / source)))]


def attend(text):
    kv = family("kernels/test_kv_checked.py")
    for order in ORDERS:
        partial, length = kv.run_partial(text, length=300, order=order)
        kv.run_combine(text, partial, length, order=order)


def append(text):
    kv = family("kernels/test_kv_checked.py")
    x = np.random.default_rng(0).standard_normal((3, 96), np.float32)
    for order in ORDERS:
        kv.run_append(Q8_0, x, text, order=order, check=True)


def delta(text):
    for order in ORDERS:
        family("cache/test_recur_checked.py").run(text, order=order)


def layer_cache(name):
    def drive(text):
        for order in ORDERS:
            family("layer_kv/test_lkv_checked.py").run(name, text, order)

    return drive


def latent(name):
    return lambda text: family("latent/test_latent_checked.py").DRIVES[name](text)


def model(name):
    def drive(text):
        checked = family("model/test_checked.py")
        for run in checked.SOURCES[name][0]:
            for order in ORDERS:
                checked.RUNS[run](source=text, order=order)

    return drive


DRIVES = {
    "kv/append.cu": append,
    "kv/attend.cu": attend,
    "recur/delta.cu": delta,
    **{f"layer_kv/{name}.cu": layer_cache(name) for name in ("exact", "states")},
    **{
        f"latent/{name}": latent(name)
        for name in ("append.cu", "attend.cu", "index.cu", "select.cu")
    },
    **{f"model/{name}.cu": model(name) for name in ("gated", "logits", "project", "qkv")},
}  # fmt: skip


def test_all_sources_are_known():
    """Nothing waits for other threads in a way that the list of mutations does not see."""
    assert len(SOURCES) >= 15 and len(MUTANTS) >= 50
    assert {source for source, _ in MUTANTS} == set(DRIVES)
    for source in set(SOURCES) - set(DRIVES):
        text = mutate.flatten(ROOT / source)
        assert "__syncthreads" not in text and "cp_async" not in text, source


@pytest.mark.parametrize("source", DRIVES)
def test_whole_kernels_are_clean(source):
    DRIVES[source](mutate.flatten(ROOT / source))


@pytest.mark.parametrize(
    ("source", "which"), MUTANTS, ids=[f"{source} {which}" for source, which in MUTANTS]
)
def test_removed(source, which):
    mutation = mutate.mutations(ROOT / source)[which]
    with pytest.raises((errors.DataRace, errors.UninitialisedRead)), np.errstate(all="ignore"):
        try:
            DRIVES[source](mutation.source)
        except AssertionError:  # a wrong value is no report of a missing barrier
            pytest.fail(f"{mutation}: wrong values, and nothing reported")
