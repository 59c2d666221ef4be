"""transformers' ``generate`` on the pictures and recordings of ``bench.sight`` and ``bench.hearing``: random weights, greedy,
in batches that begin and end together. It has no batch that others join, so it has no pace of texts beside pictures.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Inputs = dict[str, torch.Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
ALONE = 8


def built(make: Callable[[], Any]) -> Any:
    """A model of random weights where it will run, with transformers' default attention."""
    with torch.device(DEVICE):
        return make().to(DTYPE).eval()


def seconds(model: Any, inputs: Inputs, tokens: int) -> float:
    """Of exactly so many greedy tokens for each row of a batch. Whisper's own way around ``generate``, which looks for
    languages and long recordings, is left out."""
    from transformers import GenerationMixin

    begun = time.perf_counter()
    with torch.inference_mode():
        found = GenerationMixin.generate(
            model, **inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0
        )
    assert found.shape[1] >= tokens
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measured(
    model: Any, make: Callable[[Sequence[int]], Inputs], count: int, batch: int, tokens: int
) -> dict[str, float]:
    """Requests a second in batches, and milliseconds to the first token of one request alone.

    Args:
        make: the inputs of the requests with these numbers, on the device: preparing them is not counted.
    """
    seconds(model, make(range(min(batch, count))), 2)  # what only first calls do
    batches = [make(range(first, min(first + batch, count))) for first in range(0, count, batch)]
    spent = sum(seconds(model, each, tokens) for each in batches)
    alone = [1e3 * seconds(model, make([number]), 1) for number in range(ALONE)]
    return {"requests_per_second": count / spent, "first_token_ms": median(alone), "batch": batch}


def sight(folder: str, pictures: Callable[[int], npt.NDArray[np.uint8]], prompt: list[int], count: int, batch: int,
          tokens: int) -> dict[str, float]:  # fmt: skip
    """Figures of a model with sight.

    Args:
        pictures: number -> u8 [side, side, 3]. prompt: token ids with the placeholders of one picture.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(Path(folder))
    model = built(lambda: AutoModelForImageTextToText.from_config(config, dtype=DTYPE))
    takes = inspect.signature(model.forward).parameters
    token = getattr(config, "image_token_id", None)
    token = config.image_token_index if token is None else token

    def make(numbers: Sequence[int]) -> Inputs:
        pixels = np.stack([pictures(number) for number in numbers]).astype(np.float32) / 127.5 - 1
        squares = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(DEVICE, DTYPE)
        ids = torch.tensor([prompt] * len(numbers), device=DEVICE)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in takes:
                inputs[name] = (ids == token).long()
        if "image_grid_thw" not in takes:
            return inputs | {"pixel_values": squares}
        vision = config.vision_config
        size, group, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        side = squares.shape[2] // size
        cut = squares.unfold(2, size, size).unfold(3, size, size)  # [B, C, side, side, size, size]
        cut = cut.unflatten(2, (-1, group)).unflatten(4, (-1, group)).permute(0, 2, 4, 3, 5, 1, 6, 7)
        patches = cut.unsqueeze(6).expand(*cut.shape[:6], frames, size, size).reshape(len(numbers) * side**2, -1)
        grids = torch.tensor([[1, side, side]] * len(numbers), device=DEVICE)
        return inputs | {"pixel_values": patches, "image_grid_thw": grids}

    return measured(model, make, count, batch, tokens)


def hearing(config: dict[str, Any], spectrogram: Callable[[int], npt.NDArray[np.float32]], prompt: list[int], count: int,
            batch: int, tokens: int) -> dict[str, float]:  # fmt: skip
    """Figures of a Whisper; ``spectrogram``: number -> f32 [mels, frames]."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = built(lambda: WhisperForConditionalGeneration(WhisperConfig(**config)))

    def make(numbers: Sequence[int]) -> Inputs:
        features = torch.from_numpy(np.stack([spectrogram(number) for number in numbers])).to(DEVICE, DTYPE)
        ids = torch.tensor([prompt] * len(numbers), device=DEVICE)
        return {"input_features": features, "decoder_input_ids": ids}

    return measured(model, make, count, batch, tokens)
