"""A small Llama engine on the public interface: SmolLM2, any Llama GGUF, or a made-up tiny model.

Read it in this order: ``weights`` (the file), ``tokenizer``, ``model`` (one forward pass),
``generate`` (plain greedy decoding). ``fetch`` gets the model file, ``tiny`` makes one up.
"""

from .generate import GreedyStep, Session, generate_greedy
from .model import Model, Workspace
from .tokenizer import Tokenizer
from .weights import Config, Weights

__all__ = [
    "Config",
    "GreedyStep",
    "Model",
    "Session",
    "Tokenizer",
    "Weights",
    "Workspace",
    "generate_greedy",
]
