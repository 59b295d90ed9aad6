"""Conventions of the public surface: resources close, errors form one tree, import is light."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memra_lowlevel import errors

ROOT = Path(__file__).resolve().parent.parent
MODULES = [
    "memra_lowlevel",
    "memra_lowlevel.cache",
    "memra_lowlevel.speculative",
    "memra_lowlevel.layer_kv",
    "memra_lowlevel.graph",
    "memra_lowlevel.runtime",
]


def public_classes():
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute in module.__all__:
            value = getattr(module, attribute)
            if inspect.isclass(value):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


@pytest.mark.parametrize("name", public_classes())
def test_what_closes_also_works_in_a_with_block(name):
    cls = public_classes()[name]
    if "close" not in dir(cls):
        return
    assert {"__enter__", "__exit__"} <= set(dir(cls)), "a resource has close() and with"
    if cls.__module__.split(".")[1] in ("runtime", "graph", "compile"):
        assert hasattr(cls, "closed"), "what owns a handle says whether it is closed"


@pytest.mark.parametrize("name", public_classes())
def test_public_classes_are_described(name):
    assert (public_classes()[name].__doc__ or "").strip()


def test_errors_form_one_tree():
    for name in errors.__all__:
        value = getattr(errors, name)
        if inspect.isclass(value) and name != "Diagnostic":
            assert issubclass(value, errors.MemraError), name


def test_every_error_is_documented():
    text = (ROOT / "docs" / "errors.md").read_text()
    missing = [name for name in errors.__all__ if f"`{name}`" not in text]
    assert not missing


def test_what_is_loaded_on_first_use_is_there():
    code = (
        "import memra_lowlevel as m, memra_lowlevel.compile as c; "
        "assert c.compiler.compile_source is c.compile_source and m.compile is c; "
        "assert m.launch is m.runtime.launch; "
        "[getattr(p, name) for p in (m, c) for name in dir(p)]; "
        "assert set(m.__all__) <= set(dir(m)) and set(c.__all__) <= set(dir(c)); "
        "print(getattr(c, 'compile_sorce', 'nothing'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "nothing"


def test_import_is_light_and_makes_no_cuda_call(tmp_path):
    code = (
        "import sys, time; from time import process_time as now; a = now(); "
        "import memra_lowlevel; b = now(); import numpy; c = now(); "
        "from memra_lowlevel import Device; d = now(); "
        "unwanted = {m for m in sys.modules if m.startswith('cuda.bindings')}; "
        "unwanted |= sys.modules.keys() & {'memra_lowlevel.compile.compiler'}; "
        "assert not unwanted, unwanted; print(b - a, d - c)"
    )
    # An installed package has its bytecode; a checkout under PYTHONDONTWRITEBYTECODE has none.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    package = device = float("inf")
    # NumPy takes 0.1 s on one machine and 0.25 s on another; the promise of 0.3 s leaves us this.
    for _ in range(6):
        run = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, env=environment
        )
        package, device = map(min, (package, device), map(float, run.stdout.split()))
        if package < 0.1 and device < 0.15:
            return
    pytest.fail(f"the package takes {package:.3f} s, a Device {device:.3f} s more")


def test_the_product_speaks_of_itself_alone():
    words = ["shared/", "CONTRACT.md", "helper session", "/work/"]
    found = []
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    for name in tracked.split():
        path = ROOT / name
        if path == Path(__file__).resolve() or path.suffix in {".json", ".npz", ".gguf"}:
            continue
        text = path.read_text(errors="ignore")
        found += [f"{name}: {word}" for word in words if word in text]
    assert not found
