"""The recurrences themselves, each over the rows of a step and the states of their slots. ``own`` is what a layer's cache
has behind its window: the state, and the ring of its inputs where there are rings. ``*_inputs`` say how many numbers a token
has in that.

Shapes: T tokens of the step, S slots, D channels, H heads, G groups of heads, P, K, V, N sizes of heads and states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from headway.kernels.gated_delta import gated_delta
from headway.kernels.selective_scan import selective_scan
from headway.kernels.ssd_decode import ssd_decode
from headway.kernels.ssd_scan import ssd_scan
from headway.recurrent.base import convolve, replay_of, rows_of
from headway.state.batch import StepBatch

LONGEST_STEP = float("inf")
ONE_LAUNCH = 2**16
"""Channels of all rows together up to which ``ssd_decode`` takes the place of two launches. Each of its programs convolves b
and c anew: for more rows that takes longer than the launch it saves. On an H200 a layer of Mamba2-780M took 2.7, 5.4, 37.6 us
for 1, 8, 64 rows, in two launches 3.3, 6.8, 32.3; a program had 1,920 instructions then, and has 1,090 now."""


def scan_channels(
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    gate: torch.Tensor,
    batch: StepBatch,
    own: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Mamba-1: x, dt, gate [T, D], b, c [T, N]; a [D, N], d, dt_bias [D]; state [S, D, N] is written. Gives [T, D]."""
    rows = rows_of(batch)
    return cast(torch.Tensor, selective_scan(x, dt, dt_bias, a, b, c, d, gate, own[0], *rows, *replay_of(batch, own)))


def channel_inputs(channels: int, size: int) -> int:
    """Of ``scan_channels``, in the model's dtype: x, dt and b."""
    return 2 * channels + size


def scan_heads(
    x: torch.Tensor,
    dt: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    batch: StepBatch,
    own: Sequence[torch.Tensor],
    limits: tuple[float, float] = (0.0, LONGEST_STEP),
) -> torch.Tensor:
    """Mamba-2: x [T, H, P], dt [T, H], b, c [T, G, N]; a, d, dt_bias [H]; state [S, H, P, N] is written. Gives [T, H,
    P]."""
    rows = rows_of(batch)
    return cast(torch.Tensor, ssd_scan(x, dt, dt_bias, a, b, c, d, *limits, own[0], *rows, *replay_of(batch, own)))


def scan_convolved_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    batch: StepBatch,
    cache: Sequence[torch.Tensor],
    limits: tuple[float, float] = (0.0, LONGEST_STEP),
) -> torch.Tensor:
    """``scan_heads`` of x [T, C], which holds its x, b and c side by side, behind a convolution with weight [C, W] and bias
    [C]. ``cache``: its window, ring [S, W, C], and then as ``own``. One launch in steps of few rows, all of them short."""
    ring, *own = cache
    few = len(batch.row_slots) * own[0].shape[1] * own[0].shape[2] <= ONE_LAUNCH
    if batch.max_query_len <= batch.short and few:
        step = *rows_of(batch), *replay_of(batch, own)
        return cast(torch.Tensor, ssd_decode(x, weight, bias, ring, dt, dt_bias, a, d, *limits, own[0], *step))
    _, heads, width, size = own[0].shape
    shared = (x.shape[1] - heads * width) // 2
    inputs, b, c = convolve(x, weight, bias, batch, ring).split((heads * width, shared, shared), dim=1)
    inputs, b, c = inputs.unflatten(1, (heads, width)), b.unflatten(1, (-1, size)), c.unflatten(1, (-1, size))
    return scan_heads(inputs, dt, dt_bias, a, b, c, d, batch, own, limits)


def head_inputs(heads: int, width: int, groups: int, size: int, *, steps: bool = True) -> int:
    """Of ``scan_heads``, in the model's dtype: x, b and, with ``steps``, dt."""
    return heads * width + groups * size + (heads if steps else 0)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: torch.Tensor,
    batch: StepBatch,
    own: Sequence[torch.Tensor],
    *,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """The gated delta rule: q, k [T, HK, K], v [T, H, V], decay [T, H] or [T, H, K], beta [T, H]; state [S, H, K, V]
    is written. Gives [T, H, V]."""
    scale = q.shape[-1] ** -0.5
    return cast(
        torch.Tensor,
        gated_delta(
            q, k, v, decay, a_log, dt_bias, beta, beta_scale, scale, own[0], *rows_of(batch), *replay_of(batch, own)
        ),
    )


def delta_inputs(key_heads: int, heads: int, key_dim: int, value_dim: int, *, by_channel: bool = False) -> int:
    """Of ``delta_rule``, in float32: normalised keys, what was added to their values, and log decays."""
    return key_heads * key_dim + heads * value_dim + heads * (key_dim if by_channel else 1)
