"""Linear layers, several projections of the same input fused into one matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from headway.kernels.linear import PackedLinear
from headway.kernels.quant_linear import QuantizedLinear
from headway.models.interface import Target
from headway.parallel.group import Group

Taken = tuple[torch.Tensor, int]
"""int64 [rows], rows of a checkpoint's tensor, and how many it has."""


class Linear(nn.Module):
    """y = x W^T + b, where the rows of W belong to one or several named projections.

    Args:
        in_features: K.
        parts: projection name in the checkpoint -> its output rows, in the order they are stacked; N is their sum.
        bias: whether every part has one.
        tied: use this [N, K] weight, owned (and loaded) by another layer.
        padding: outputs behind those of the parts, which are 0.

    Attributes:
        weight: [N, K]; gone once it is packed.
        bias: [N] or None.
        rows: those of the weight that a checkpoint fills.
        taken: of projections that other ranks have a part of: int64 [rows], which rows are ours, and of how many.
        packed: the layer in the layout of CPU kernels, None where there are none or before ``finalize``; or its weights in GGUF
            blocks.
        group: of ranks over which what ``partial`` gives is to be added up; None: it is the whole.
    """

    group: Group | None = None

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tied: nn.Parameter | None = None,
        padding: int = 0,
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.rows = sum(self.parts.values())
        rows = self.rows + padding
        self.tied = tied is not None
        if tied is None:
            tied = nn.Parameter(torch.empty(rows, in_features, dtype=dtype, device=device), requires_grad=False)
        assert tied.shape == (rows, in_features)
        self.weight = tied
        if padding and not self.tied:
            self.weight[self.rows :].zero_()
        empty_bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        if padding and empty_bias is not None:
            empty_bias[self.rows :].zero_()
        self.bias = nn.Parameter(empty_bias, requires_grad=False) if empty_bias is not None else None
        self.packed: PackedLinear | QuantizedLinear | None = None
        self.taken: Mapping[str, Taken] = {}
        self.columns: tuple[int, int, int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        packed = self.packed
        return F.linear(x, self.weight, self.bias) if packed is None else packed(x)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``forward``, where that is a sum over ranks."""
        return Linear.forward(self, x)

    @property
    def dense(self) -> torch.Tensor | None:
        """The [N, K] weight that fused kernels may read, which then do what ``partial`` does; None: only that knows how it is
        stored."""
        return None if self.packed is not None else self.weight

    def destinations(self, prefix: str, order: torch.Tensor | None = None) -> dict[str, Target]:
        """Checkpoint tensor name -> the rows of ours it fills. A tied weight is the other layer's to load.

        Args:
            order: int64 [N], the rows of the stacked checkpoint tensors in the order in which we keep them; rows of one part
                stay within it.
        """
        found: dict[str, Target] = {}
        start = 0
        for name, rows in self.parts.items():
            end = start + rows
            mine = None if order is None else order[start:end] - start
            of, filled = None, end
            if name in self.taken:
                taken, of = self.taken[name]
                mine, filled = taken if mine is None else taken[mine], start + len(taken)
            if not self.tied:
                found[f"{prefix}{name}.weight"] = Target(self.weight[start:filled], mine, of, self.columns)
            if self.bias is not None:
                found[f"{prefix}{name}.bias"] = Target(self.bias[start:filled], mine, of)
            start = end
        return found

    def multiply_rows(self, factors: Mapping[int, tuple[int, float]]) -> None:
        """Called once, after loading and before ``finalize``: multiply outputs, biases included, by constants.

        Args:
            factors: first row -> (end, factor).
        """
        for first, (end, factor) in factors.items():
            self.weight[first:end] *= factor
            if self.bias is not None:
                self.bias[first:end] *= factor

    def finalize(self) -> None:
        """Called once, after loading: let the packed form replace the weight where this device has one."""
        if self.packed is not None:
            return
        packed = PackedLinear(self.weight, self.bias)
        if packed.packed is not None:
            self.packed = packed
            self.register_buffer("panels", packed.packed, persistent=False)  # so that sums over tensors see it
            del self.weight

    def keep_blocks(self, packed: QuantizedLinear) -> None:
        """Called once, while loading: multiply from the weights in their GGUF blocks instead of ``weight``."""
        self.packed = packed
        self.register_buffer("panels", packed.packed, persistent=False)
        del self.weight


class SummedLinear(Linear):
    """A product whose inputs are spread over ranks: each has the columns of its own, and the results are added up.

    The sum crosses ranks before anything else can be done with it, so kernels that read the weight give ``partial``.

    Args:
        columns: (first, end, of how many) inputs of the checkpoint's.
    """

    group: Group

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        group: Group,
        columns: tuple[int, int, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, parts, bias=bias, dtype=dtype, device=device)
        self.group = group
        self.columns = columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K of this rank] -> [..., N]."""
        return self.group.all_reduce(super().forward(x))

    def finalize(self) -> None:
        """See ``Linear``; one rank adds the bias."""
        if self.bias is not None and self.group.rank:
            self.bias.zero_()
        super().finalize()
