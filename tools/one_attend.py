"""One launch of decode attention, for a profiler.

    ncu -k attend_mma -c 1 -s 1 --set full python tools/one_attend.py 32/8/128 131072
    ncu -k attend_f16 -s 1 -c 1 python tools/one_attend.py 32/8/128 131072 1 cuda:0 q8_0/q4_0

Query heads / kv heads / head_dim, the context, the number of rows (default 1), the device (default
``cuda:0``) and the formats of K and V (default q8_0/q5_1). Launches it twice, so that the second
(``-s 1``) finds everything loaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from memra_lowlevel import Device
from memra_lowlevel.formats import by_name
from memra_lowlevel.kernels import kv_attend


def main(
    shape: str, ctx: int, n_rows: int = 1, device_name: str = "cuda:0", formats: str = "q8_0/q5_1"
) -> None:
    """Launch the work of the module's description."""
    k_format, v_format = map(by_name, formats.split("/"))
    n_heads, n_kv_heads, head_dim = (int(x) for x in shape.split("/"))
    kv_dim, rng = n_kv_heads * head_dim, np.random.default_rng(0)
    with Device(device_name) as device, device.stream(name="one") as stream:
        planes = []
        for fmt in (k_format, v_format):
            part = fmt.encode(rng.standard_normal((min(ctx, 4096), kv_dim), np.float32))
            whole = np.concatenate([part] * -(-ctx // len(part)))[:ctx]
            planes.append(device.from_numpy(whole.reshape(-1), stream))
        q = rng.standard_normal((n_rows, n_heads, head_dim), np.float32)
        queries, out = device.from_numpy(q, stream), device.empty(q.shape, np.float32, stream)
        len_d = device.from_numpy(np.array([ctx - n_rows], np.int32), stream)
        n_bytes = kv_attend.workspace_bytes(device, n_rows, n_heads, head_dim, ctx)
        workspace = device.empty((n_bytes // 4,), np.float32, stream)
        for _ in range(2):
            kv_attend.attend(
                stream, queries, *planes, out, len_d=len_d, k_format=k_format,
                v_format=v_format, rows=ctx, n_kv_heads=n_kv_heads, head_dim=head_dim,
                workspace=workspace,
            )  # fmt: skip
        stream.sync()
        if not np.isfinite(out.to_numpy(stream)).all():
            raise SystemExit("one_attend: the output is not finite")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:6])
