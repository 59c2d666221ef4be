"""Low-rank adapters that lie beside an encoder's own weights, one for each of its tasks (Jina v3; Hu et al. 2021).

The adapters of all tasks are stacked: x A^T gives every task's low ranks of every token, those of other tasks are set to 0, and
one product with all B follows. So rows of different tasks share a step, a token without a task gets what it would get without
adapters, and nothing depends on who is in the batch. Beside the products they adapt they are small (5 tasks of rank 4: 20
columns).

Shapes: T tokens, N adapters, r rank, K inputs, M outputs, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from headway.models.interface import Target

ORIGINAL: Final = ".parametrizations.weight.original"
"""What torch's parametrisations call the weight that they change; here it is ``.weight``."""
PLACE: Final = "parametrizations.weight.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """A model's adapters.

    Attributes:
        names: of the tasks, in the order of the stacked tensors.
        rank: r.
        scale: of what they add, alpha / r.
    """

    names: tuple[str, ...]
    rank: int
    scale: float


def adapter_mask(spec: AdapterSpec, adapters: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, N * r]: the scale at the columns of each token's own adapter, 0 elsewhere.

    Args:
        adapters: int32 [T], 1 for the first adapter, 0 for none.
    """
    owner = torch.arange(len(spec.names) * spec.rank, device=adapters.device) // spec.rank + 1
    return (adapters[:, None] == owner).to(dtype) * spec.scale


class LinearAdapters(nn.Module):
    """What a linear layer's adapters add.

    Args:
        inputs, outputs: K and M.
    """

    def __init__(
        self, spec: AdapterSpec, inputs: int, outputs: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        number = len(spec.names)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.down, self.up = made(number, spec.rank, inputs), made(number, outputs, spec.rank)

    def forward(self, y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """y [T, M], changed in place, + the low-rank products of x [T, K]; ``mask`` as of ``adapter_mask``."""
        return y.addmm_(F.linear(x, self.down).mul_(mask), self.up)

    def destinations(self, name: str) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes; ``name``: of the layer."""
        return {f"{name}.{PLACE}.lora_A": Target(self.down), f"{name}.{PLACE}.lora_B": Target(self.up)}

    def finalize(self) -> None:
        """A [N r, K] and B [N r, M]."""
        self.down = nn.Parameter(self.down.flatten(0, 1), requires_grad=False)
        self.up = nn.Parameter(self.up.transpose(1, 2).flatten(0, 1).contiguous(), requires_grad=False)


class TableAdapters(nn.Module):
    """The same of a table of embeddings with V rows: A has a row for each, B gives M numbers."""

    def __init__(self, spec: AdapterSpec, rows: int, outputs: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        number, self._rows = len(spec.names), rows

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.down, self.up = made(number, rows, spec.rank), made(number, spec.rank, outputs)

    def forward(self, y: torch.Tensor, index: torch.Tensor, adapters: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """y [T, M], changed in place, + what the rows ``index``, int32 [T], give; ``adapters`` as of ``adapter_mask``."""
        row = (adapters - 1).clamp(min=0) * self._rows + index
        low = self.down.index_select(0, row)  # [T, r], of the token's own adapter
        return y.addmm_(low.repeat(1, mask.shape[1] // low.shape[1]).mul_(mask), self.up)

    def destinations(self, name: str) -> dict[str, Target]:
        """As of ``LinearAdapters``."""
        return {f"{name}.{PLACE}.lora_A": Target(self.down), f"{name}.{PLACE}.lora_B": Target(self.up)}

    def finalize(self) -> None:
        """A [N V, r] and B [N r, M]."""
        self.down = nn.Parameter(self.down.flatten(0, 1), requires_grad=False)
        self.up = nn.Parameter(self.up.flatten(0, 1), requires_grad=False)
