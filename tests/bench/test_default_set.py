"""The set of kernels whose cold compilation is timed."""

from types import SimpleNamespace

import pytest

from memra_lowlevel import formats
from memra_lowlevel.bench import compiling
from memra_lowlevel.kernels import kv_attend_f16, kv_attend_mma


@pytest.mark.parametrize("head_dim", compiling.HEAD_DIMS)
@pytest.mark.parametrize("pair", compiling.PAIRS, ids="/".join)
def test_general_attention_is_there_where_no_tensor_cores_do_it(pair, head_dim):
    device = SimpleNamespace(kind="cuda", arch="sm_90")
    k, v = (getattr(formats, name) for name in pair)
    others = (
        kv_attend_mma.refusal(device, k, v, head_dim, head_dim, 8),
        kv_attend_f16.refusal(device, k, v, head_dim, head_dim, 8),
    )
    wanted = {"k_format": pair[0], "v_format": pair[1], "head_dim": head_dim}
    general = next(s for s in compiling.default_set() if s.name == "attend_partial")
    added = [i for i in general.instances if wanted.items() <= i.items()]
    if None not in others:
        assert added
    assert compiling._on_tensor_cores(*pair, head_dim) == (None in others)
