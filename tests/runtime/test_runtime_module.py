"""Loading of images: for the wrong kind of device it says what to compile."""

from __future__ import annotations

from typing import Any

import pytest

from memra_lowlevel import compile_source, errors

SOURCE = '#include "common/device.cuh"\nKERNEL void put(float* y) { y[0] = 7.0f; }\n'


def test_an_image_for_another_kind_of_device(device: Any) -> None:
    arch = "sm_90" if device.kind == "host" else "host"
    image = compile_source(SOURCE, arch=arch, name="put.cu")
    with pytest.raises(errors.ArchUnsupported) as caught:
        device.module(image)
    for part in ("put.cu", arch, str(device), repr(device.arch), "arch=device.arch", __file__):
        assert part in str(caught.value)


def test_an_architecture_that_nobody_knows() -> None:
    with pytest.raises(errors.ArchUnsupported, match="sm_999 is newer than all"):
        compile_source(SOURCE, arch="sm_999", name="put.cu")


def test_the_device_of_an_unknown_architecture_gets_ptx(monkeypatch: Any) -> None:
    from memra_lowlevel.compile import arch

    monkeypatch.setattr(arch, "of_devices", {"sm_999"})
    assert compile_source(SOURCE, arch="sm_999", name="put.cu").rung == "ptx"
