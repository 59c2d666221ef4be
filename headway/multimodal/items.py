"""From tiles of pixels to what a request carries: an encoder item for each picture, and the runs of its placeholders."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from headway.core.encode import EncoderItem, MediaRun
from headway.core.errors import InvalidRequestError
from headway.core.media import MAX_RUNS, Grid, VisionInfo
from headway.core.plan import Floats
from headway.multimodal.images import FIELD
from headway.multimodal.layout import Layout, in_squares, lay_out
from headway.multimodal.wire import join

KEY_BYTES = 20


def make_item(info: VisionInfo, tiles: npt.NDArray[np.uint8], scale: Floats, shift: Floats) -> EncoderItem:
    """The item of one picture.

    Args:
        tiles: [tiles, height, width, channels], sides multiples of a merged patch.
        scale, shift: f32 [channels]: a pixel becomes pixel * scale + shift.
    """
    count, height, width, channels = tiles.shape
    size = info.patch
    grid = Grid(count, height // size, width // size)
    cut = tiles.reshape(count, grid.height, size, grid.width, size, channels).transpose(0, 1, 3, 5, 2, 4)
    patches = np.concatenate([in_squares(np.ascontiguousarray(tile), info.group) for tile in cut])
    layout, ints = lay_out(info, grid)
    # The integers follow from the sizes. Sizes are part of the name: equal bytes may be of another shape.
    name = blake2b(repr((layout.sizes, tiles.shape)).encode(), digest_size=KEY_BYTES)
    for part in (scale, shift, tiles):
        name.update(np.ascontiguousarray(part).tobytes())
    return EncoderItem(
        kind="image",
        key=name.digest(),
        rows=grid.patches // info.group**2,
        sizes=layout.sizes,
        data=join(ints, scale, shift, patches.reshape(len(patches), -1)),
        first=0,
        units=grid.patches,
        reach=(grid.height * grid.width, layout.longest_window),
    )


def find_runs(info: VisionInfo, token_ids: list[int], items: list[EncoderItem]) -> list[MediaRun]:
    """Which tokens of a prompt each picture's features stand in for: those that are the placeholder, in order.

    Raises:
        InvalidRequestError: there are more or fewer placeholders than features.
    """
    ids = np.asarray(token_ids, np.int64)
    is_placeholder = np.concatenate([[False], ids == info.token, [False]])
    edges = np.flatnonzero(is_placeholder[1:] != is_placeholder[:-1])
    placeholders, features = int(is_placeholder.sum()), sum(item.rows for item in items)
    if len(edges) // 2 > MAX_RUNS:
        raise InvalidRequestError(
            f"the prompt has {len(edges) // 2} separate runs of image placeholders; at most {MAX_RUNS} are possible",
            FIELD,
        )
    if placeholders != features:
        raise InvalidRequestError(
            f"the prompt has {placeholders} placeholders of pictures (token {info.token}) for {features} features of "
            f"{len(items)} pictures; write one image placeholder for each picture, and none else",
            FIELD,
        )
    runs: list[MediaRun] = []
    item = first = behind = 0
    for start, end in edges.reshape(-1, 2).tolist():  # host: numpy
        while start < end:
            count = min(end - start, items[item].rows - first)
            run = MediaRun(item=item, first=first, start=start, end=start + count)
            if info.rotates_by_place:
                run, behind = _rotated(info, run, items[item], behind)
            runs.append(run)
            start, first = start + count, first + count
            if first == items[item].rows:
                item, first = item + 1, 0
    return runs


def _rotated(info: VisionInfo, run: MediaRun, item: EncoderItem, behind: int) -> tuple[MediaRun, int]:
    """The run with its rotation, and what is added to positions behind it: text goes on after the largest place."""
    grid = Layout.of(item.sizes).grid
    rows, columns = grid.height // info.group, grid.width // info.group
    if run.first or run.end - run.start != item.rows or grid.tiles != 1:
        raise InvalidRequestError("a picture's placeholders must lie side by side", FIELD)
    base = run.start + behind
    behind = base + max(rows, columns) - run.end
    return (
        MediaRun(
            item=run.item, first=0, start=run.start, end=run.end, base=base, columns=columns, behind=behind
        ),
        behind,
    )  # fmt: skip
