"""Operations that torch has for CUDA and not for the CPU: fused recurrent cells, synchronised batch norms, widening products.

Equations: torch.nn.LSTM (gates i, f, g, o), torch.nn.GRU (gates r, z, n) and torch.nn.BatchNorm2d in torch's documentation, and
their derivatives. Shapes: gates [N, 4H] or [N, 3H]; hidden and cell states [N, H]; normalised batches [N, C, ...].
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


def _channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions that a batch norm sums over, and the shape of a row of channels beside ``x`` [N, C, ...]."""
    return [dim for dim in range(x.dim()) if dim != 1], [1, -1] + [1] * (x.dim() - 2)


def norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of each channel [C], in float32."""
    var, mean = torch.var_mean(x.float(), _channels(x)[0], correction=0)
    return mean, torch.rsqrt(var + eps)


def norm_gathered(
    x: Tensor,  # noqa: ARG001
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Of all ranks [W, C] with counts [W], those of the whole batch [C]; moves the running ones."""
    counts, total = counts.view(-1, 1).to(mean.dtype), counts.sum()
    whole = (mean * counts).sum(0) / total
    var = ((invstd.pow(-2) - eps + (mean - whole) ** 2) * counts).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(whole.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((var * total / (total - 1)).to(running_var.dtype), momentum)
    return whole, torch.rsqrt(var + eps)


def norm_applied(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,  # noqa: ARG001
) -> Tensor:
    """The normalised batch."""
    _, row = _channels(x)
    made = (x.float() - mean.view(row)) * invstd.view(row)
    made = made if weight is None else made * weight.view(row)
    return (made if bias is None else made + bias.view(row)).to(x.dtype)


def norm_backward_sums(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sums of the gradient, of the gradient times the centred input, and the gradients of weight and bias, all [C]."""
    dims, row = _channels(x)
    dy = grad.float()
    sums, products = dy.sum(dims), (dy * (x.float() - mean.view(row))).sum(dims)
    kind = mean.dtype if weight is None else weight.dtype
    return sums, products, (products * invstd).to(kind) if wanted[1] else None, sums.to(kind) if wanted[2] else None


def norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    products: Tensor,
    count: Tensor,
) -> Tensor:
    """Gradient of the input."""
    _, row = _channels(x)
    total = count.sum()
    centred = (x.float() - mean.view(row)) * (invstd**2 * products / total).view(row)
    scale = invstd if weight is None else invstd * weight
    return ((grad.float() - (sums / total).view(row) - centred) * scale.view(row)).to(x.dtype)


def _widened(operation: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """A product of half-precision tensors with a result of another dtype, the first argument after the tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = args[tensors] if len(args) > tensors else kwargs.pop("out_dtype")
        return operation(*(part.to(dtype) for part in args[:tensors]), **kwargs)

    return run


WIDER: Final = (
    "histc",
    "avg_pool3d",
    "avg_pool3d_backward",
    "_upsample_bilinear2d_aa",
    "_upsample_bilinear2d_aa_backward",
    "multi_margin_loss",
    "multi_margin_loss_backward",
    "multilabel_margin_loss_forward",
    "multilabel_margin_loss_backward",
    "rrelu_with_noise",
    "round",
    "polygamma",
)
"""Operations that take more dtypes on CUDA than on the CPU, by torch's own operator database (OpInfo.dtypesIfCUDA)."""
_WIDE: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def widened(operation: Callable[..., Any]) -> Callable[..., Any]:
    """``operation``, of ``WIDER``, computed in a dtype that the CPU has; the result has the dtype it has on CUDA."""

    def run(*args: Any, **kwargs: Any) -> Any:
        first = next(part for part in args if isinstance(part, Tensor))  # of polygamma the second argument
        whole = operation.__name__.startswith("histc") and not first.is_floating_point()
        wide = torch.float64 if whole else _WIDE.get(first.dtype)
        if wide is None:
            return operation(*args, **kwargs)
        back = {wide: first.dtype}

        def narrow(value: Any) -> Any:
            return value.to(back.get(value.dtype, value.dtype)) if isinstance(value, Tensor) else value

        given = [part.to(wide) if isinstance(part, Tensor) and part.dtype == first.dtype else part for part in args]
        result = operation(*given, **kwargs)
        return tuple(map(narrow, result)) if isinstance(result, tuple) else narrow(result)

    return run


CELLS: Final[dict[str, Callable[..., Any]]] = {
    "_thnn_fused_lstm_cell": lstm,
    "_thnn_fused_lstm_cell_backward_impl": lstm_backward,
    "_thnn_fused_gru_cell": gru,
    "_thnn_fused_gru_cell_backward": gru_backward,
    "batch_norm_stats": norm_stats,
    "batch_norm_gather_stats_with_counts": norm_gathered,
    "batch_norm_elemt": norm_applied,
    "batch_norm_backward_reduce": norm_backward_sums,
    "batch_norm_backward_elemt": norm_backward,
    "aten.mm.dtype": _widened(torch.mm, 2),
    "aten.bmm.dtype": _widened(torch.bmm, 2),
    "aten.addmm.dtype": _widened(torch.addmm, 3),
    "aten.baddbmm.dtype": _widened(torch.baddbmm, 3),
}
"""By operation, or by overload."""
