"""``time_warp``: the cheapest way through a table of costs that never goes back, and where it enters each row.

time_warp(costs) -> starts

    costs   f32 [T, N], of token t at frame n; T, N >= 1
    starts  int32 [T], first frame of each token, in [0, N); never falls

Dynamic time warping (Sakoe and Chiba 1978) with the steps of Whisper's authors: a way begins at (0, 0), ends at (T - 1, N - 1)
and goes on to the next token, the next frame, or both. total(t, n) = costs[t, n] + the least of total(t - 1, n - 1),
total(t - 1, n) and total(t, n - 1); the first is taken if it is less than both others, else the second if it is less than both,
else the third. Where costs are no numbers, ``starts`` mean nothing and are still frames.
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op
from headway.kernels.time_warp.reference import time_warp as _reference


def _meta(costs: torch.Tensor) -> torch.Tensor:
    return torch.empty(costs.shape[0], dtype=torch.int32, device=costs.device)


time_warp = Op(
    "time_warp(Tensor costs) -> Tensor",
    reference=_reference,
    meta=_meta,
    triton="headway.kernels.time_warp.triton:time_warp",
)
