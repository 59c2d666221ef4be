"""transformers' side of a walk: a random model of a configuration, and what it makes of tokens."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class CannotRunError(Exception):
    """transformers itself cannot build, save or run this one; says why."""


def build(model_class: Any, config_class: Any, fields: dict[str, Any], seed: int) -> Any:
    """A model in which every weight counts: norms are not 1, biases not 0, decays neither 0 nor 1."""
    try:
        config = config_class(**copy.deepcopy(fields))
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"  # the other wants rows of 16 bytes
        torch.manual_seed(seed)
        model = model_class(config).eval()
        randomise(model, seed)
    except Exception as error:
        raise CannotRunError(f"{type(error).__name__}: {error}") from error
    return model


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Draw all parameters, and the buffers that are learned: those that are saved and do not follow from the configuration."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean, spread = 0.0, 0.2
        if "norm" in name.lower() and parameter.dim() == 1 and not name.endswith("bias"):
            mean = 1.0
        elif name.endswith("A_log"):
            mean, spread = -1.0, 1.0
        elif name.endswith((".D", "conv1d.weight")):
            mean, spread = 0.5, 0.5
        parameter.normal_(mean, spread, generator=generator)
    saved = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in saved and name.endswith(("bias", "scalar")) and buffer.is_floating_point():
            noise = torch.empty(buffer.shape).uniform_(-0.2, 0.2, generator=generator)
            buffer.add_(noise.to(buffer.dtype))


def tokens_of(seed: int, vocab: int, number: int, least: int = 3) -> list[int]:
    rng = random.Random(f"tokens {seed}")
    return [rng.randrange(least, vocab) for _ in range(number)]


@torch.no_grad()
def run(model: Any, tokens: list[int], **inputs: Any) -> torch.Tensor:
    """float [T, V], logits of every token."""
    try:
        found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False, **inputs).logits[0].float()
    except Exception as error:
        raise CannotRunError(f"{type(error).__name__}: {error}") from error
    if not found.isfinite().all():
        raise CannotRunError("its logits are not finite")
    return found


def unsteady(model: Any, forward: Callable[[Any], torch.Tensor], tolerance: float) -> str:
    """Why a difference would say nothing: its own float32 is as far from float64, or weights shaken in their last bits move it
    as far; "" where it does."""
    wanted = forward(model)
    try:
        exact = forward(copy.deepcopy(model).double()).float()
        if float((exact - wanted).abs().max()) > tolerance / 4:
            return "its own rounding differs as much"
    except CannotRunError:
        pass  # parts of it know float32 alone
    shaken = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in shaken.parameters():
            parameter.mul_(1 + 3e-7 * torch.randn(parameter.shape, generator=generator))
    moved = float((forward(shaken) - wanted).abs().max())
    return "the last bits of its weights move it as much" if moved > tolerance / 4 else ""


def attends_otherwise(
    model: Any, forward: Callable[[Any], torch.Tensor], found: torch.Tensor, tolerance: float
) -> bool:
    """Whether it gives what we ``found`` where it attends by torch's own operation: its plain way adds Falcon's ALiBi twice."""
    other = copy.deepcopy(model)
    try:
        other.set_attn_implementation("sdpa")
        return float((forward(other) - found).abs().max()) <= tolerance
    except Exception:  # it has no other
        return False
