"""Which tile copies the attention kernels ask a driver to describe."""

from types import SimpleNamespace

from memra_lowlevel.kernels import kv_attend_tiles


def test_planes_are_described_once_from_sm_90_on():
    asked = []

    def encode(*what):
        asked.append(what)
        return bytes([len(asked)]) * 128

    driver = SimpleNamespace(cuTensorMapEncodeTiled=encode)
    device = SimpleNamespace(arch="sm_90", memo={}, driver=driver)
    k, v = SimpleNamespace(ptr=1 << 20), SimpleNamespace(ptr=2 << 20)
    widths = (1088, 1120), (768, 784)
    first = kv_attend_tiles.plane_maps(device, k, v, 500, 32, widths)
    assert asked == [(1 << 20, 500, 1088, 32, 1120), (2 << 20, 500, 768, 32, 784)]
    assert first == (b"\1" * 128, b"\2" * 128, 1)
    assert kv_attend_tiles.plane_maps(device, k, v, 500, 32, widths) is first and len(asked) == 2
    kv_attend_tiles.plane_maps(device, k, v, 501, 32, widths)
    assert len(asked) == 4
    older = SimpleNamespace(arch="sm_80", memo={}, driver=driver)
    nothing = (bytes(128), bytes(128), 0)
    assert kv_attend_tiles.plane_maps(device, None, v, 500, 32, widths) == nothing
    assert kv_attend_tiles.plane_maps(older, k, v, 500, 32, widths) == nothing
    assert len(asked) == 4
