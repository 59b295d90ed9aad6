"""How launches of attention are planned on the host: workspaces and blocks. Nothing runs."""

import itertools

import pytest

from memra_lowlevel import Device, errors
from memra_lowlevel.formats import F16, Q4_0, Q8_0
from memra_lowlevel.kernels import kv_attend, kv_attend_f16, kv_attend_mma, kv_attend_simt


def test_a_workspace_that_names_no_kernel_is_enough_for_all():
    """The choice looks at kv heads and formats, which the size does not know."""
    f16_pairs = [(F16, F16), (Q8_0, Q8_0), (Q8_0, Q4_0)]
    with Device("host") as device:
        with pytest.raises(errors.ArgumentError, match="workspace_bytes: kernel"):
            kv_attend.workspace_bytes(device, 1, 1, 64, 8, kernel="fast")
        for head_dim, n_kv_heads, group, rows in itertools.product(
            (64, 128, 256), (1, 2, 3, 4, 8), (1, 4, 16), (1, 100, 5000, 40_000, 1 << 20)
        ):
            n_heads = n_kv_heads * group
            size = kv_attend.workspace_bytes(device, 2, n_heads, head_dim, rows, kernel="mma")
            parts = [kv_attend_mma.n_parts(head_dim, n_kv_heads)]
            slots = [kv_attend_mma.n_slots(rows, n) for n in parts]
            for k, v in f16_pairs:
                n = kv_attend_f16.n_parts(k, v, head_dim, n_kv_heads)
                slots.append(kv_attend_mma.n_slots(rows, n) * kv_attend_f16.shares(k, v))
            for n in slots:
                need = kv_attend_mma.workspace_bytes(2, n_heads, head_dim, n)
                assert size >= need, (head_dim, n_kv_heads, group, rows)


def test_blocks_take_few_queries_where_the_device_has_room_for_them():
    """Five rows of 9/3/64 over a short plane are 96 blocks of 4 queries; over a long one not."""

    def plan(n_rows, rows, n_sms=132, kind="cuda", table=False):
        return kv_attend_simt.plan(n_rows, 3, 3, 64, 64, rows, 0, False, table, n_sms, kind)

    short, long = plan(5, 1024), plan(5, 8192)
    assert (short.queries, short.partial.grid, short.n_tickets) == (4, (8, 3, 4), 12)
    assert (long.queries, long.partial.grid, long.n_tickets) == (16, (64, 3, 1), 3)
    assert plan(5, 1024, n_sms=47).queries == 16  # room for 94
    assert plan(5, 1024, n_sms=48).queries == 4
    assert plan(5, 1024, kind="host").queries == 16
    assert plan(1, 1 << 20).queries == 4
    assert plan(40, 1024, table=True).partial.grid[2] == 40
    assert short.workspace_bytes == plan(5, 1024, kind="host").workspace_bytes
