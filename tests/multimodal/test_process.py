"""Preprocessing against transformers' own image processors (those on Pillow), to the last byte of what is normalised."""

from __future__ import annotations

import importlib
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headway.api.pictures.settings import FAMILIES, read_settings
from headway.core.errors import InvalidRequestError
from headway.core.media import VisionInfo
from headway.multimodal.process import cut

SIZES = [(64, 48), (37, 211), (300, 301), (1, 1), (9, 900), (512, 512), (640, 480)]
CASES: list[tuple[str, str, dict[str, Any], dict[str, int]]] = [
    (
        "Gemma3ForConditionalGeneration",
        "gemma3.Gemma3",
        {"size": {"height": 56, "width": 56}},
        {"patch": 7, "one_size": 56},
    ),
    (
        "Gemma4ForConditionalGeneration",
        "gemma4.Gemma4",
        {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        {"patch": 4, "group": 3},
    ),
    (
        "PaliGemmaForConditionalGeneration",
        "siglip.Siglip",
        {"size": {"height": 28, "width": 28}},
        {"patch": 7, "one_size": 28},
    ),
    (
        "LlavaForConditionalGeneration",
        "clip.CLIP",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        {"patch": 7, "one_size": 28},
    ),
    (
        "SmolVLMForConditionalGeneration",
        "smolvlm.SmolVLM",
        {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True},
        {"patch": 7, "group": 2, "one_size": 56},
    ),
    (
        "Idefics3ForConditionalGeneration",
        "idefics3.Idefics3",
        {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": False},
        {"patch": 7, "group": 2, "one_size": 56},
    ),
    (
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_vl.Qwen2VL",
        {"size": {"shortest_edge": 1024, "longest_edge": 65536}, "patch_size": 4, "merge_size": 2},
        {"patch": 4, "group": 2},
    ),
    (
        "Mistral3ForConditionalGeneration",
        "pixtral.Pixtral",
        {"size": {"longest_edge": 128}, "patch_size": 8},
        {"patch": 4, "group": 2},
    ),
    (
        "InternVLForConditionalGeneration",
        "got_ocr2.GotOcr2",
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6},
        {"patch": 7, "group": 2, "one_size": 28},
    ),
]


def noise(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], channels), np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode)


def theirs_of(name: str, options: dict[str, Any]) -> Any:
    """Transformers' image processor, on Pillow."""
    folder, kind = name.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    return getattr(module, f"{kind}ImageProcessorPil")(**options)


def theirs(name: str, options: dict[str, Any], image: Image.Image) -> Any:
    return theirs_of(name, options)(image, return_tensors="np")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
@pytest.mark.filterwarnings("ignore")
def test_pixels_are_those_of_transformers(case: Any, size: tuple[int, int], tmp_path: Any) -> None:
    architecture, name, options, info_fields = case
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    info = VisionInfo(token=5, longest=10**6, **info_fields)
    settings, _ = read_settings(tmp_path, architecture, info, {})
    image = noise(size)
    try:
        expected = theirs(name, options, image)["pixel_values"]
    except ValueError:
        with pytest.raises(InvalidRequestError):
            cut(image, settings)
        return
    tiles = cut(image, settings)
    scale, shift = settings.affine()
    ours = (tiles.pixels * scale + shift).transpose(0, 3, 1, 2)
    expected = np.asarray(expected)
    if "Gemma4" in name:
        _, height, width, _ = tiles.pixels.shape
        p = info.patch
        cutting = (ours[0] + 1) / 2  # the tower's own scale
        ours = cutting.reshape(3, height // p, p, width // p, p).transpose(1, 3, 2, 4, 0).reshape(1, -1, 3 * p * p)
        assert not expected[:, ours.shape[1] :].any(), "the rest is padding"
        expected = expected[:, : ours.shape[1]]
    if "Qwen" in name:
        _, height, width, _ = tiles.pixels.shape
        p, m = info.patch, info.group
        cutting = ours[0].reshape(3, height // p // m, m, p, width // p // m, m, p).transpose(1, 4, 2, 5, 0, 3, 6)
        ours = np.repeat(cutting.reshape(-1, 3, 1, p * p), 2, axis=2).reshape(expected.shape)
    expected = expected.reshape(-1, *expected.shape[-3:]) if expected.ndim > 3 else expected
    np.testing.assert_allclose(ours, expected, atol=1e-4)


SMALL = {"Qwen2_5_VLForConditionalGeneration": {"shortest_edge": 512, "longest_edge": 2048}}
"""Sizes at which pictures are shrunk that are not large."""


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
@pytest.mark.filterwarnings("ignore")
def test_pictures_of_any_shape(case: Any, tmp_path: Any) -> None:
    """Thin ones, flat ones, tiny ones: as many numbers, and the same, as transformers makes of them. What it cannot do may be
    done here; what is longer than a limit of ours is refused."""
    architecture, name, options, info_fields = case
    changed = options | ({"size": SMALL[architecture]} if architecture in SMALL else {})
    rng = np.random.default_rng(5)
    sides = np.exp(rng.uniform(0, np.log(700), (10, 2))).astype(int).clip(1)
    for width, height in [(2000, 12), (12, 2000), *sides.tolist()]:
        try:
            theirs(name, changed, noise((width, height)))
        except (
            ValueError
        ):  # it makes no pixels of it, or refuses what is more than 200 times as long one way as the other
            continue
        try:
            test_pixels_are_those_of_transformers((architecture, name, changed, info_fields), (width, height), tmp_path)
        except InvalidRequestError as error:
            if "16384 on a side" not in str(error):
                raise


@pytest.mark.parametrize("mode", ["RGBA", "L"])
def test_other_modes_are_converted(mode: str, tmp_path: Any) -> None:
    info = VisionInfo(token=5, patch=7, one_size=224)
    settings, _ = read_settings(None, "Gemma3ForConditionalGeneration", info, {})
    image = noise((50, 60), mode)
    expected = theirs("gemma3.Gemma3", {"do_convert_rgb": True}, image)["pixel_values"]
    scale, shift = settings.affine()
    np.testing.assert_allclose((cut(image, settings).pixels * scale + shift).transpose(0, 3, 1, 2), expected, atol=1e-4)


def test_every_family_has_defaults() -> None:
    for architecture in FAMILIES:
        info = VisionInfo(token=5, patch=14, group=2, longest=4096)
        settings, placeholders = read_settings(None, architecture, info, {})
        assert settings.rule and placeholders.token == 5
