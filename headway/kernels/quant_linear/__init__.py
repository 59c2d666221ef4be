"""y = x W^T + b, and rows of W, with weights in the blocks of GGUF files.

quant_linear(x, packed, bias, types, outputs, exact=False) -> y
    x        [..., K] float32 or bfloat16, K whole blocks of every type
    packed   uint8 [bytes]: the parts of W one behind the other, each from a multiple of 64 bytes on; the layout of a part
             is drawn in cpu/csrc/blocks.h
    bias     [N] in x's dtype, or None
    types    ggml's number of each part's type, one of ``formats.BLOCK_TYPES``
    outputs  each part's rows of W; N is their sum
    exact    x, in float32, is multiplied as it is
    y        [..., N] in x's dtype
    Meaning: x, unless ``exact``, is rounded to 8 bits by blocks of 32 inputs, q = round(127 x / m) with m the largest magnitude
    of the block, as llama.cpp rounds it. Blocks whose m is above the row's root mean square of m, those with outliers, keep a
    second digit, round(254 (127 x / m - q)): they are few, and what is rounded off in them is most of the error. y is the
    product with the weights as the file means them, sums in float32.

quant_rows(ids, packed, kind, outputs, inputs, dtype) -> rows
    ids     int32 [T]; an id outside of [0, outputs) gives zeros
    packed  one part as above
    rows    [T, inputs] in dtype (float32 or bfloat16), the weights as the file means them

Products of integers are exact and every output is one chain over rising blocks, so on the native path a row of y has the same
bits whatever the other rows of x are. With ``exact`` they are those of ``linear_packed`` with the dequantised weights in
float32: the same multiply-adds in the same order, from fewer bytes. ``QuantizedLinear`` is what models hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.kernels.quant_linear import reference
from headway.kernels.quant_linear.formats import aligned
from headway.kernels.registry import Op


def _linear_meta(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    types: Sequence[int],
    outputs: Sequence[int],
    *_: object,
) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], sum(outputs)), dtype=x.dtype, device=x.device)


def _rows_meta(
    ids: torch.Tensor, packed: torch.Tensor, kind: int, outputs: int, inputs: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty((ids.numel(), inputs), dtype=dtype, device=ids.device)


quant_linear = Op(
    "quant_linear(Tensor x, Tensor packed, Tensor? bias, int[] types, int[] outputs, bool exact=False) -> Tensor",
    reference=reference.quant_linear,
    meta=_linear_meta,
    cpu="headway.kernels.cpu.block_ops:quant_linear",
)
quant_rows = Op(
    "quant_rows(Tensor ids, Tensor packed, int kind, int outputs, int inputs, ScalarType dtype) -> Tensor",
    reference=reference.quant_rows,
    meta=_rows_meta,
    cpu="headway.kernels.cpu.block_ops:quant_rows",
)


class QuantizedLinear:
    """A linear layer, or a table of rows, whose weights stay in GGUF blocks. For CPUs with native kernels.

    Args:
        parts: (ggml type, uint8 [rows, bytes of a row] as the file has them) of each part, in the order of their outputs.
        in_features: K.
        bias: [N] or None.
        exact: see the op; x and bias are float32 then.

    Attributes:
        packed: uint8, the op's layout.
        types, outputs: of the parts; neighbours of one type are one part.
        out_features, in_features: N, K.
        plan: what the kernels need to know of them.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, torch.Tensor]],
        in_features: int,
        bias: torch.Tensor | None = None,
        *,
        exact: bool = False,
    ) -> None:
        from headway.kernels.cpu import block_ops

        joined: list[tuple[int, list[torch.Tensor]]] = []
        for kind, rows in parts:
            if joined and joined[-1][0] == kind:
                joined[-1][1].append(rows)
            else:
                joined.append((kind, [rows]))
        self.types = tuple(kind for kind, _ in joined)
        self.outputs = tuple(sum(len(rows) for rows in group) for _, group in joined)
        self.in_features, self.out_features, self.bias = in_features, sum(self.outputs), bias
        sizes = [block_ops.packed_bytes(kind, rows, in_features) for kind, rows in zip(self.types, self.outputs)]
        self.packed = torch.empty(sum(map(aligned, sizes)), dtype=torch.uint8)
        start = 0
        for (kind, group), size in zip(joined, sizes):
            rows = group[0] if len(group) == 1 else torch.cat(group)
            block_ops.pack_rows(kind, rows, in_features, self.packed[start : start + size])
            start += aligned(size)
        self.plan, self._multiply = block_ops.plan(self.types, self.outputs, in_features), block_ops.multiply
        self.exact = exact
        known = (torch.float32,) if exact else (torch.float32, torch.bfloat16)
        self._dtypes = known if bias is None else tuple(dtype for dtype in known if dtype is bias.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        # Past the dispatcher, which costs more than a small layer.
        if type(x) is torch.Tensor and x.is_cpu and x.dtype in self._dtypes and x.shape[-1] == self.in_features:
            return self._multiply(x.contiguous(), self.packed, self.bias, self.plan, self.exact)
        result: torch.Tensor = quant_linear(x, self.packed, self.bias, self.types, self.outputs, self.exact)
        return result

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the native kernels multiply x of ``dtype``."""
        return dtype in self._dtypes

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows ids [T] of a weight of one type: [T, K] in ``dtype``."""
        assert len(self.types) == 1
        result: torch.Tensor = quant_rows(ids, self.packed, self.types[0], self.out_features, self.in_features, dtype)
        return result

    def weight(self) -> torch.Tensor:
        """float32 [N, K], dequantised."""
        return reference.dequantized(self.packed, self.types, self.outputs, self.in_features)
