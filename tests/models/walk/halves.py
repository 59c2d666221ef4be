"""A walk in 16 bits: logits are about as far from float32's as transformers' own are in the same type of numbers."""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from headway.models.decoder import DecoderModel
from tests.models.harness import Machine
from tests.models.walk import oracle
from tests.models.walk.decoders import LENGTH, config_class_of, cut, engine, save
from tests.models.walk.draw import draw, known_fields
from tests.models.walk.verdict import Outcome, Verdict, judged

WORSE = 4.0
"""Times transformers' own distance that ours may be, of the median token: one expert chosen otherwise moves some tokens."""
SHAKES = 3
LEAST = 0.02
"""Deviations of the logits that any distance may be."""


def drawn(architecture: str, rng: random.Random) -> dict[str, Any]:
    """Fields of a configuration."""
    return draw(config_class_of(architecture), rng)


def judge(architecture: str, seed: int, fields: dict[str, Any]) -> Verdict:
    """Build, round the weights, save, and compare: bfloat16 for even seeds, float16 for odd ones."""
    import transformers

    dtype = torch.float16 if seed % 2 else torch.bfloat16
    verdict = Verdict(architecture, seed, Outcome.SKIPPED, fields=fields)
    try:
        model = oracle.build(getattr(transformers, architecture), config_class_of(architecture), fields, seed)
        tokens = oracle.tokens_of(seed, model.config.vocab_size, LENGTH)
        half = copy.deepcopy(model).to(dtype)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()
        wanted, theirs = oracle.run(model, tokens), oracle.run(half, tokens)
        with tempfile.TemporaryDirectory() as folder:
            save(model, Path(folder))
            verdict.outcome, verdict.detail = judged(
                lambda: _compare(folder, dtype, tokens, wanted, _allowed(model, dtype, tokens, wanted, theirs)),
                known_fields(model.config, Path(folder)),
                lambda: None,
            )
    except oracle.CannotRunError as error:
        verdict.detail = str(error)
    return verdict


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the median token."""
    return float((found - wanted).square().mean(1).sqrt().median())


def _allowed(model: Any, dtype: torch.dtype, tokens: list[int], wanted: torch.Tensor, theirs: torch.Tensor) -> float:
    """transformers' distance, or what weights shaken by a rounding make of it: an expert that nearly ties is chosen or not."""
    found, generator = [_distance(theirs, wanted)], torch.Generator().manual_seed(0)
    for _ in range(SHAKES):
        shaken = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in shaken.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + torch.finfo(dtype).eps / 2 * noise)
        found.append(_distance(oracle.run(shaken, tokens), wanted))
    return WORSE * max(found)


def _compare(
    folder: str, dtype: torch.dtype, tokens: list[int], wanted: torch.Tensor, allowed: float
) -> tuple[Outcome, str]:
    core = engine(folder, dtype=str(dtype).removeprefix("torch."))
    try:
        ours = core._runner.executor.body.model
        assert isinstance(ours, DecoderModel)
        found = Machine(ours).in_chunks(tokens, cut(tokens)).float()
    finally:
        core.shutdown()
    scale, apart = float(wanted.std()), _distance(found, wanted)
    if apart <= max(allowed, LEAST * scale):
        return Outcome.EQUAL, ""
    return Outcome.DIFFERENT, f"{dtype}: logits of deviation {scale:.3g} are {apart:.3g} apart, allowed {allowed:.3g}"
