"""The integers that a tower needs of a picture, worked out on the host: places of patches, segments of attention, windows.

Patches come square by square: those that become one row of the decoder (``group`` x ``group``) lie behind each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.core.media import Grid, VisionInfo
from headway.core.plan import Int32s


class Layout(NamedTuple):
    """What of a picture a tower must be told.

    Attributes:
        grid: its tiles.
        num_windows: W; 0: its attention has none.
        longest_window: most patches of a window.
        frames: pictures that a patch has, of a video's part; 1: a picture.
        num_ints: length of the integers, which are, one behind the other: row [n] and column [n] of each patch of a tile, its
            entry in the table of positions [n], and with windows: merged patches window by window [M], the inverse of that [M],
            starts of the windows [W + 1]. Then the starts of the tiles [tiles + 1].
    """

    grid: Grid
    num_windows: int
    longest_window: int
    num_ints: int
    frames: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """As they travel with the picture."""
        return (*self.grid, self.num_windows, self.longest_window, self.num_ints, self.frames)

    @classmethod
    def of(cls, sizes: tuple[int, ...]) -> Layout:
        """The inverse of ``sizes``."""
        tiles, height, width, *others = sizes
        return cls(Grid(tiles, height, width), *others)


def in_squares(values: npt.NDArray[Any], side: int) -> npt.NDArray[Any]:
    """[h, w, ...] -> [h * w, ...], squares of ``side`` x ``side`` one behind the other."""
    height, width, *rest = values.shape
    squares = values.reshape(height // side, side, width // side, side, *rest).swapaxes(1, 2)
    return squares.reshape(height * width, *rest)


def lay_out(info: VisionInfo, grid: Grid) -> tuple[Layout, Int32s]:
    """The integers of a picture of ``grid``, int32 [num_ints]."""
    rows, columns = np.indices((grid.height, grid.width), dtype=np.int32)
    row, column = in_squares(rows, info.group), in_squares(columns, info.group)
    place, side = np.zeros_like(row), info.positions
    if side:
        place = _nearest(grid.height, side)[row] * np.int32(side) + _nearest(grid.width, side)[column]
    starts = np.arange(grid.tiles + 1, dtype=np.int32) * np.int32(len(row))
    if not info.window:
        ints = np.concatenate([row, column, place, starts], dtype=np.int32)
        return Layout(grid, 0, 0, len(ints)), ints
    order, window_starts = windows(grid.height // info.group, grid.width // info.group, info.window)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order), dtype=np.int32)
    window_starts = window_starts * np.int32(info.group**2)
    ints = np.concatenate([row, column, place, order, inverse, window_starts, starts], dtype=np.int32)
    return Layout(grid, len(window_starts) - 1, int(np.diff(window_starts).max()), len(ints)), ints


def _nearest(count: int, side: int) -> Int32s:
    """int32 [count]: the row of a table of ``side`` rows that each of ``count`` rows takes; in float32, as in training."""
    if count == side:
        return np.arange(side, dtype=np.int32)
    places = np.arange(count, dtype=np.float32) * np.float32(1.0 / count)
    bounds = np.arange(1, side, dtype=np.float32) * np.float32(1.0 / side)
    return np.searchsorted(bounds, np.minimum(places, np.float32(1.0 - 1e-6)), side="right").astype(np.int32)


def windows(height: int, width: int, size: int) -> tuple[Int32s, Int32s]:
    """Squares of ``size``, cut off at the edges, of a picture of ``height`` x ``width``.

    Returns:
        int32 [height * width], its places window by window; int32 [W + 1], first of each window.
    """
    rows, columns = np.indices((height, width), dtype=np.int32)
    number = (rows // size) * np.int32(-(-width // size)) + columns // size
    order = np.argsort(number.reshape(-1), kind="stable").astype(np.int32)
    counts = np.bincount(number.reshape(-1))
    return order, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
