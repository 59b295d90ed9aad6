"""Refusals of the runtime say which call, which key, which place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memra_lowlevel import LaunchConfig, Stream, compile_source, errors, expect, launch

SOURCE = '#include "common/device.cuh"\nKERNEL void put(const float* x, float* y) { *y = *x; }\n'


@pytest.fixture
def put(device: Any) -> Any:
    return device.module(compile_source(SOURCE, arch=device.arch)).kernel("put")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"grid": 1, "blocks": 2}, "the unknown key 'blocks', no key 'block'"),
        ({"grid": 1}, "a mapping with no key 'block'"),
        ({"grid": 1, "block": 1, "threads": 2}, "a mapping with the unknown key 'threads'"),
    ],
)
def test_the_key_of_a_mapping_is_named(
    stream: Any, put: Any, config: dict[str, int], words: str
) -> None:
    with pytest.raises(errors.ArgumentError, match=words):
        launch(stream, config, put, None, None)


def test_ranges_with_one_end_read_as_such() -> None:
    for value, low, high, words in (
        (-1, 0, None, "of at least 0"), (4, None, 3, "of at most 3"), (4, 0, 3, "in 0 … 3"),
    ):  # fmt: skip
        with pytest.raises(errors.ArgumentError, match=rf"Expected an integer {words}\.$"):
            expect.integer("n", value, low, high)


def test_extents_and_shapes(device: Any, stream: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"^grid got 1\.5"):
        LaunchConfig(1.5, 64)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match=r"^grid = \(1, 1\.5\): an extent got 1\.5"):
        LaunchConfig((1, 1.5), 64)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match=r"from .*test_runtime_words\.py"):
        device.zeros((-1,), np.float32, stream)


def test_a_kernel_shows_its_declaration(put: Any) -> None:
    arch = put.image.arch
    assert repr(put).startswith(f"<Kernel put(const float* x, float* y) {arch}")
    assert f"{arch} {arch}" not in repr(put) + repr(put.module)


def test_the_type_of_a_capture_is_known() -> None:
    assert Stream.capture.__annotations__["return"] == "AbstractContextManager[Graph]"
