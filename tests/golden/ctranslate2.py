"""Whisper models as CTranslate2 stores them, as transformers' checkpoints: what packages of speech programs hold.

The file is a header, then for each tensor its name, shape, type and bytes, then names that are another's. Texts are a length of
two bytes, and bytes that end with zero.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
ENGLISH = 51864
"""Tokens of models that know no other language; others have more."""
HEAD = 64
"""Numbers of a head in all of Whisper's sizes."""


def read_tensors(data: bytes) -> dict[str, Any]:
    """Name -> array, of a model.bin."""
    place, found = 0, dict[str, Any]()

    def take(form: str) -> int:
        nonlocal place
        [value] = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(form)
        return int(value)

    def text() -> str:
        nonlocal place
        size = take("H")
        place += size
        return data[place - size : place - 1].decode()

    assert take("I") == 6 and text() == "WhisperSpec"
    take("I")
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        dtype, size = DTYPES[take("B")], take("I")
        found[name] = np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, place).reshape(shape)
        place += size
    for _ in range(take("I")):
        name = text()
        found[name] = found[text()]
    return found


def checkpoint(data: bytes, folder: Path, tokenizer: bytes, told: Mapping[str, Any]) -> None:
    """A checkpoint in float32, its tokenizer, and what it says of itself.

    Args:
        told: the model's config.json as CTranslate2 has it.
    """
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    tensors = read_tensors(data)
    vocab, width = tensors["decoder/embeddings/weight"].shape
    layers = {part: _count(tensors, part) for part in ("encoder", "decoder")}
    config = WhisperConfig(
        vocab_size=vocab, d_model=width, num_mel_bins=tensors["encoder/conv1/weight"].shape[1],
        encoder_layers=layers["encoder"], decoder_layers=layers["decoder"], encoder_attention_heads=width // HEAD,
        decoder_attention_heads=width // HEAD, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        max_target_positions=tensors["decoder/position_encodings/encodings"].shape[0],
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    missing, unknown = model.load_state_dict(_state(tensors, layers), strict=False)
    assert not unknown and set(missing) <= {"proj_out.weight"}
    names = {each["content"]: each["id"] for each in json.loads(tokenizer)["added_tokens"]}
    start, languages = names["<|startoftranscript|>"], told["lang_ids"] if vocab > ENGLISH else []
    codes = {token: text for text, token in names.items()}
    model.generation_config = GenerationConfig(
        suppress_tokens=told["suppress_ids"], begin_suppress_tokens=told["suppress_ids_begin"],
        alignment_heads=told["alignment_heads"], decoder_start_token_id=start, no_timestamps_token_id=names["<|notimestamps|>"],
        prev_sot_token_id=names["<|startofprev|>"], eos_token_id=names["<|endoftext|>"], pad_token_id=names["<|endoftext|>"],
        bos_token_id=names["<|endoftext|>"], max_initial_timestamp_index=50, max_length=448, is_multilingual=bool(languages),
        return_timestamps=False, **({
            "lang_to_id": {codes[token]: token for token in languages},
            "task_to_id": {task: names[f"<|{task}|>"] for task in ("transcribe", "translate")},
        } if languages else {}),
    )  # fmt: skip
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id"):
        setattr(model.config, name, getattr(model.generation_config, name))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _count(tensors: Mapping[str, Any], part: str) -> int:
    return len(
        {name.split("/")[1] for name in tensors if name.startswith(f"{part}/layer_") and "layer_norm/" not in name[:20]}
    )


def _state(tensors: Mapping[str, Any], layers: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Tensors by transformers' names."""
    found: dict[str, torch.Tensor] = {}

    def put(theirs: str, ours: Sequence[str], *, biased: Sequence[bool] = ()) -> None:
        """A tensor, or several that are stacked; ``biased``: which of them have a bias there."""
        for kind, own in (("weight", "weight"), ("bias", "bias"), ("gamma", "weight"), ("beta", "bias")):
            if f"{theirs}/{kind}" not in tensors:
                continue
            parts = torch.from_numpy(tensors[f"{theirs}/{kind}"].astype(np.float32)).chunk(len(ours))
            for name, part, has_bias in zip(ours, parts, biased or (True,) * len(ours), strict=True):
                if kind != "bias" or has_bias:
                    found[f"model.{name}.{own}"] = part.clone()

    for part, count in layers.items():
        positions = tensors[f"{part}/position_encodings/encodings"].astype(np.float32)
        found[f"model.{part}.embed_positions.weight"] = torch.from_numpy(positions)
        put(f"{part}/layer_norm", [f"{part}.layer_norm"])
        for number in range(count):
            theirs, ours = f"{part}/layer_{number}", f"{part}.layers.{number}"
            into = [f"{ours}.self_attn.{name}_proj" for name in "qkv"]
            put(f"{theirs}/self_attention/linear_0", into, biased=(True, False, True))
            put(f"{theirs}/self_attention/linear_1", [f"{ours}.self_attn.out_proj"])
            put(f"{theirs}/self_attention/layer_norm", [f"{ours}.self_attn_layer_norm"])
            put(f"{theirs}/attention/linear_0", [f"{ours}.encoder_attn.q_proj"])
            put(f"{theirs}/attention/linear_1", [f"{ours}.encoder_attn.{n}_proj" for n in "kv"], biased=(False, True))
            put(f"{theirs}/attention/linear_2", [f"{ours}.encoder_attn.out_proj"])
            put(f"{theirs}/attention/layer_norm", [f"{ours}.encoder_attn_layer_norm"])
            put(f"{theirs}/ffn/linear_0", [f"{ours}.fc1"])
            put(f"{theirs}/ffn/linear_1", [f"{ours}.fc2"])
            put(f"{theirs}/ffn/layer_norm", [f"{ours}.final_layer_norm"])
    for number in (1, 2):
        put(f"encoder/conv{number}", [f"encoder.conv{number}"])
    put("decoder/embeddings", ["decoder.embed_tokens"])
    return found
