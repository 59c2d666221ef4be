"""Items, runs and image files: names, counts, places and limits."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headway.core.errors import InvalidRequestError
from headway.core.media import MAX_RUNS, Grid, VisionInfo
from headway.multimodal import images
from headway.multimodal.images import decode_image
from headway.multimodal.items import find_runs, make_item
from headway.multimodal.layout import Layout, lay_out, windows

INFO = VisionInfo(patch=2, group=2, token=9, rotates_by_place=True)
ONE, ZERO = np.ones(3, np.float32), np.zeros(3, np.float32)


def item(height: int, width: int, value: int = 0) -> Any:
    return make_item(INFO, np.full((1, height, width, 3), value, np.uint8), ONE, ZERO)


def test_names_follow_content_shape_and_options() -> None:
    base = item(8, 16)
    assert base.key == item(8, 16).key
    others = [item(16, 8), item(8, 16, 1), make_item(INFO, np.zeros((1, 8, 16, 3), np.uint8), ONE * 2, ZERO)]
    assert len({base.key, *(each.key for each in others)}) == 4
    assert base.rows == 8 and Layout.of(base.sizes).grid == Grid(1, 4, 8)


def test_runs_with_rotations_by_place() -> None:
    """Text goes on behind the larger side of each picture."""
    wide, tall = item(8, 16), item(12, 4)  # 2 x 4 and 3 x 1 rows
    first, second = find_runs(INFO, [1, 1, *[9] * 8, 1, *[9] * 3, 1], [wide, tall])
    assert (first.start, first.end, first.base, first.columns, first.behind) == (2, 10, 2, 4, 6 - 10)
    assert (second.start, second.end, second.base, second.columns, second.behind) == (11, 14, 7, 1, 10 - 14)


@pytest.mark.parametrize("count", [0, 7, 9, 16])
def test_placeholders_and_features_are_as_many(count: int) -> None:
    with pytest.raises(InvalidRequestError, match="placeholders"):
        find_runs(INFO, [1, *[9] * count, 1], [item(8, 16)])


def test_pictures_side_by_side_and_in_lines() -> None:
    plain = VisionInfo(patch=2, group=2, token=9)
    runs = find_runs(plain, [*[9] * 12, 1, *[9] * 4], [item(8, 16), item(8, 16)])
    assert [(run.item, run.first, run.start, run.end) for run in runs] == [(0, 0, 0, 8), (1, 0, 8, 12), (1, 4, 13, 17)]
    with pytest.raises(InvalidRequestError, match="side by side"):
        find_runs(INFO, [9, 9, 9, 9, 1, 9, 9, 9, 9], [item(8, 16)])
    with pytest.raises(InvalidRequestError, match="runs"):
        find_runs(plain, [9, 1] * (MAX_RUNS + 1), [])


def test_windows_cover_every_place_once() -> None:
    order, starts = windows(5, 7, 3)
    assert sorted(order) == list(range(35)) and starts[-1] == 35
    assert list(order[: starts[1]]) == [0, 1, 2, 7, 8, 9, 14, 15, 16] and len(starts) == 7
    layout, ints = lay_out(VisionInfo(patch=2, group=2, token=9, window=3), Grid(1, 10, 14))
    assert layout.num_ints == len(ints) and layout.longest_window == 36 and Layout.of(layout.sizes) == layout


def file_of(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def test_files_are_decoded_the_right_way_up() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = np.asarray(decode_image(file_of(image, exif=exif.tobytes())))
    assert np.array_equal(turned, np.rot90(pixels, 3))
    clear = Image.new("RGBA", (3, 3), (10, 20, 30, 0))
    assert np.asarray(decode_image(file_of(clear))).min() == 255, "what is transparent is white"
    frames = [Image.new("RGB", (3, 3), color) for color in ("red", "blue")]
    assert decode_image(file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])).getpixel((0, 0)) == (
        255,
        0,
        0,
    )


@pytest.mark.parametrize(("name", "value"), [("MAX_FILE_BYTES", 100), ("MAX_PIXELS", 599), ("MAX_SIDE", 29)])
def test_limits_have_two_sides(name: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)))
    assert decode_image(data).size == (30, 20)
    monkeypatch.setattr(images, name, value)
    with pytest.raises(InvalidRequestError, match=str(value)):
        decode_image(data)
