"""What a vision tower and its projector are, in numbers and names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.core.encode import BlockCost
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec

LAYER_NORM = NormSpec(1e-6, "layer", bias=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerNames:
    """What a tower's parts are called in the checkpoint, from its prefix on; "" for what there is not.

    Attributes:
        patch: the product of patches.
        position: the table of positions, with its ending.
        cls: the vector that goes before each tile's patches, with its ending.
        before, after: norms around the blocks.
        layers: the blocks, which ``layers``.0, ``layers``.1, ... are.
        norms: of a block: before attention, before the feed-forward part.
        attention: of a block: names of the products in (one tensor or three), and of the one out.
        ffn: prefix of a block's feed-forward products.
        scales: of a block: vectors that multiply both parts' results.
        behind: of a block: norms behind both parts; with them it is a ``vision.sandwich.SandwichBlock``.
        heads: of such a block: norms of each head's queries and keys.
        batched: the first vector's tensor is [1, 1, C], that of positions [1, n, C].
    """

    patch: str
    position: str = ""
    cls: str = ""
    before: str = ""
    after: str = ""
    layers: str
    norms: tuple[str, str]
    attention: tuple[tuple[str, ...], str]
    ffn: str = "mlp."
    scales: tuple[str, str] | None = None
    behind: tuple[str, str] | None = None
    heads: tuple[str, str] = ("", "")
    batched: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationSpec:
    """A rotation by rows and columns.

    Attributes:
        theta: base of the frequencies.
        alternating: rows take the frequencies with even numbers of a whole head, columns the others; else both have the same.
        halves: columns rotate the first half of a head, rows the second, as if each were a head; of sandwich blocks alone.
    """

    theta: float = 10000.0
    alternating: bool = False
    halves: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorSpec:
    """From a tower's patches to rows of the decoder: patches of a square become one, then come products.

    Attributes:
        merges: how patches of a square become one: side by side, or as their mean.
        norm: name, "" for none.
        norm_spec: of that norm.
        norm_behind: it stands behind the merging, and is as wide as what comes of it.
        norm_stored: the checkpoint has its weight; else that is ones.
        multiplier: of means, in float32.
        standard: names, of the tower, of what is then subtracted and what multiplies the difference; None: nothing.
        first: product ahead of the others, without activation; its columns are channel by channel in the checkpoint. "": none.
        products: names; between two of them stands the activation.
        widths: that the products give; the last is the decoder's.
        bias: of the products.
        transposed: the (only) product's tensor is [in, out] and has no ending.
        divisor: of the result.
    """

    merges: Literal["beside", "mean"] = "beside"
    norm: str = ""
    norm_spec: NormSpec = LAYER_NORM
    norm_behind: bool = False
    norm_stored: bool = True
    multiplier: float = 1.0
    standard: tuple[str, str] | None = None
    first: str = ""
    products: tuple[str, ...]
    widths: tuple[int, ...]
    activation: str = "gelu"
    bias: bool = True
    transposed: bool = False
    divisor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """A tower, every default resolved.

    Attributes:
        prefix: of the tower in the checkpoint.
        hidden_size, num_heads: C and H.
        patch: side of a patch, in pixels.
        channels: of a pixel.
        pixels_last: the patches' tensor is [C, P], each row (row, column, channel).
        frames: pictures that a patch's tensor has; a picture counts as so many equal ones.
        num_layers: blocks that run; a checkpoint may have more.
        stored_layers: blocks of the checkpoint.
        patch_bias, qkv_bias, out_bias: which products have one.
        positions: side of the table of positions; 0: there is none.
        interpolates: it is stretched over the picture, linearly; else read at places.
        by_axis: it is two, [2, positions, C], for columns and rows, whose entries are added up.
        rotation: of queries and keys; None: not at all.
        norm: of the blocks.
        mlp: of the blocks.
        clipped: what goes into each of the blocks' products, and what comes out, is clamped to ranges of the checkpoint's.
        group: patches of so many rows and columns become one row of the decoder.
        window: attention sees squares of so many merged patches on a side; 0: whole tiles.
        full_layers: with a window, blocks that see whole tiles all the same.
        last_norm: whether the norm behind the blocks is applied.
        projector: what follows.
        deepstack: (block, projector): outputs that are added behind the decoder's first layers.
    """

    prefix: str
    names: TowerNames
    hidden_size: int
    num_heads: int
    patch: int
    channels: int = 3
    pixels_last: bool = False
    frames: int = 1
    num_layers: int
    stored_layers: int
    patch_bias: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    positions: int = 0
    interpolates: bool = False
    by_axis: bool = False
    rotation: RotationSpec | None = None
    norm: NormSpec
    mlp: MLPSpec
    clipped: bool = False
    group: int = 1
    window: int = 0
    full_layers: tuple[int, ...] = ()
    last_norm: bool = True
    projector: ProjectorSpec
    projector_prefix: str
    deepstack: tuple[tuple[int, str, ProjectorSpec], ...] = ()

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Numbers of a patch as it is sent."""
        return self.channels * self.patch**2

    @property
    def block_costs(self) -> tuple[BlockCost, ...]:
        """What each block computes."""
        hidden, matrices = self.hidden_size, 3 if self.mlp.gated else 2
        unit = hidden * (4 * hidden + matrices * self.mlp.size)
        return tuple(
            BlockCost(unit, 2 * hidden, bool(self.window) and i not in self.full_layers) for i in range(self.num_layers)
        )

    @property
    def width(self) -> int:
        """Numbers of a row in the encoder cache."""
        return self.projector.widths[-1] * (1 + len(self.deepstack))
