"""The direction of imports, and that the check bites."""

import importlib.util
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent / "tools" / "check_layers.py"
spec = importlib.util.spec_from_file_location("check_layers", TOOL)
check_layers = importlib.util.module_from_spec(spec)
sys.modules["check_layers"] = check_layers
spec.loader.exec_module(check_layers)


def test_every_import_goes_downwards():
    assert check_layers.violations() == []


def test_an_upward_import_is_found(tmp_path):
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "bad.py").write_text("def f():\n    from ..cache import KvLayer\n")
    assert len(check_layers.violations(tmp_path)) == 1


def test_bindings_are_imported_in_one_place(tmp_path):
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "bad.py").write_text("from cuda.bindings import driver\n")
    (found,) = check_layers.violations(tmp_path)
    assert "driver/" in found


def test_a_type_checking_import_is_free(tmp_path):
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "ok.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..cache import KvLayer\n"
    )
    assert check_layers.violations(tmp_path) == []
