"""A tower's pass over one picture, block by block: what lies on the device between two blocks.

One pass is under way at a time. ``VisionTower.open`` writes what a pass needs into ``PassBuffers``, each block works on them in
place, ``close`` reads them. They have addresses of their own, and a ``PassShape`` says how much of them a pass uses, padded
where its blocks run as graphs. So blocks of one pass may run in several steps, whatever runs between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from headway.core.ints import cdiv
from headway.models.vision.spec import VisionSpec
from headway.multimodal.layout import Layout


class PassShape(NamedTuple):
    """Sizes of a pass: exact, or those of a captured one that holds it.

    Attributes:
        tiles: segments of patches that see each other.
        tile: patches of one, with the vector that goes before them; in a key: at most.
        windows: 0: there are none; in a key: at most.
        longest_window: most patches of a window.
        is_sound: it is of another tower: a recording is one tile, of so many rows.
    """

    tiles: int
    tile: int
    windows: int = 0
    longest_window: int = 0
    is_sound: bool = False

    @property
    def units(self) -> int:
        """Rows of hidden states."""
        return self.tiles * self.tile

    def holds(self, other: PassShape) -> bool:
        """Whether a pass of exactly ``other`` fits. Where there are several tiles, all of them are of one size."""
        fits = self.tile == other.tile or (self.tile > other.tile and self.tiles == 1 == other.tiles)
        fits = fits and self.is_sound == other.is_sound
        return fits and self.tiles >= other.tiles and self.windows >= other.windows


@dataclass(slots=True)
class PassBuffers:
    """What a pass has on the device; N units, at most.

    Attributes:
        x: [N, C] in the tower's dtype, hidden states.
        starts: int32 [tiles + 1], first unit of each tile, and their number; tiles of padding are empty.
        table: f32 [N, D], each unit's rotation; None: they are not rotated.
        numbers: int32 [N], 0, 1, ...
        windows: int32 [W + 1], first unit of each window, as ``starts``; None: there are none.
        inverse: int32 [M], where each merged patch went, with windows.
        deep: [K, M, width], outputs of blocks for the decoder's first layers; None: there are none.
    """

    x: torch.Tensor
    starts: torch.Tensor
    table: torch.Tensor | None
    numbers: torch.Tensor
    windows: torch.Tensor | None
    inverse: torch.Tensor | None
    deep: torch.Tensor | None

    @classmethod
    def none(cls, device: torch.device) -> PassBuffers:
        """Of a model without a tower for pictures."""
        ints = torch.zeros(0, dtype=torch.int32, device=device)
        return cls(torch.zeros(0, device=device), ints, None, ints, None, None, None)

    @classmethod
    def make(cls, spec: VisionSpec, most: PassShape, *, dtype: torch.dtype, device: torch.device) -> PassBuffers:
        """Buffers of passes up to ``most``."""
        units, merged = most.units, cdiv(most.units, spec.group**2)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        width = spec.projector.widths[-1]
        return cls(
            x=torch.zeros(units, spec.hidden_size, dtype=dtype, device=device),
            starts=ints(most.tiles + 1),
            table=None
            if spec.rotation is None
            else torch.zeros(units, spec.head_dim, dtype=torch.float32, device=device),
            numbers=torch.arange(units, dtype=torch.int32, device=device),
            windows=ints(most.windows + 1) if spec.window else None,
            inverse=ints(merged) if spec.window else None,
            deep=torch.zeros(len(spec.deepstack), merged, width, dtype=dtype, device=device)
            if spec.deepstack
            else None,
        )


def exact_shape(layout: Layout, *, has_first: bool) -> PassShape:
    """The sizes of a picture's pass; ``has_first``: a vector goes before each tile's patches."""
    grid = layout.grid
    tile = grid.height * grid.width + has_first
    return PassShape(grid.tiles, tile, layout.num_windows, layout.longest_window)


def largest_shape(layout: Layout, spec: VisionSpec) -> PassShape:
    """The sizes that hold every pass; ``layout``: of the picture with most patches. Narrow pictures have more windows."""
    exact = exact_shape(layout, has_first=bool(spec.names.cls))
    return exact if not spec.window else padded_shape(exact.tile, spec)


def padded_shape(tile: int, spec: VisionSpec) -> PassShape:
    """The sizes that hold all passes of one tile of up to ``tile`` patches."""
    if not spec.window:
        return PassShape(1, tile)
    merged, side = tile // spec.group**2, spec.window
    # A picture of one row of merged patches is cut most often: into pieces of a window's side.
    return PassShape(1, tile, cdiv(merged, side) + 1, (side * spec.group) ** 2)


MOST_GRAPHS = 400
"""Blocks that are captured at most, whatever there are of sizes: about half a second of a start."""
MOST_UNITS = 8192
"""Of a size that is captured, but for the smallest: a block of more takes a card longer than launching its kernels."""
LEAST_TILE = 64
"""Patches of the smallest size."""


def pass_shapes(
    most: PassShape, spec: VisionSpec, *, one_size: bool, most_units: int = MOST_UNITS, most_graphs: int = MOST_GRAPHS
) -> list[PassShape]:
    """Sizes whose blocks are captured, rising: for pictures of one size by tiles, else by patches, so that padding is a third
    at most. The largest are left out first: there launching a block's kernels takes less time than they do."""
    found: list[PassShape]
    if one_size:
        counts = {1, *(n for power in range(1, 13) for n in (2**power, 3 * 2**power // 2)), most.tiles}
        found = [most._replace(tiles=n) for n in sorted(counts) if n <= most.tiles]
    else:
        square = spec.group**2
        sizes = {n for power in range(7, 31) for n in (2**power, 3 * 2**power // 4)} | {most.tile}
        rounded = sorted({n // square * square for n in sizes if LEAST_TILE <= n <= most.tile} | {most.tile})
        found = [padded_shape(n, spec) for n in rounded]
    found = [each for i, each in enumerate(found) if each.units <= most_units or not i]
    return found[: max(most_graphs // max(spec.num_layers, 1), 1)]
