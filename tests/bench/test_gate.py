"""The gate of gates: each fault still applies, and the cheap ones are caught."""

import importlib.util
import sys

import pytest

from memra_lowlevel.bench.result import REPOSITORY

spec = importlib.util.spec_from_file_location("gate", REPOSITORY / "tools" / "gate.py")
gate = importlib.util.module_from_spec(spec)
sys.modules["gate"] = gate
spec.loader.exec_module(gate)

FAULTS = gate.FAULTS
IN_CI = ["checksum-unchecked", "mirror-not-advanced", "import-upwards", "seal-unchecked"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_applies_once_and_changes_something(fault):
    assert gate.applies(fault) == 1, f"{fault.name}: bring its text in tools/gate.py up to date"
    assert fault.new != fault.old and fault.about
    for test in fault.tests:
        path, _, name = test.partition("::")
        text = (REPOSITORY / path).read_text()
        assert not name or f"def {name}(" in text, test


def test_there_are_enough_faults_with_names_of_their_own():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 12
    assert set(IN_CI) <= {fault.name for fault in FAULTS if fault.cheap}


@pytest.fixture(scope="module")
def copy():
    with gate.copy_of_the_tree() as folder:
        yield folder


@pytest.mark.parametrize("name", IN_CI)
def test_cheap_faults_are_caught(copy, name):
    (fault,) = (f for f in FAULTS if f.name == name)
    before = (copy / fault.path).read_text()
    assert gate.red(fault, copy) == ""
    assert (copy / fault.path).read_text() == before == (REPOSITORY / fault.path).read_text()


def test_the_gate_itself_bites(copy, capsys):
    harmless = gate.Fault(
        "harmless", "a remark", "memra_lowlevel/paths.py", "__all__ = ", "# a remark\n__all__ = ",
        ("tests/test_layers.py::test_a_type_checking_import_is_free",),
    )  # fmt: skip
    assert gate.red(harmless, copy).startswith("the tests still pass")
    status, _ = gate.pytest_status(copy, ["tests/test_layers.py::gone"])
    assert status == 4  # not 1: an absent test is no red test
    stale = gate.Fault("stale", "", "memra_lowlevel/paths.py", "no such text", "", ())
    with pytest.raises(SystemExit, match="0 times"), gate.planted(stale, copy):
        pass
    assert gate.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(fault.name in printed for fault in FAULTS)
    with pytest.raises(SystemExit):
        gate.main(["--break", "no-such-fault"])
