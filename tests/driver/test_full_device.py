"""What tests do where other programs leave a device no room for a context."""

from __future__ import annotations

import pytest
from full_device import opened_device

import memra_lowlevel
from memra_lowlevel.errors import OutOfMemory

CONTEXT = "cuDevicePrimaryCtxRetain (from x): no memory is left"


@pytest.mark.parametrize(
    ("n_full", "why", "calls"),
    [(0, CONTEXT, 1), (2, CONTEXT, 3), (9, CONTEXT, 5), (1, "cuMemAlloc: none left", 1)],
)
def test_a_full_device_is_asked_again_a_few_times(
    monkeypatch: pytest.MonkeyPatch, n_full: int, why: str, calls: int
) -> None:
    asked: list[str] = []

    def open_one(name: str) -> str:
        asked.append(name)
        if len(asked) <= n_full:
            raise OutOfMemory(why, result="CUDA_ERROR_OUT_OF_MEMORY", code=2)
        return name

    monkeypatch.setattr(memra_lowlevel, "Device", open_one)
    if calls <= n_full:
        with pytest.raises(OutOfMemory):
            opened_device("cuda:0", rest_s=0.0)
    else:
        assert opened_device("cuda:0", rest_s=0.0) == "cuda:0"
    assert len(asked) == calls
