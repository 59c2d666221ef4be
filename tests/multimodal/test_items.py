"""Items, runs and image files: names, counts, places and limits."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headway.api.pictures.door import _picture
from headway.core.errors import InvalidRequestError
from headway.core.media import MAX_RUNS, Grid, VisionInfo
from headway.multimodal import images
from headway.multimodal.images import as_rgb, decode_image
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


GREYS = np.linspace(0, 65535, 600).astype(np.uint16).reshape(20, 30)


def test_sixteen_bits_become_the_upper_eight() -> None:
    """In files and in memory; what has no known range is refused rather than cut off."""
    expected = np.repeat((GREYS >> 8).astype(np.uint8)[..., None], 3, axis=2)
    assert np.array_equal(np.asarray(decode_image(file_of(Image.fromarray(GREYS)))), expected)
    assert np.array_equal(np.asarray(as_rgb(Image.fromarray(GREYS))), expected)
    for numbers in (GREYS.astype(np.int32), GREYS.astype(np.float32)):
        with pytest.raises(InvalidRequestError, match="no known range"):
            as_rgb(Image.fromarray(numbers))
    with pytest.raises(InvalidRequestError, match="La"):
        as_rgb(Image.new("La", (3, 3)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_in_memory_are_turned_like_files(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(Image.fromarray(np.random.default_rng(1).integers(0, 256, (6, 4, 3), np.uint8)), kind, exif=exif)
    whole = decode_image(data)
    assert whole.size == ((6, 4) if orientation > 4 else (4, 6))
    assert np.array_equal(np.asarray(_picture(Image.open(io.BytesIO(data)))), np.asarray(whole))


def test_a_damaged_picture_in_memory_is_refused() -> None:
    data = file_of(
        Image.fromarray(np.random.default_rng(3).integers(0, 256, (60, 40, 3), np.uint8)), "JPEG", exif=_turned()
    )
    with pytest.raises(InvalidRequestError, match="damaged"):
        _picture(Image.open(io.BytesIO(data[:-60])))


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _modes() -> dict[str, tuple[bytes, Image.Image]]:
    """A file of each kind, and the picture in RGB that it is; a lossy one as Pillow decodes it."""
    colours = Image.fromarray(np.random.default_rng(2).integers(0, 256, (20, 30, 3), np.uint8))
    few, grey = colours.quantize(16), colours.convert("L")
    animated = [colours, Image.new("RGB", colours.size, "red")]
    whole: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
        "grey": (grey, "PNG", {}), "grey with alpha": (grey.convert("LA"), "PNG", {}), "palette": (few, "PNG", {}),
        "two colours": (colours.convert("1"), "PNG", {}), "bitmap of greys": (grey, "BMP", {}),
        "webp": (colours, "WEBP", {"lossless": True}), "bmp": (colours, "BMP", {}),
        "animated png": (animated[0], "PNG", {"save_all": True, "append_images": animated[1:]}),
        "animated webp": (animated[0], "WEBP", {"save_all": True, "append_images": animated[1:], "lossless": True}),
    }  # fmt: skip
    found = {name: (file_of(image, kind, **more), image.convert("RGB")) for name, (image, kind, more) in whole.items()}
    for name, image in {"cmyk": colours.convert("CMYK"), "grey jpeg": grey}.items():
        data = file_of(image, "JPEG", quality=95)
        found[name] = data, Image.open(io.BytesIO(data)).convert("RGB")
    return found


@pytest.mark.parametrize("name", _modes())
def test_files_of_any_mode_become_rgb(name: str) -> None:
    data, expected = _modes()[name]
    found = decode_image(data)
    assert found.mode == "RGB" and np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_what_is_half_transparent_is_half_white(kind: str) -> None:
    image = Image.new("RGBA", (3, 3), (100, 0, 200, 128))
    found = np.asarray(decode_image(file_of(image, kind, **({"lossless": True} if kind == "WEBP" else {}))))
    np.testing.assert_allclose(found[0, 0], [177, 127, 227], atol=1)
