"""A small Llama engine on the public interface: SmolLM2, any Llama GGUF, or a made-up tiny model.

Read it in this order: ``weights`` (the file), ``tokenizer``, ``model`` (one forward pass),
``generate`` (plain greedy decoding), ``head`` (a trained head that drafts). ``fetch`` gets the file
of the model, ``tiny`` makes one up.
"""

from .generate import GreedyStep, Session, generate_greedy
from .head import DraftHead, HeadDrafter
from .model import Model, Workspace
from .tokenizer import Tokenizer
from .weights import Config, Weights

__all__ = [
    "Config",
    "DraftHead",
    "GreedyStep",
    "HeadDrafter",
    "Model",
    "Session",
    "Tokenizer",
    "Weights",
    "Workspace",
    "generate_greedy",
]
