"""Oracle of the small kernel that closes a drafted token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["chain_advance"]


def chain_advance(
    io: Any, drafts: Any, counters: Any, n_vocab: int, k_max: int, token_map: Any = None
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return (words, drafts, counters) after one drafted token.

    ``io`` is (token, position, step, n_feed, bad, feed…) and ``drafts`` (pending, drafts…);
    ``token_map`` gives the target's token for each of the ``n_vocab`` of the draft.
    """
    words, out = [int(x) for x in io], [int(x) for x in drafts]
    token, position, step, n_feed, bad = words[:5]
    feed, step = words[5:], step + 1
    if step < n_feed:
        token = feed[step]
    else:
        nth = step - n_feed + 1
        if not 0 <= token < n_vocab:
            token, bad = 0, nth if bad < 0 else bad
        elif token_map is not None:
            token = int(token_map[token])
        if nth <= k_max:
            out[nth] = token
    words[:5] = token, position + 1, step, n_feed, bad
    moved = [int(c) + 1 for c in counters]
    return np.array(words, np.int32), np.array(out, np.int32), np.array(moved, np.int32)
