"""y = x W^T + b with weights laid out for decoding on a CPU.

linear_packed(x, packed, bias, outputs, gelu=False) -> y
    x       [..., K] float32 or bfloat16
    packed  [P, K, 32] in x's dtype, or bfloat16 beside x in float32; P = ceil(N / 32), the weights of 32 outputs ("a panel")
            together. For float32 packed[p, k, n] = W[32 p + n, k]; for bfloat16 pairs of inputs stay together: seen as
            [P, K / 2, 32, 2], packed[p, j, n, i] = W[32 p + n, 2 j + i], K even. Rows past N are zero.
    bias    [N] in x's dtype, or None
    gelu    y goes through y * Phi(y), Phi of the normal distribution (Hendrycks and Gimpel 2016), before it is stored
    y       [..., N], N = outputs, in x's dtype; sums in float32, the bias added before the one rounding (the rounded y is what
            gelu takes)

Every output is one chain of multiply-adds over rising k, or with AMX of sums of 32 products each, so on the native path a row
of y has the same bits whatever the other rows of x are; beside x in float32, panels of either dtype give the same bits.
``PackedLinear`` is what models hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headway.kernels.linear import reference
from headway.kernels.registry import Op

ROWS_AT_ONCE = 1024
"""Of a weight that are compared with their bfloat16 values, so that no second weight is made."""


def _linear_packed_meta(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, *_: object
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

    A float32 weight that bfloat16 holds exactly, as most checkpoints do, is kept in bfloat16: one row waits for half the bytes.

    Args:
        weight: [N, K].
        bias: [N] or None.

    Attributes:
        out_features, in_features: N, K.
        dtype: of the weight, and of what is multiplied with it.
        packed: the panels, None when the original weight serves.
        gelu: see ``linear_packed``; only with ``packed``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.dtype = weight.dtype
        self.packed: torch.Tensor | None = None
        self.gelu = False
        self._weight: torch.Tensor | None = weight
        self._direct: Callable[..., torch.Tensor] | None = None
        if _can_pack(weight, bias):
            from headway.kernels.cpu import ops

            narrow = weight.bfloat16() if fits_bfloat16(weight) else weight
            self.packed, self._weight, self._direct = ops.pack_weight(narrow), None, ops.linear_packed

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
        return reference.unpack(self.packed, self.out_features).to(self.dtype)


def fits_bfloat16(weight: torch.Tensor) -> bool:
    """Whether a float32 weight [N, K] is the same in bfloat16 panels, which need an even K; the first rows mostly tell."""
    even = weight.dtype is torch.float32 and weight.shape[1] % 2 == 0
    return even and all(torch.equal(rows.bfloat16().float(), rows) for rows in weight.detach().split(ROWS_AT_ONCE))


def _can_pack(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in (weight, bias) if tensor is not None)
    if not plain or weight.device.type != "cpu" or (bias is not None and bias.dtype is not weight.dtype):
        return False
    if weight.dtype is not torch.float32 and not (weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0):
        return False
    from headway.kernels.cpu import ops  # late: a machine that serves on a GPU never looks for a compiler

    return ops.available()
