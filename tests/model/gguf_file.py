"""Writes small GGUF files."""

from dataclasses import replace

import gguf
import numpy as np

from memra_lowlevel.examples.smollm2.tiny import TINY
from memra_lowlevel.examples.smollm2.weights import required_shapes

SMALL = replace(TINY, n_layers=1, n_vocab=40)


def write(path, *, change=None, architecture="llama", extra=(), numbers=()):
    """A GGUF file of one small block; ``change`` edits its tensors {name: (array, kind)}."""
    writer = gguf.GGUFWriter(path, architecture)
    c = SMALL
    entries = {
        "block_count": c.n_layers,
        "context_length": c.max_ctx,
        "embedding_length": c.width,
        "feed_forward_length": c.n_ff,
        "attention.head_count": c.n_heads,
        "attention.head_count_kv": c.n_kv_heads,
        "attention.key_length": c.head_dim,
        **dict(numbers),
    }
    for name, value in entries.items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 5000.0)
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in required_shapes(SMALL).items():
        values = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        tensors[name] = (gguf.quants.quantize(values, kind), kind)
    table, kind = rng.standard_normal((40, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    tensors["token_embd.weight"] = (gguf.quants.quantize(table, kind), kind)
    for name, array, kind in extra:
        tensors[name] = (array, kind)
    if change:
        change(tensors)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
