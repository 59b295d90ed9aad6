"""No undefined behaviour: kernels under the compiler's sanitizer, whatever their family.

Attention, linear attention and the model's kernels have such a test beside their own; here are all
other sources.
"""

import functools
from unittest import mock

import pytest
import test_every_barrier
import test_same_bits

from memra_lowlevel.compile import cuda_src_root
from memra_lowlevel.driver.host import runner

ELSEWHERE = {"kv/attend.cu", "recur/delta.cu"}
ELSEWHERE |= {f"model/{name}.cu" for name in ("embed", "gated", "logits", "project", "qkv")}
DRIVES = {
    source: drive
    for source, drive in (
        *test_same_bits.DRIVES.items(),
        ("latent/attend.cu", functools.partial(test_same_bits.latent, "attend.cu")),
        ("kv/attend_f16.cu", lambda: test_every_barrier.attend_f16("kv/attend_f16.cu")),
        ("kv/attend_mma.cu", lambda: test_every_barrier.attend_mma("kv/attend_mma.cu")),
        (
            "latent/attend_mma.cu",
            lambda: test_every_barrier.latent("attend_mma.cu")("latent/attend_mma.cu"),
        ),
        ("speculative/loop.cu", lambda: test_every_barrier.loop("speculative/loop.cu")),
    )
    if source not in ELSEWHERE
}
ROOT = cuda_src_root()


def test_every_source_is_driven():
    assert {str(p.relative_to(ROOT)) for p in ROOT.rglob("*.cu")} == set(DRIVES) | ELSEWHERE


@pytest.mark.parametrize("source", DRIVES)
def test_defined(source):
    quick, runs = runner.quick, 0

    def sanitised(file, expression, *_, **__):
        nonlocal runs
        runs += 1
        return quick(file, expression, sanitize="undefined")

    with mock.patch.object(runner, "quick", sanitised):
        DRIVES[source]()
    assert runs
