"""A tiny Llama that a server can have: one token for each printable letter, and room for answers that do not end in a test."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.tiny_llama import save_tiny_llama

MAX_LEN = 2**15
"""Tokens of a request: seconds of decoding, so one that is to be interrupted is still running."""
LETTERS = [chr(each) for each in range(32, 127)]


def save(folder: Path) -> Path:
    """Weights, configuration and tokenizer in ``folder``, which it gives."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    save_tiny_llama(folder, max_position_embeddings=MAX_LEN)
    letters = {letter: number for number, letter in enumerate(LETTERS)}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    made.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "</s>")])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder
