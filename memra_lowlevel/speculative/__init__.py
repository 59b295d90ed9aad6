"""Speculative decoding: captured draft chains, rounds, drafters, and what they did."""

from .accept import Rewind, accept_greedy, rewind_amounts
from .chain import DraftChain
from .drafters import LayerRange, NgramDrafter, early_exit_chain
from .hidden import HiddenRows
from .io import ChainIo
from .loop import DeviceLoop, LoopResult
from .ngram import NgramIndex
from .round import Drafter, RoundResult, SpecRound, Target
from .stats import HOST_WRITE_CALLS, NODE_UPDATE_CALLS, CallMeter, SpecStats

__all__ = [
    "HOST_WRITE_CALLS",
    "NODE_UPDATE_CALLS",
    "CallMeter",
    "ChainIo",
    "DeviceLoop",
    "DraftChain",
    "Drafter",
    "HiddenRows",
    "LayerRange",
    "LoopResult",
    "NgramDrafter",
    "NgramIndex",
    "Rewind",
    "RoundResult",
    "SpecRound",
    "SpecStats",
    "Target",
    "accept_greedy",
    "early_exit_chain",
    "rewind_amounts",
]
