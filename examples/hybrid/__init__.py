"""A small made-up model of latent attention, its indexer and linear attention, scaled down.

Read it in this order: ``ops`` (kernels that the library does not have, compiled from a string),
``model`` (weights and one forward pass), ``generate`` (plain decoding, speculation, a prompt kept
for later).
"""

from .generate import Session, generate_greedy, run
from .model import Config, HybridModel

__all__ = ["Config", "HybridModel", "Session", "generate_greedy", "run"]
