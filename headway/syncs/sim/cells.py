"""Fused cells of recurrent networks: torch calls them on every device but the CPU, whose build does not have them.

Equations: torch.nn.LSTM (gates i, f, g, o) and torch.nn.GRU (gates r, z, n) in torch's documentation, and their derivatives.
Shapes: gates [N, 4H] or [N, 3H]; hidden and cell states [N, H].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

Tensor = torch.Tensor


def _sum(*parts: Tensor | None) -> Tensor:
    total = parts[0]
    assert total is not None
    for part in parts[1:]:
        total = total if part is None else total + part
    return total


def lstm(
    inputs: Tensor, hidden: Tensor, cx: Tensor, ib: Tensor | None = None, hb: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """New hidden state, new cell state, and the gates after their activations [N, 4H]."""
    i, f, g, o = _sum(inputs, hidden, ib, hb).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the gates, of the old cell state and of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = gates.chunk(4, 1)
    squashed = cy.tanh()
    dh = torch.zeros_like(cx) if grad_hy is None else grad_hy
    dc = dh * o * (1 - squashed**2) + (0 if grad_cy is None else grad_cy)
    parts = [dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g**2), dh * squashed * o * (1 - o)]
    grads = torch.cat(parts, 1)
    return grads, dc * f, grads.sum(0) if has_bias else None


def gru(
    inputs: Tensor, hidden: Tensor, hx: Tensor, ib: Tensor | None = None, hb: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """New hidden state, and what the gradient needs: r, z, n, the old state and the hidden part of n [N, 5H]."""
    ir, iz, inn = _sum(inputs, ib).chunk(3, 1)
    hr, hz, hn = _sum(hidden, hb).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inn + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def gru_backward(grad: Tensor, saved: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor, Any, Any]:
    """Gradients of the input gates, the hidden gates, the old state and both biases."""
    r, z, n, hx, hn = saved.chunk(5, 1)
    dz, dn = grad * (hx - n) * z * (1 - z), grad * (1 - z) * (1 - n**2)
    dr = dn * hn * r * (1 - r)
    inputs, hidden = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    bias = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad * z, *bias


CELLS: Final[dict[str, Callable[..., Any]]] = {
    "_thnn_fused_lstm_cell": lstm,
    "_thnn_fused_lstm_cell_backward_impl": lstm_backward,
    "_thnn_fused_gru_cell": gru,
    "_thnn_fused_gru_cell_backward": gru_backward,
}
