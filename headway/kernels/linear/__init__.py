"""y = x W^T + b with weights laid out for decoding on a CPU.

linear_packed(x, packed, bias, outputs, gelu=False) -> y
    x       [..., K] float32 or bfloat16
    packed  [P, K, 32] in x's dtype, P = ceil(N / 32), the weights of 32 outputs ("a panel") together. For float32
            packed[p, k, n] = W[32 p + n, k]; for bfloat16 pairs of inputs stay together: seen as [P, K / 2, 32, 2],
            packed[p, j, n, i] = W[32 p + n, 2 j + i], K even. Rows past N are zero.
    bias    [N] in x's dtype, or None
    gelu    y goes through y * Phi(y), Phi of the normal distribution (Hendrycks and Gimpel 2016), before it is stored
    y       [..., N], N = outputs, in x's dtype; sums in float32, the bias added before the one rounding (the rounded y is what
            gelu takes)

Every output is one chain of multiply-adds over rising k, or with AMX of sums of 32 products each, so on the native path a row
of y has the same bits whatever the other rows of x are. ``PackedLinear`` is what models hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headway.kernels.linear import reference
from headway.kernels.registry import Op


def _linear_packed_meta(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, gelu: bool = False
) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)


linear_packed = Op(
    "linear_packed(Tensor x, Tensor packed, Tensor? bias, int outputs, bool gelu=False) -> Tensor",
    reference=reference.linear_packed,
    meta=_linear_packed_meta,
    cpu="headway.kernels.cpu.ops:linear_packed",
)


class PackedLinear:
    """A linear layer in the fastest form its device has.

    On a CPU with native kernels the weight is copied into panels, which serve every number of rows (what ``F.linear`` takes
    beside them, by instruction set, is in docs/cpu.md). The object does not keep the original: memory is held once unless
    the caller keeps it too, as it must a tied embedding table. Everywhere else it keeps the weight and calls ``F.linear``.

    Args:
        weight: [N, K].
        bias: [N] or None.

    Attributes:
        out_features, in_features: N, K.
        packed: the panels, None when the original weight serves.
        gelu: see ``linear_packed``; only with ``packed``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed: torch.Tensor | None = None
        self.gelu = False
        self._weight: torch.Tensor | None = weight
        self._direct: Callable[..., torch.Tensor] | None = None
        if _can_pack(weight, bias):
            from headway.kernels.cpu import ops

            self.packed, self._weight, self._direct = ops.pack_weight(weight), None, ops.linear_packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        if self.packed is None or self._direct is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self.bias)
        if type(x) is torch.Tensor and x.is_cpu:  # past the dispatcher, which costs more than a small layer
            return self._direct(x, self.packed, self.bias, self.out_features, self.gelu)
        result: torch.Tensor = linear_packed(x, self.packed, self.bias, self.out_features, self.gelu)
        return result

    def weight(self) -> torch.Tensor:
        """[N, K]; a fresh copy when it is packed."""
        if self.packed is None:
            assert self._weight is not None
            return self._weight
        return reference.unpack(self.packed, self.out_features)


def _can_pack(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in (weight, bias) if tensor is not None)
    if not plain or weight.device.type != "cpu" or (bias is not None and bias.dtype is not weight.dtype):
        return False
    if weight.dtype is not torch.float32 and not (weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0):
        return False
    from headway.kernels.cpu import ops  # late: a machine that serves on a GPU never looks for a compiler

    return ops.available()
