"""Small GGUF vocabularies for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.api.text_stream import byte_alphabet
from headway.weights.gguf_file import GgufHeader

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_metadata(**extra: Any) -> dict[str, Any]:
    """A byte-level vocabulary: three control tokens, one user-defined, 256 bytes and a few merged pieces."""
    special = ["<|end|>", "<|start|>", "<|turn|>"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "Ġ Ġ", "ð Ł", "e s"]
    pieces = [merge.replace(" ", "") for merge in merges]
    tokens = [*special, "<think>", *byte_alphabet(), *pieces]
    types = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (256 + len(pieces))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.{k}" if k == "chat_template" else f"tokenizer.ggml.{k}": v for k, v in extra.items()},
    }


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    """A sentencepiece vocabulary with byte fallback; better scores merge first."""
    words = "▁ a b c e h l o w r d ▁▁ ll he llo ▁he ▁a hello ▁hello ▁w or ▁wor ld"
    pieces = words.split(" ")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, "<|im|>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED]
    scores = [0.0] * 259 + [-1.0 - i for i in range(len(pieces))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{k}": v for k, v in extra.items()},
    }


def header(metadata: dict[str, Any]) -> GgufHeader:
    """A parsed file with these keys and no tensors."""
    return GgufHeader(Path("tiny.gguf"), metadata, [], 0)
