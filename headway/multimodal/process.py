"""Preprocessing of pictures: each family's rule of resizing and cutting, as transformers' processors have it, on bytes.

What comes out are tiles of bytes; scaling and normalisation are two numbers for each channel, and happen on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headway.core.errors import InvalidRequestError
from headway.core.plan import Floats
from headway.multimodal.images import FIELD, as_rgb, check_size

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Pillow's numbers of filters, as config files have them."""


class ImageSettings(msgspec.Struct, kw_only=True, frozen=True):
    """How pictures become tiles; see ``api.pictures.settings``.

    Attributes:
        rule: a key of ``RULES``.
        height, width: of what comes out: of the picture, or of each tile.
        resample: filter of the resizing.
        scale: a pixel's factor before mean and deviation, 1 / 255.
        mean, std: of each channel.
        resize: to be done at all.
        crop: (height, width) of the middle that is kept; (0, 0): all.
        step: sides become multiples of so many pixels.
        least, most: pixels of a picture.
        longest: side that a picture is brought to, or at most has.
        splits: it is cut into tiles.
        least_tiles, most_tiles: so many.
        most_rows: rows of the decoder that a picture may come to, and the pixels on a side of a row.
        row_pixels: side of a row.
    """

    rule: str
    height: int = 0
    width: int = 0
    resample: int = BICUBIC
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    resize: bool = True
    crop: tuple[int, int] = (0, 0)
    step: int = 1
    least: int = 0
    most: int = 0
    longest: int = 0
    splits: bool = False
    least_tiles: int = 1
    most_tiles: int = 1
    most_rows: int = 0
    row_pixels: int = 1

    def affine(self) -> tuple[Floats, Floats]:
        """f32 [3] each: scale and shift that stand for rescaling and normalising."""
        mean, std = np.array(self.mean), np.array(self.std)
        return (self.scale / std).astype(np.float32), (-mean / std).astype(np.float32)


class Tiles(NamedTuple):
    """What became of a picture.

    Attributes:
        pixels: uint8 [tiles, height, width, 3].
        rows, columns: of tiles; behind them there may be one more, of the whole picture. 0: it was not cut.
    """

    pixels: Pixels
    rows: int = 0
    columns: int = 0


def cut(image: Image, settings: ImageSettings) -> Tiles:
    """The tiles of a picture.

    Raises:
        InvalidRequestError: it is too large, too long, or comes to more rows than the model takes.
    """
    check_size(*image.size)
    found = RULES[settings.rule](as_rgb(image), settings)
    count, height, width, _ = found.pixels.shape
    check_rows(count, height, width, settings)
    return found


def check_rows(count: int, height: int, width: int, settings: ImageSettings) -> None:
    """Raises InvalidRequestError: so many tiles come to more rows than the model takes."""
    rows = count * (height // settings.row_pixels) * (width // settings.row_pixels)
    if settings.most_rows and rows > settings.most_rows:
        raise InvalidRequestError(
            f"the image comes to {rows} tokens, and the model is run with up to {settings.most_rows} for each; "
            "send a smaller one",
            FIELD,
        )


def _resized(image: Image, height: int, width: int, settings: ImageSettings) -> Image:
    if (height, width) == (image.height, image.width):
        return image
    from PIL.Image import Resampling

    return image.resize((width, height), Resampling(settings.resample))


def _array(image: Image) -> Pixels:
    return np.asarray(image, np.uint8)


def _fixed(image: Image, settings: ImageSettings) -> Tiles:
    """To the one size that there is, whatever the shape."""
    return Tiles(_array(_resized(image, settings.height, settings.width, settings))[None])


def _shortest(image: Image, settings: ImageSettings) -> Tiles:
    """The shorter side to a length, and the middle of the longer one (CLIP)."""
    width, height = image.size
    short, long = min(width, height), max(width, height)
    new = settings.longest
    other = int(new * long / short)
    check_size(new, other)
    if settings.resize:
        height, width = (new, other) if height <= width else (other, new)
        image = _resized(image, height, width, settings)
    rows, columns = settings.crop
    if not rows:
        return Tiles(_array(image)[None])
    pixels = _array(image)
    top, left = (image.height - rows) // 2, (image.width - columns) // 2
    if top < 0 or left < 0:
        raise InvalidRequestError(f"the image is smaller than {rows} x {columns} pixels, and is not resized", FIELD)
    return Tiles(pixels[None, top : top + rows, left : left + columns])


def _smart(image: Image, settings: ImageSettings) -> Tiles:
    rows, columns = _smart_size(image.height, image.width, settings)
    return Tiles(_array(_resized(image, rows, columns, settings))[None])


def _smart_size(height: int, width: int, settings: ImageSettings, frames: int = 1, counted: int = 1) -> tuple[int, int]:
    """About as large as it is, within bounds of its pixels, in whole steps (Qwen2-VL).

    Args:
        frames: whose pixels are bounded together, and as how many of them those of the result count.
    """
    step = settings.step
    if max(height, width) > 200 * min(height, width):
        raise InvalidRequestError("the image is more than 200 times as long as it is wide", FIELD)
    rows, columns = round(height / step) * step, round(width / step) * step
    if counted * rows * columns > settings.most:
        shrink = math.sqrt(frames * height * width / settings.most)
        rows = max(step, math.floor(height / shrink / step) * step)
        columns = max(step, math.floor(width / shrink / step) * step)
    elif counted * rows * columns < settings.least:
        grow = math.sqrt(settings.least / (frames * height * width))
        rows, columns = math.ceil(height * grow / step) * step, math.ceil(width * grow / step) * step
    check_size(columns, rows)
    return rows, columns


def cut_clip(frames: Sequence[Image], settings: ImageSettings, each: int) -> Pixels:
    """The frames of a video, uint8 [N, height, width, 3]; the last one again where N is no multiple of ``each``.

    Raises:
        InvalidRequestError: they are of several sizes, too large, or come to more rows than the model takes.
    """
    sizes = {frame.size for frame in frames}
    if len(sizes) != 1:
        raise InvalidRequestError("the frames of a video must all be of one size", FIELD)
    width, height = sizes.pop()
    check_size(width, height)
    if settings.rule == "volume":
        if min(height, width) < settings.step:
            scale = max(settings.step / height, settings.step / width)
            height, width = int(height * scale), int(width * scale)
        counted = round(len(frames) / each) * each
        rows, columns = _smart_size(height, width, settings, len(frames), counted)
    elif settings.rule == "budget":
        rows, columns = _budget_size(height, width, settings)
    else:
        rows, columns = _smart_size(height, width, settings)
    check_rows(1, rows, columns, settings)
    found = [_array(_resized(as_rgb(frame), rows, columns, settings)) for frame in frames]
    return np.stack(found + [found[-1]] * (-len(found) % each))


def _budget(image: Image, settings: ImageSettings) -> Tiles:
    """As large as a number of pixels allows, in whole steps, whatever size it has (Gemma 4)."""
    rows, columns = _budget_size(image.height, image.width, settings)
    return Tiles(_array(_resized(image, rows, columns, settings))[None])


def _budget_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    step, longest = settings.step, settings.most // settings.step
    factor = math.sqrt(settings.most / (height * width))
    rows, columns = (math.floor(factor * side / step) * step for side in (height, width))
    if not rows and not columns:
        raise InvalidRequestError("the model's pictures are too small for any image; raise max_model_len", FIELD)
    if not rows:
        rows, columns = step, min(width // height * step, longest)
    elif not columns:
        rows, columns = min(height // width * step, longest), step
    return rows, columns


def _bounded(image: Image, settings: ImageSettings) -> Tiles:
    """No side longer than a bound, in whole steps (Pixtral)."""
    width, height = image.size
    ratio = max(height / settings.longest, width / settings.longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    step = settings.step
    height, width = max(-(-height // step), 1) * step, max(-(-width // step), 1) * step
    return Tiles(_array(_resized(image, height, width, settings))[None])


def _split(image: Image, settings: ImageSettings) -> Tiles:
    """The longer side to a length, then to whole tiles, cut, and the whole picture behind them (Idefics3)."""
    size = settings.height
    if settings.resize:
        height, width = _to_longest(image.height, image.width, settings.longest)
        image = _resized(image, height, width, settings)
    if not settings.splits:
        return _fixed(image, settings)
    ratio = image.width / image.height
    if image.width >= image.height:
        width = math.ceil(image.width / size) * size
        height = math.ceil(int(width / ratio) / size) * size
    else:
        height = math.ceil(image.height / size) * size
        width = math.ceil(int(height * ratio) / size) * size
    check_size(width, max(height, 1))
    image = _resized(image, max(height, size), max(width, size), settings)
    if max(image.size) <= size:
        return Tiles(_array(image)[None])
    rows, columns = image.height // size, image.width // size
    whole = _array(_resized(image, size, size, settings))
    return Tiles(np.concatenate([_grid(_array(image), rows, columns, size), whole[None]]), rows, columns)


def _to_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longer side becomes ``longest``, the other even; at most 4096."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio, bound = width / height, 4096
    if width >= height and width > bound:
        width, height = bound, int(bound / ratio)
    elif height > width and height > bound:
        height, width = bound, int(bound * ratio)
    return max(height, 1), max(width, 1)


def _canvas(image: Image, settings: ImageSettings) -> Tiles:
    """As many tiles as suit its shape best, and the whole picture behind them (InternVL)."""
    size = settings.height
    if not settings.splits or settings.most_tiles < 2:
        return _fixed(image, settings)
    columns, rows = _best_canvas(image.height, image.width, settings)
    canvas = _array(_resized(image, rows * size, columns * size, settings))
    tiles = _grid(canvas, rows, columns, size)
    if len(tiles) == 1:
        return Tiles(tiles)
    return Tiles(np.concatenate([tiles, _array(_resized(image, size, size, settings))[None]]), rows, columns)


def _best_canvas(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """(columns, rows) of the nearest shape; of equal ones the larger, while the picture fills half of it."""
    most = settings.most_tiles
    shapes = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if settings.least_tiles <= x * y <= most]
    best, nearest = (1, 1), math.inf
    for shape in sorted(shapes, key=lambda each: each[0] * each[1]):
        apart = abs(width / height - shape[0] / shape[1])
        fills = width * height > 0.5 * settings.height**2 * shape[0] * shape[1]
        if apart < nearest or (apart == nearest and fills):
            best, nearest = shape, apart
    return best


def _grid(pixels: Pixels, rows: int, columns: int, size: int) -> Pixels:
    """[rows * size, columns * size, 3] -> [rows * columns, size, size, 3]."""
    return pixels.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)


RULES = {
    "fixed": _fixed, "shortest": _shortest, "smart": _smart, "bounded": _bounded, "split": _split, "canvas": _canvas,
    "budget": _budget,
}  # fmt: skip
