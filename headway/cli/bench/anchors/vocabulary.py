"""A tokenizer for shapes that have none: the built-in model's if it is installed, else one made up on the spot."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final

from headway.core.errors import HeadwayError

END: Final = "<|end|>"
PIECES: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?-_()[]{}\"'/\\\n\t"


def choose_tokenizer(size: int, work: Path) -> tuple[str, str]:
    """What to give as EngineArgs.tokenizer, and in words what it is; it has ``size`` tokens.

    The built-in model's is a real vocabulary, so masks of grammars over it are of realistic shape; the made-up one has the
    256 bytes and random strings, and serves where that package is not installed or has another size.
    """
    from headway.api.tokenizer import load_tokenizer

    try:
        if load_tokenizer("smollm2").vocab_size == size:
            return "smollm2", f"SmolLM2's, {size} tokens"
    except HeadwayError:
        pass
    folder = work / f"tokenizer_{size}"
    make_tokenizer(folder, size)
    return str(folder), f"made up, {size} tokens"


def make_tokenizer(folder: Path, size: int) -> None:
    """Write a byte-level tokenizer of ``size`` >= 257 tokens: id 0 ends a text, then the bytes, then random strings."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [END, *alphabet]
    seen, rng = set(words), random.Random(size)
    while len(words) < size:
        word = "".join(rng.choices(PIECES, k=rng.randint(2, 9)))
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)[0][0]
        if spelled not in seen:
            seen.add(spelled)
            words.append(spelled)
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
