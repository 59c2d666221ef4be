"""What some encoders add to attention's scores by the distance of query and key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from headway.models.interface import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBiasSpec:
    """A bias by distance, the same in all layers.

    Attributes:
        kind: "alibi": -slope of the head * distance (Press et al. 2022, both ways as in Jina v2); "buckets": learned for each
            head and bucket of distances, which are logarithmic (T5's, Raffel et al. 2020).
        num_heads: H.
        name: of the table of buckets in the checkpoint.
        num_buckets, max_distance: T5's numbers; half of the buckets are for later keys.
    """

    kind: Literal["alibi", "buckets"]
    num_heads: int
    name: str = ""
    num_buckets: int = 32
    max_distance: int = 128


class PositionBias(nn.Module):
    """The bias of texts of up to ``longest`` tokens.

    Attributes:
        table: f32 [H, 2 longest - 1], by key - query + longest - 1; of "buckets" once ``finalize`` has been called.
    """

    def __init__(self, spec: PositionBiasSpec, longest: int, *, device: torch.device) -> None:
        super().__init__()
        self.spec, self._longest = spec, longest
        self.learned = None
        if spec.kind == "buckets":
            empty = torch.empty(spec.num_buckets, spec.num_heads, dtype=torch.float32, device=device)
            self.learned = nn.Parameter(empty, requires_grad=False)
        self.table = torch.zeros(spec.num_heads, 2 * longest - 1, device=device)
        if spec.kind == "alibi" and device.type != "meta":
            apart = torch.arange(2 * longest - 1) - (longest - 1)
            self.table.copy_(-torch.tensor(alibi_slopes(spec.num_heads))[:, None] * apart.abs())

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        return {} if self.learned is None else {f"{self.spec.name}.weight": Target(self.learned)}

    def finalize(self) -> None:
        """Called once, after loading."""
        if self.learned is not None:
            apart = torch.arange(2 * self._longest - 1) - (self._longest - 1)
            bucket = distance_bucket(apart, self.spec.num_buckets, self.spec.max_distance)
            self.table.copy_(self.learned[bucket.to(self.learned.device)].T)


def alibi_slopes(num_heads: int) -> list[float]:
    """2 ** (-8 i / H) for i = 1 ... H where H is a power of two; else those of the power below, and every other one of the
    power above (the paper's code)."""

    def of_power(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    below = 2 ** math.floor(math.log2(num_heads))
    return of_power(below) + of_power(2 * below)[::2][: num_heads - below]


def distance_bucket(apart: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """int64 bucket of each key - query: half of them for later keys; of a half the first half one distance each, the others
    logarithmic up to ``max_distance`` (T5, as MPNet has it)."""
    half = num_buckets // 2
    away = apart.abs()
    exact = half // 2
    log = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (half - exact)
    far = (exact + log.to(torch.int64)).clamp(max=half - 1)
    return torch.where(apart > 0, half, 0) + torch.where(away < exact, away, far)


def causal_bucket(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """int64 bucket of each distance query - key >= 0: half of them one distance each, the others logarithmic up to
    ``max_distance`` (T5's decoders)."""
    exact = num_buckets // 2
    log = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    far = (exact + log.to(torch.int64)).clamp(max=num_buckets - 1)
    return torch.where(distance < exact, distance, far)
