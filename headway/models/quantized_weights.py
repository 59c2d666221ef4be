"""Weights that stay in the blocks of their GGUF file: which layer keeps which, and what becomes of the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import nn

from headway.kernels.quant_linear import QuantizedLinear
from headway.models.interface import Model, Target
from headway.models.layers.embedding import Embedding
from headway.models.layers.linear import Linear
from headway.weights.gguf import TENSOR_TYPES, BlockTensor


class BlockUse(Enum):
    """What becomes of weights in GGUF blocks.

    DEQUANTIZED: they are loaded as any others. ROUNDED: products are of blocks and of activations rounded to 8 bits, or to 16
    beside outliers. EXACT: of blocks and of activations in float32, which gives the bits of weights dequantised to that.
    """

    DEQUANTIZED = "dequantized"
    ROUNDED = "rounded"
    EXACT = "exact"


@dataclass(slots=True)
class Parts:
    """Blocks that came for one layer's [N, K] weight: first row -> tensor."""

    layer: Linear | Embedding
    found: dict[int, BlockTensor] = field(default_factory=dict)

    def whole(self) -> list[BlockTensor] | None:
        """All parts in order; None unless they are the whole weight."""
        parts, row = [], 0
        while row in self.found:
            parts.append(self.found[row])
            row += parts[-1].shape[0]
        return parts if row == self.layer.rows else None


class BlockKeeper:
    """Collects blocks while a model is filled; ``finish`` hands them to the layers, before the model is finalised.

    Layers are found by the memory of the destinations that they gave out, which stays untouched when blocks take its place:
    pages of it are never written, so the machine never provides them.

    Args:
        exact: products are ``BlockUse.EXACT``, else ROUNDED.
    """

    def __init__(self, model: Model, *, exact: bool) -> None:
        assert isinstance(model, nn.Module)
        self.exact = exact
        self._tied = {
            id(module.weight): module for module in model.modules() if isinstance(module, Linear) and module.tied
        }
        layers = [module for module in model.modules() if isinstance(module, (Linear, Embedding))]
        own = [layer for layer in layers if not (isinstance(layer, Linear) and layer.tied)]
        self._parts = {layer.weight.untyped_storage().data_ptr(): Parts(layer) for layer in own}

    def take(self, target: Target, blocks: BlockTensor) -> bool:
        """Keep ``blocks`` for the rows of a layer's weight that ``target`` is; False: no such layer."""
        destination = target.tensor
        parts = self._parts.get(destination.untyped_storage().data_ptr())
        if target.columns is not None:  # a block has neighbours of one row, which other ranks want
            return False
        if parts is None or destination.shape[1] != parts.layer.weight.shape[1]:
            return False
        if target.order is not None:
            blocks = replace(blocks, rows=blocks.rows.index_select(0, target.order))
        parts.found[destination.storage_offset() // destination.shape[1]] = blocks
        return True

    def finish(self) -> tuple[Counter[str], int]:
        """Give every layer its blocks. Returns how many matrices of each type were kept, and the bytes they take."""
        kept: Counter[str] = Counter()
        num_bytes = 0
        for parts in self._parts.values():
            layer, whole = parts.layer, parts.whole()
            if whole is None or (isinstance(layer, Embedding) and len(whole) > 1):
                self._dequantize(parts)
                continue
            weight = layer.weight
            bias = layer.bias if isinstance(layer, Linear) else None
            rows = [(part.type_id, part.rows) for part in whole]
            packed = QuantizedLinear(rows, weight.shape[1], bias, exact=self.exact)
            num_bytes += packed.packed.nbytes
            kept.update(TENSOR_TYPES[part.type_id].name for part in whole)
            layer.keep_blocks(packed)
            if id(weight) in self._tied:
                self._tied[id(weight)].keep_blocks(packed)
            parts.found.clear()
        return kept, num_bytes

    @staticmethod
    def _dequantize(parts: Parts) -> None:
        """A layer some of whose parts are not in blocks holds plain weights."""
        for row, blocks in parts.found.items():
            parts.layer.weight[row : row + blocks.shape[0]].copy_(blocks.dequantized())
        parts.found.clear()


def told(kept: Counter[str], num_bytes: int, in_file: Counter[str], *, exact: bool) -> str:
    """What the log says about the blocks of a file."""

    def listed(counts: Counter[str]) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"

    how = ", multiplied with float32" if exact else ""
    message = f"matrices kept in GGUF blocks{how}: {listed(kept)} ({num_bytes / 2**20:.1f} MiB)"
    rest = in_file - kept
    return f"{message}; dequantised: {listed(rest)}" if rest else message
