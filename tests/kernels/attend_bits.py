"""What every attention kernel on tensor cores owes, bit for bit: shared by the files of both.

Each function takes filled planes and the name of the kernel.
"""

import numpy as np
from rig import error, normal, reference, same

from memra_lowlevel.kernels import kv_attend


def a_window_equals_masking(planes, rng, kernel):
    """Keys outside the window have no influence: a plane of 300 in which they are poison agrees."""
    q = normal(rng, 3, 4, 128)
    planes.set_len(280)
    plain = planes.attend(q, window=100, kernel=kernel)
    rows = np.full((181, 256), np.nan, np.float32)
    planes.load(rows, rows)  # keys below the first window
    planes.load(rows[:10], rows[:10], first=283)  # and behind the last row
    assert same(planes.attend(q, window=100, kernel=kernel), plain)


def a_poisoned_key_stays_with_the_rows_that_see_it(planes, rng, kernel):
    q = normal(rng, 8, 4, 128)
    planes.set_len(100)
    clean = planes.attend(q, kernel=kernel)
    poison = np.full((1, 256), np.nan, np.float32)
    planes.load(poison, poison, first=104)
    spoiled = planes.attend(q, kernel=kernel)
    assert same(spoiled[:4], clean[:4])
    assert np.isnan(spoiled[4:]).all()


def workspace_content_is_irrelevant(planes, q, kernel):
    stream, (n_rows, n_heads, head_dim) = planes.stream, q.shape
    planes.set_len(150)
    size = kv_attend.workspace_bytes(
        stream.device, n_rows, n_heads, head_dim, planes.rows, kernel=kernel
    )
    outs = []
    for byte in (0xFF, 0x00, 0x7F, 0x3F):
        workspace = stream.device.alloc(size, stream)
        workspace.fill(stream, byte)
        outs.append(planes.attend(q, workspace=workspace, kernel=kernel))
    assert all(same(outs[0], other) for other in outs[1:])


def keys_beyond_the_capacity_are_never_read(planes, q, kernel):
    planes.set_len(planes.rows - 1)
    full = planes.attend(q, kernel=kernel)
    planes.set_len(5000)  # a counter that ran away
    assert same(planes.attend(q, kernel=kernel), full)
    rows = np.repeat(q[:1], 8, axis=0)
    for window in (1, 3):  # the first rows see the last keys, the windows of the others lie behind
        planes.set_len(planes.rows - 1)
        out = planes.attend(rows, kernel=kernel, window=window)
        assert same(out[:1], planes.attend(rows[:1], kernel=kernel, window=window))
        assert out[:window].any(axis=(1, 2)).all() and not out[window:].any()


def a_bad_query_spoils_itself_only(planes, q, kernel, **options):
    planes.set_len(70)
    clean = planes.attend(q, kernel=kernel, **options)
    for value in (np.nan, np.inf, -np.inf):
        wrong = q.copy()
        wrong[1, 2, 5] = value
        got = planes.attend(wrong, kernel=kernel, **options)
        assert np.isnan(got[1, 2]).all()
        got[1, 2] = clean[1, 2]
        assert same(got, clean)


def queries_at_the_end_of_the_range(planes, kernel, bound):
    """Few channels as large as f32 can be, whose scores are ordinary by a tiny scale."""
    q = np.zeros((1, 4, 128), np.float32)
    planes.set_len(60)
    for size in (2.0**127, 3.38e38, 3.395e38, np.finfo(np.float32).max):
        q[..., 3], q[..., 70] = size, -size
        for scale in (1e-38, -1e-38):
            out = planes.attend(q, kernel=kernel, scale=scale)
            assert error(out, reference(planes, q, 60, scale=np.float32(scale))[0]) <= bound


def a_replay_equals_eager_launches(planes, q, kernel):
    """The kernels are loaded before."""
    stream, out, again = planes.stream, [], []
    size = kv_attend.workspace_bytes(stream.device, *q.shape, planes.rows, kernel=kernel)
    queries = planes.upload(q)
    workspace = planes.poisoned(size).view(0, (size // 4,), np.float32)
    result = planes.poisoned(q.nbytes).view(0, q.shape, np.float32)

    def attend():
        kv_attend.attend(
            stream, queries, planes.k, planes.v, result, len_d=planes.len_d,
            k_format=planes.k_format, v_format=planes.v_format, rows=planes.rows,
            n_kv_heads=planes.n_kv_heads, head_dim=q.shape[2], workspace=workspace, kernel=kernel,
        )  # fmt: skip

    with stream.capture("step") as graph:
        attend()
    step = graph.instantiate()
    for length in (3, 90, 198):
        planes.set_len(length)
        attend()
        out.append(result.to_numpy(stream))
        step.launch(stream)
        again.append(result.to_numpy(stream))
    step.close()
    assert all(same(a, b) for a, b in zip(out, again, strict=True))
    assert not same(out[0], out[1])
