"""Tiny GGUF and safetensors models for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, LAYERS = 16, 4, 2, 24, 11, 2

Arrays = dict[str, npt.NDArray[np.float32]]


def llama_arrays(more: Mapping[str, tuple[int, ...]] | None = None) -> Arrays:
    """Every tensor of a two-layer llama under GGUF names, and ``more`` by name and shape."""
    rng = np.random.default_rng(0)
    wanted: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    kv = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        wanted |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    wanted |= more or {}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in wanted.items()}


def write_gguf(
    path: Path,
    arrays: Arrays,
    *,
    arch: str = "llama",
    extra: dict[str, Any] | None = None,
    raw: dict[str, tuple[npt.NDArray[np.uint8], GGMLQuantizationType]] | None = None,
) -> Path:
    """A GGUF file. ``extra`` metadata overrides the default keys (None leaves one out); ``raw`` are encoded tensors."""
    writer = GGUFWriter(path, arch)
    keys: dict[str, Any] = {
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 5000.0,
    }
    for key, value in (keys | (extra or {})).items():
        add(writer, key, value)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    for name, (data, kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """One metadata key with the type GGUF files usually have."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def header_bytes(*, version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    """The fixed start of a GGUF file with ``rest`` behind it."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest
