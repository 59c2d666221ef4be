"""A Whisper that hears .6 s, with a tokenizer of bytes, two languages and random weights; and what transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.mel import log_mel
from tests.engine.tiny_encoder_decoders import randomised, save, whisper

END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES, TIMES = (
    256,
    257,
    258,
    259,
    260,
    261,
    263,
    264,
    265,
    266,
)
MELS, OUTPUTS, CONTEXT = 8, 30, 64
FRAMES = 2 * OUTPUTS
WINDOW = FRAMES / 100
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
           "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]  # fmt: skip
SUPPRESS, BEGIN = [1, 5, 200, START, EN, DE, TRANSLATE, TRANSCRIBE, 262, PREVIOUS, NO_SPEECH], [32, END]


def make(folder: Path) -> tuple[Any, str]:
    """The model of transformers, and its folder."""
    model = whisper(
        vocab_size=TIMES + OUTPUTS + 1, num_mel_bins=MELS, max_source_positions=OUTPUTS, max_target_positions=CONTEXT,
        eos_token_id=END, decoder_start_token_id=START, pad_token_id=END, bos_token_id=END,
    )  # fmt: skip
    randomised(model)
    for name, value in {
        "lang_to_id": {"<|en|>": EN, "<|de|>": DE}, "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
        "no_timestamps_token_id": NO_TIMES, "suppress_tokens": SUPPRESS, "begin_suppress_tokens": BEGIN,
        "max_initial_timestamp_index": 12, "prev_sot_token_id": PREVIOUS, "eos_token_id": END,
        "decoder_start_token_id": START,
    }.items():  # fmt: skip
        setattr(model.generation_config, name, value)
    save(model, folder)
    _tokenizer(folder)
    return model, str(folder)


def _tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.add_tokens([f"<|{i / 50:.2f}|>" for i in range(OUTPUTS + 1)])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def sounds(seconds: float, seed: int = 0) -> Any:
    """Noise that comes and goes, float32 [n]."""
    number = int(seconds * RATE)
    noise = np.random.default_rng(seed).standard_normal(number) * 0.2
    return (noise * (np.sin(np.arange(number) / RATE * 9) ** 2)).astype(np.float32)


@torch.no_grad()
def tokens_of(model: Any, samples: Any, prompt: list[int], *, timed: bool, count: int) -> list[int]:
    """What transformers' logits and processors give for one window, without the end token."""
    from types import SimpleNamespace

    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    mel = torch.from_numpy(log_mel(samples, bins=MELS, frames=FRAMES))[None]
    never = [*SUPPRESS, NO_TIMES] if timed else SUPPRESS
    steps: list[Any] = [SuppressTokensAtBeginLogitsProcessor(BEGIN, len(prompt)), SuppressTokensLogitsProcessor(never)]
    if timed:
        config: Any = SimpleNamespace(
            no_timestamps_token_id=NO_TIMES, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=12
        )
        steps.append(WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)))
    tokens = list(prompt)
    for _ in range(count):
        ids = torch.tensor([tokens])
        logits = model(input_features=mel, decoder_input_ids=ids).logits[:, -1].float()
        for step in steps:
            logits = step(ids, logits)
        token = int(logits.argmax())
        if token == END:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@torch.no_grad()
def language_of(model: Any, samples: Any) -> int:
    """EN or DE."""
    mel = torch.from_numpy(log_mel(samples, bins=MELS, frames=FRAMES))[None]
    logits = model(input_features=mel, decoder_input_ids=torch.tensor([[START]])).logits[0, -1]
    return EN if logits[EN] >= logits[DE] else DE
