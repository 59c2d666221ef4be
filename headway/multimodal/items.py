"""From tiles of pixels to what a request carries: an encoder item for each picture, and the runs of its placeholders."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from msgspec import structs

from headway.core.encode import EncoderItem, MediaRun
from headway.core.errors import InvalidRequestError
from headway.core.media import MAX_RUNS, Grid, SoundInfo, VisionInfo
from headway.core.plan import Floats
from headway.multimodal.images import FIELD
from headway.multimodal.layout import Layout, in_squares, lay_out
from headway.multimodal.wire import join

KEY_BYTES = 20


def make_item(
    info: VisionInfo,
    tiles: npt.NDArray[np.uint8],
    scale: Floats,
    shift: Floats,
    *,
    kind: str = "image",
    frames: int = 1,
    late: int = -1,
) -> EncoderItem:
    """The item of one picture, or of a part of a video.

    Args:
        tiles: [tiles, height, width, channels], sides multiples of a merged patch.
        scale, shift: f32 [channels]: a pixel becomes pixel * scale + shift.
        kind: "image", or "video" of a part.
        frames: so many tiles follow each other in time, and patches at one place are one.
        late: see ``EncoderItem``.
    """
    count, height, width, channels = tiles.shape
    size = info.patch
    grid = Grid(count // frames, height // size, width // size)
    cut = tiles.reshape(count, grid.height, size, grid.width, size, channels).transpose(0, 1, 3, 5, 2, 4)
    found = [in_squares(np.ascontiguousarray(tile), info.group) for tile in cut]
    patches = np.stack(found, axis=1) if frames > 1 else np.concatenate(found)
    layout, ints = lay_out(info, grid)
    layout = layout._replace(frames=frames)
    # The integers follow from the sizes. Sizes are part of the name: equal bytes may be of another shape.
    name = blake2b(repr((layout.sizes, tiles.shape)).encode(), digest_size=KEY_BYTES)
    for part in (scale, shift, tiles):
        name.update(np.ascontiguousarray(part).tobytes())
    return EncoderItem(
        kind=kind,
        key=name.digest(),
        rows=grid.patches // info.group**2,
        sizes=layout.sizes,
        data=join(ints, scale, shift, patches.reshape(len(patches), -1)),
        first=0,
        units=grid.patches,
        reach=(grid.height * grid.width, layout.longest_window),
        late=late,
    )


def find_runs(
    info: VisionInfo, token_ids: list[int], items: list[EncoderItem], sound: SoundInfo | None = None
) -> list[MediaRun]:
    """Which tokens of a prompt each item's features stand in for: those that are the placeholder of its kind, in order.

    Raises:
        InvalidRequestError: there are more or fewer placeholders than features.
    """
    ids = np.asarray(token_ids, np.int64)
    heard = -1 if sound is None else sound.token
    is_placeholder = np.isin(np.concatenate([[-1], ids, [-1]]), [each for each in (*info.tokens, heard) if each >= 0])
    edges = np.flatnonzero(is_placeholder[1:] != is_placeholder[:-1])
    placeholders, features = int(is_placeholder.sum()), sum(item.rows for item in items)
    if (runs_bound := max(len(edges) // 2, len(items))) > MAX_RUNS:
        raise InvalidRequestError(
            f"the prompt has {runs_bound} separate runs of media placeholders; at most {MAX_RUNS} are possible",
            FIELD,
        )
    if placeholders != features:
        raise InvalidRequestError(
            f"the prompt has {placeholders} placeholders of media (token {info.token}{f', {heard}' * (heard >= 0)}) for "
            f"{features} features of {len(items)} pictures{' and recordings' * (heard >= 0)}; write one placeholder for "
            "each, and none else",
            FIELD,
        )
    runs: list[MediaRun] = []
    item = first = 0
    for start, end in edges.reshape(-1, 2).tolist():  # host: numpy
        while start < end:
            count = min(end - start, items[item].rows - first)
            run = MediaRun(item=item, first=first, start=start, end=start + count)
            kind = items[item].kind
            token = {"image": info.token, "video": info.video_token, "audio": heard}[kind]
            if not (ids[start : run.end] == token).all():
                raise InvalidRequestError("placeholders of pictures, videos and recordings are mixed up", FIELD)
            if kind == "audio":
                run = structs.replace(run, columns=0)
            elif info.rotates_by_place:
                run = _rotated(info, run, items[item], runs[-1] if runs else None)
            runs.append(run)
            start, first = start + count, first + count
            if first == items[item].rows:
                item, first = item + 1, 0
    return runs


def _rotated(info: VisionInfo, run: MediaRun, item: EncoderItem, before: MediaRun | None) -> MediaRun:
    """The run with its rotation: text goes on after the largest place, or after the latest time."""
    behind = 0 if before is None else before.behind
    grid = Layout.of(item.sizes).grid
    rows, columns = grid.height // info.group, grid.width // info.group
    if run.first or run.end - run.start != item.rows or grid.tiles != 1:
        raise InvalidRequestError("a picture's placeholders must lie side by side", FIELD)
    base, late = run.start + behind, max(item.late, 0)
    if item.late >= 0:
        if before is None or before.end != run.start:
            raise InvalidRequestError("a video's placeholders must lie side by side", FIELD)
        base = before.base
    behind = base + max(rows, columns, late + 1) - run.end
    if behind > 0:
        raise InvalidRequestError(
            f"the video goes on for {late + 1} positions of time, more than its tokens; give its frames with a higher fps",
            FIELD,
        )
    return structs.replace(run, base=base, columns=columns, behind=behind, late=late)
