"""The compiled module where it is absent, stale, or built from its generated source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from memra_lowlevel import native


def test_without_the_module_everything_works_and_says_so() -> None:
    code = """
import sys
sys.modules["memra_lowlevel.native._launch"] = None
import numpy as np
from memra_lowlevel import Device, DeviceCounter, native
assert not native.available() and "not built" in native.reason(), native.reason()
with Device("host") as dev:
    s = dev.stream(name="plain")
    c = DeviceCounter(dev, "len", capacity=3, stream=s)
    with s.capture("step") as g:
        c.advance(s)
    step = g.instantiate()
    for _ in range(3):
        step.launch(s)
    assert c.value == 3 == int(c.buffer.to_numpy(s)[0])
    try:
        step.launch(s)
    except Exception as error:
        assert type(error).__name__ == "CapacityExceeded"
    else:
        raise SystemExit("launched without room")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_build_is_not_used() -> None:
    code = """
import importlib, sys, types
import memra_lowlevel.native._launch as built
from memra_lowlevel import native
class Old:
    MLL_VERSION = 0
sys.modules["memra_lowlevel.native._launch"] = types.SimpleNamespace(ffi=built.ffi, lib=Old())
importlib.reload(native)
assert not native.available() and "older" in native.reason()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_generated_source_stands_alone(tmp_path: Path) -> None:
    """setup.py generates and builds it in another folder than the sources."""
    root = Path(native.__file__).parent
    generated = tmp_path / "generated.c"
    code = f"""
import runpy
runpy.run_path({str(root / "build.py")!r})["ffibuilder"].emit_c_code({str(generated)!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    text = generated.read_text()
    assert 'launch_path.h"' not in text and "mll_object_type" in text
    assert f"MLL_VERSION = {native._VERSION} " in text
