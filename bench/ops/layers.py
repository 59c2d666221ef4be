"""Whole decoder layers of three models with the linear layers that the engine would have; shared by several benches."""

from __future__ import annotations

import sys
from functools import partial

import torch
from timing import time_calls

from headway.kernels.linear_forms.chain import PLAIN, Chain, Choice
from headway.kernels.linear_forms.shapes import JUNCTIONS, DecoderShape
from headway.kernels.linear_forms.winners import OPS
from headway.kernels.mid_linear.tiles import mid_rows
from headway.kernels.mid_linear.tiles import tile_for as mid_tile_for
from headway.kernels.skinny_linear.tiles import fused_rows
from headway.kernels.skinny_linear.tiles import tile_for as skinny_tile_for

MODELS = {
    "qwen3-0.6b": DecoderShape(1024, 3072, 16, 8, 128, 151936, qk_norm=True),
    "llama-8b": DecoderShape(4096, 14336, 32, 8, 128, 128256),
    "gemma3-1b": DecoderShape(1152, 6912, 4, 1, 256, 262144, qk_norm=True),
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def layers_of(model: str) -> int:
    """How many of its layers are run: none of their weights is in the L2 cache then."""
    return 8 if model == "llama-8b" else 28


def forms(shape: DecoderShape, rows: int) -> Choice:
    """The forms and tiles that the tables and the rules give."""
    weights = {junction: shape.weight(junction) for junction in JUNCTIONS}
    meet, few = OPS["meet"], OPS["few"]
    if all(rows in mid_rows(meet[name], *size) for name, size in weights.items()):  # type: ignore[arg-type]
        return {name: (meet[name], mid_tile_for(meet[name], rows, *size)) for name, size in weights.items()}  # type: ignore[arg-type]
    if all(rows <= fused_rows(few[name], *weights[name]) for name in ("o", "down")):  # type: ignore[arg-type]
        return {
            name: (few[name], skinny_tile_for(few[name], rows, *size))  # type: ignore[arg-type]
            if rows <= fused_rows(few[name], *size)  # type: ignore[arg-type]
            else PLAIN
            for name, size in weights.items()
        }
    return dict.fromkeys(JUNCTIONS, PLAIN)


class Layers(Chain):
    """Layers of a model for ``rows`` rows of ``context`` tokens, caches in ``cached``."""

    def __init__(
        self, model: str, rows: int, count: int, context: int = 448, cached: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(MODELS[model], rows, torch.device("cuda"), count=count, context=context, cached=cached)
        self.choice = forms(self.shape, rows)

    def spent(self) -> float:
        """Microseconds of a layer."""
        return time_calls([partial(self.run, self.choice)], 1) / len(self.weights)
