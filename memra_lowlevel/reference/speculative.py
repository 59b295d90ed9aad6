"""Oracles of the small kernels that close a drafted token and a round."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["chain_advance", "keep_hidden", "round_advance", "take_hidden"]


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


def round_advance(
    io: Any,
    drafts: Any,
    argmax: Any,
    state: Any,
    ends: Any,
    k: int,
    n_vocab: int,
    followed: bool = False,
) -> dict[str, Any]:
    """Return what a round of k drafts commits and leaves; arguments as of the kernel."""
    io, drafts = [int(x) for x in io], [int(x) for x in drafts]
    argmax, state = [int(x) for x in argmax], [int(x) for x in state]
    n_tokens, wanted, rounds, position, target_end, draft_end, _ = state
    right = next((i for i in range(k) if drafts[1 + i] != argmax[i]), k)
    new = [*drafts[1 : 1 + right], argmax[right]]
    if io[4] >= 0 or not 0 <= new[-1] < n_vocab:
        state[6] = 4
        return {
            "io": io, "drafts": drafts, "state": state, "tokens": [], "accepted": [],
            "target": 0, "draft": -k, "goes_on": 0, "lags": None,
        }  # fmt: skip
    position += right + 1
    reason = 0
    if position + k + 1 > target_end or position + k > draft_end:
        reason = 3
    if n_tokens + len(new) >= wanted:
        reason = 1
    if set(new) & {int(e) for e in ends}:
        reason = 2
    lag = right == k and not followed
    feed = [drafts[k], new[-1]] if lag else [new[-1]]
    first = position - 1 if lag else position
    io[:6] = feed[0], first, 0, len(feed), io[4], feed[0]
    io[6] = new[-1]
    drafts[0] = new[-1]
    return {
        "io": io, "drafts": drafts,
        "state": [n_tokens + len(new), wanted, rounds + 1, position, target_end, draft_end, reason],
        "tokens": new, "accepted": [right], "target": right + 1,
        "draft": (k if lag else right + 1) - k, "goes_on": int(reason == 0), "lags": int(lag),
    }  # fmt: skip


def keep_hidden(
    h: Any, kept: Any, position: int, eps: float, io: Any = None
) -> NDArray[np.float64]:
    """Return what is kept after rows ``h`` at ``position`` and on; ``kept`` stays as it is."""
    out = np.array(kept, np.float64)
    if io is not None and int(io[2]) + 1 < int(io[3]):
        return out
    for r, row in enumerate(np.asarray(h, np.float64)):
        if 1 <= position + 1 + r < len(out):
            out[position + 1 + r] = row / np.sqrt(np.mean(row * row) + eps)
    return out


def take_hidden(kept: Any, position: int, n_rows: int) -> NDArray[Any]:
    """Return the rows before positions ``position`` and on; NaN outside what is kept."""
    kept = np.asarray(kept)
    out = np.full((n_rows, kept.shape[1]), np.nan, kept.dtype)
    for r in range(n_rows):
        if 0 <= position + r < len(kept):
            out[r] = kept[position + r]
    return out
