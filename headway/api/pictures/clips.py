"""Videos in prompts: frames in memory become parts, each of which the tower reads as a picture of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError
from headway.core.media import MAX_RUNS, VisionInfo
from headway.multimodal.images import FIELD
from headway.multimodal.items import make_item
from headway.multimodal.process import ImageSettings, cut_clip

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FRAMES: Final = 2 * MAX_RUNS
_FORMS: Final = "an array uint8 [frames, height, width, 3], or a list of pictures, or (either of them, {'fps': number})"


class Clip(NamedTuple):
    """A video as it was given.

    Attributes:
        frames: an array uint8 [N, height, width, 3], or pictures.
        fps: so many of them are a second; None: as many as the model's processor takes.
    """

    frames: Any
    fps: float | None = None


class ClipSettings(NamedTuple):
    """How a model's videos are prepared.

    Attributes:
        images: how frames are resized.
        fps: frames a second of a video that does not say.
        most: frames that are read, evenly spread where there are more; 0: all.
    """

    images: ImageSettings
    fps: float
    most: int = 0

    def chosen(self, count: int) -> Sequence[int]:
        """Numbers of the frames that are read of so many."""
        if not 0 < self.most < count:
            return range(count)
        return [each * count // self.most for each in range(self.most)]


class Parts(NamedTuple):
    """What became of one.

    Attributes:
        items: of its parts, in order.
        seconds: when each of them is: the mean of its first and last frame.
    """

    items: list[EncoderItem]
    seconds: list[float]


def read_clips(data: object) -> list[Clip]:
    """The videos of ``multi_modal_data``: one, or a list of them.

    Raises:
        InvalidRequestError: they are something else, or too long.
    """
    if data is None:
        return []
    if isinstance(data, list) and data and all(_is_clip(each) for each in data):
        return [read_clip(each) for each in data]
    return [read_clip(data)]


def _is_clip(data: object) -> bool:
    if isinstance(data, np.ndarray):
        return data.ndim == 4
    return isinstance(data, list | tuple | Clip)


def read_clip(data: object) -> Clip:
    """One video, in any of its forms."""
    if isinstance(data, Clip):
        return data
    fps = None
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Mapping):
        data, more = data
        for name in more:
            if name != "fps":
                raise InvalidRequestError(f"a video's {name!r:.40} is not supported; only 'fps' is", FIELD)
        fps = more.get("fps")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 1e-3 <= fps <= 1e3:
            raise InvalidRequestError(f"a video's fps must be a number from 0.001 to 1000, got {fps!r:.40}", FIELD)
    whole = isinstance(data, np.ndarray) and data.ndim == 4
    if not whole and not (isinstance(data, list | tuple) and not any(_is_clip(each) for each in data)):
        raise InvalidRequestError(f"a video must be {_FORMS}; got {type(data).__name__}", FIELD)
    assert isinstance(data, np.ndarray | list | tuple)
    if not 2 <= len(data) <= MAX_FRAMES:
        raise InvalidRequestError(
            f"a video has {len(data)} frames; 2 to {MAX_FRAMES} are possible: leave some out, or send a picture", FIELD
        )
    return Clip(data, fps)


def make_parts(
    info: VisionInfo, frames: Sequence[Image], settings: ImageSettings, fps: float, numbers: Sequence[int]
) -> Parts:
    """The parts of a video whose frames are 1 / ``fps`` seconds apart.

    Args:
        frames: those that are read.
        numbers: theirs in the video.

    Raises:
        InvalidRequestError: see ``cut_clip``.
    """
    each = info.frames
    pixels = cut_clip(frames, settings, each)
    affine, items, seconds = settings.affine(), [], []
    apart = np.float32(info.tempo * each / fps) if info.tempo else np.float32(1)
    for number in range(len(pixels) // each):
        first = number * each
        late = int(np.float32(number) * apart) if number and not info.stamps else -1
        items.append(make_item(info, pixels[first : first + each], *affine, kind="video", frames=each, late=late))
        last = min(first + each, len(frames)) - 1
        seconds.append((numbers[first] + numbers[last]) / fps / 2)
    return Parts(items, seconds)
