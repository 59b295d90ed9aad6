from __future__ import annotations

import pytest

from memra_lowlevel.compile import arch
from memra_lowlevel.errors import ArchUnsupported

TWELVE = (50, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
OLD = (75, 80, 86, 89, 90, 100)


@pytest.mark.parametrize(
    ("want", "have", "families", "got"),
    [
        ("sm_90", TWELVE, True, ("sm_90", "exact", "cubin")),
        ("sm_90a", TWELVE, True, ("sm_90a", "exact", "cubin")),
        ("sm_100f", TWELVE, True, ("sm_100f", "exact", "cubin")),
        ("compute_90", TWELVE, True, ("compute_90", "ptx", "ptx")),
        ("host", (), False, ("host", "host", "host")),
        ("sm_103", OLD, True, ("sm_100f", "family", "cubin")),
        ("sm_103", OLD, False, ("sm_100", "family", "cubin")),
        ("sm_89", (80, 86), False, ("sm_86", "family", "cubin")),
        ("sm_86", (75, 80, 89), False, ("sm_80", "family", "cubin")),
        ("sm_87", (80, 86), False, ("compute_86", "ptx", "ptx")),
        ("sm_90", (80, 86), False, ("compute_86", "ptx", "ptx")),
        ("sm_120", OLD, True, ("compute_100", "ptx", "ptx")),
        ("sm_150", TWELVE, True, ("compute_121", "ptx", "ptx")),
    ],
)
def test_ladder(want: str, have: tuple[int, ...], families: bool, got: tuple[str, ...]) -> None:
    target = arch.resolve(want, have, families=families, devices={"sm_150"})
    assert (target.arch, target.rung, target.kind) == got
    assert bool(target.reason) == (target.rung in ("family", "ptx"))


@pytest.mark.parametrize(
    "want", ["sm_70", "sm_90x", "sm9", "gfx90a", "sm_80a", "sm_90f", "", "HOST"]
)
def test_refused(want: str) -> None:
    with pytest.raises(ArchUnsupported) as caught:
        arch.resolve(want, (75, 80, 90, 100), compiler="NVRTC 12.9")
    assert caught.value.want == want


@pytest.mark.parametrize("want", ["sm_150", "compute_150", "sm_999"])
def test_newer_than_all_known_is_refused_unless_a_device_has_it(want: str) -> None:
    with pytest.raises(ArchUnsupported, match=r"no open device has it.*compute_121"):
        arch.resolve(want, TWELVE, devices={"sm_90"})
    assert arch.resolve("sm_150", (*TWELVE, 160)).rung == "ptx"  # the compiler is newer still


def test_variants_never_fall_back() -> None:
    with pytest.raises(ArchUnsupported, match=r"NVRTC 12\.9 cannot compile for sm_103a") as caught:
        arch.resolve("sm_103a", OLD, compiler="NVRTC 12.9")
    assert caught.value.have == ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
    with pytest.raises(ArchUnsupported):
        arch.resolve("sm_100f", OLD, families=False)


def test_device_names() -> None:
    assert arch.device_arch((9, 0)) == "sm_90"
    assert arch.device_arch((12, 0)) == "sm_120"
    assert arch.device_arch((9, 0), specific=True) == "sm_90a"
    assert arch.device_arch((8, 6), specific=True) == "sm_86"
