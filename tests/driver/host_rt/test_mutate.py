"""The mutator of barriers, on a kernel that needs all of its barriers and on one that does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memra_lowlevel import errors
from memra_lowlevel.driver.host import runner
from memra_lowlevel.driver.host.mutate import flatten, mutations, unreported

HEADER = """#pragma once
// __syncthreads() in a comment is none
template <int N> static __device__ float total(float v, float* s) {
  s[threadIdx.x] = v;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < N; ++i) sum += s[i];
  __syncthreads();
  return sum;
}
"""
SOURCE = """#include "common/device.cuh"
#include "common/pipeline.cuh"
#include "total.cuh"
#include "total.cuh"
KERNEL void softmax(const float* x, float* out) {
  __shared__ float s[64];
  __shared__ __align__(16) float row[64];
  if (threadIdx.x < 16) cp_async<16>(row + 4 * threadIdx.x, x + 4 * threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const float e = expf(row[63 - threadIdx.x]);
  const float mean = total<64>(e, s) / 64;
  const float sum = total<64>(e - mean, s) + total<64>(e, s);
  EXTRA
  row[threadIdx.x] = e / sum;
  __syncwarp();
  out[threadIdx.x] = row[threadIdx.x ^ 1];
}
"""


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "total.cuh").write_text(HEADER)
    path = tmp_path / "softmax.cu"
    path.write_text(SOURCE.replace("EXTRA", ""))
    return path


def drive(text: str) -> None:
    run = runner.quick(text, "softmax", check=True)
    for order in ("forward", "reverse"):
        out = np.full(64, np.nan, np.float32)
        run(1, 64, 0, np.random.default_rng(0).random(64, np.float32), out, order=order)
        assert np.isfinite(out).all()


def test_mutations_are_found_in_the_file_and_its_headers(source):
    found = mutations(source)
    assert [(m.what, Path(m.file).name, m.line) for m in found] == [
        ("__syncthreads()", "total.cuh", 5), ("__syncthreads()", "total.cuh", 8),
        ("cp_async_wait<0>()", "softmax.cu", 10), ("__syncthreads()", "softmax.cu", 11),
        ("__syncwarp()", "softmax.cu", 17),
    ]  # fmt: skip
    whole = flatten(source)
    assert whole.count("float total(") == 1 and '#include "common/device.cuh"' in whole
    for m in found:
        assert whole.count(m.what) == m.source.count(m.what) + 1


def test_every_needed_barrier_is_reported(source):
    assert unreported(source, drive) == []


def test_a_barrier_too_many_is_named(source):
    source.write_text(SOURCE.replace("EXTRA", "__syncthreads();"))
    missed = unreported(source, drive)
    assert [str(m) for m in missed] == [f"__syncthreads() at {source}:15"]


def test_a_source_that_is_wrong_already_is_refused(source):
    source.write_text(SOURCE.replace("EXTRA", "if (threadIdx.x == 40) out[0] = 1;"))
    with pytest.raises(errors.DataRace):
        unreported(source, drive)
