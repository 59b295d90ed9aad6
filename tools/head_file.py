"""The file of a draft head for SmolLM2: what ``tools/train_head.py`` writes and goes on with."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

ARCHITECTURE = "memra-draft-head"


def pack(arrays: dict[str, np.ndarray], vocabulary: np.ndarray, path: str, target: str) -> None:
    """Write what ``examples/smollm2/head.py`` reads: q8_0, and q4_1 for the feed-forward part."""
    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_string("head.target", target)
    writer.add_tensor("tokens", np.asarray(vocabulary, np.int32))
    n_q = arrays["out"].shape[1]  # the rest of q | k | v are keys and values alike
    n_kv = (len(arrays["qkv"]) - n_q) // 2
    q, k, v = np.split(arrays["qkv"], [n_q, n_q + n_kv])
    gate, up = np.split(arrays["gate_up"], 2)
    matrices = {
        "features": arrays["features"],
        "blk.0.attn_q": q,
        "blk.0.attn_k": k,
        "blk.0.attn_v": v,
        "blk.0.attn_output": arrays["out"],
        "blk.0.ffn_gate": gate,
        "blk.0.ffn_up": up,
        "blk.0.ffn_down": arrays["down"],
    }
    for name, matrix in matrices.items():
        kind = GGMLQuantizationType.Q4_1 if "ffn" in name else GGMLQuantizationType.Q8_0
        rows = quantize(np.ascontiguousarray(matrix, np.float32), kind)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        gain = arrays[name.removeprefix("blk.0.")]
        writer.add_tensor(f"{name}.weight", np.asarray(gain, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unpack(path: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Read what :func:`pack` wrote."""
    stored = {t.name.removesuffix(".weight"): t for t in GGUFReader(path).tensors}
    w = {
        name: np.array(dequantize(t.data, t.tensor_type), np.float32)
        for name, t in stored.items()
        if name != "tokens"
    }
    arrays = {
        "features": w["features"],
        "out": w["blk.0.attn_output"],
        "down": w["blk.0.ffn_down"],
        "qkv": np.concatenate([w[f"blk.0.attn_{n}"] for n in "qkv"]),
        "gate_up": np.concatenate([w["blk.0.ffn_gate"], w["blk.0.ffn_up"]]),
        "attn_norm": w["blk.0.attn_norm"],
        "ffn_norm": w["blk.0.ffn_norm"],
        "output_norm": w["output_norm"],
    }
    return arrays, np.array(stored["tokens"].data, np.int64)
