"""What ``ssd_decode`` means: the two operations it is made of, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headway.kernels.causal_conv.reference import causal_conv
from headway.kernels.ssd_scan.reference import ssd_scan

Form = Callable[..., torch.Tensor]


def ssd_decode(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ring: torch.Tensor, dt: torch.Tensor,
    dt_bias: torch.Tensor, a: torch.Tensor, d: torch.Tensor, dt_min: float, dt_max: float, state: torch.Tensor,
    query_start: torch.Tensor, row_slots: torch.Tensor, seq_lens: torch.Tensor, packed: torch.Tensor,
    max_chunks: int, max_query_len: int, short: int, inputs: torch.Tensor | None = None,
    stored_at: torch.Tensor | None = None, store_at: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    rows = (query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short)
    of_scan, replay = (dt, dt_bias, a, d, dt_min, dt_max, state), (inputs, stored_at, store_at)
    return composed(causal_conv, ssd_scan, x, (weight, bias, ring), of_scan, rows, replay)


def composed(
    convolve: Form, scan: Form, x: torch.Tensor, window: tuple[object, ...], of_scan: tuple[object, ...],
    rows: tuple[object, ...], replay: tuple[object, ...] = (),
) -> torch.Tensor:  # fmt: skip
    """``convolve`` and ``scan`` are forms of the two; ``rows``: the arguments that both have, ``replay``: those of a ring."""
    dt, dt_bias, a, d, dt_min, dt_max, state = of_scan
    assert isinstance(state, torch.Tensor)
    _, heads, width, size = state.shape
    inner = heads * width
    shared = (x.shape[1] - inner) // 2
    inputs, b, c = convolve(x, *window, *rows, True).split((inner, shared, shared), dim=1)
    shape = (shared // size, size)
    b, c = b.unflatten(1, shape), c.unflatten(1, shape)
    return scan(inputs.unflatten(1, (heads, width)), dt, dt_bias, a, b, c, d, dt_min, dt_max, state, *rows, *replay)
