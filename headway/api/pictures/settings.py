"""A model's processor files -> ``ImageSettings`` and ``Placeholders``. A field that is not honoured is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from headway.api.pictures.clips import ClipSettings
from headway.api.pictures.placeholders import Placeholders
from headway.core.errors import ConfigError
from headway.core.media import SoundInfo, VisionInfo
from headway.multimodal.process import BICUBIC, BILINEAR, LANCZOS, ImageSettings

_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_HALF = [0.5, 0.5, 0.5]
_HONOURED = {
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize",
    "image_mean", "image_std", "do_convert_rgb", "patch_size", "merge_size", "temporal_patch_size", "min_pixels",
    "max_pixels", "do_image_splitting", "max_image_size", "crop_to_patches", "min_patches", "max_patches",
}  # fmt: skip
_OFF = {"do_pan_and_scan": (None, False), "do_pad": (None, True, False)}
"""Fields that are not honoured, and values at which they change nothing here: pictures are never batched, so never padded."""
_CAMERA_FPS = 24.0
"""Frames a second of a video that does not say, where frames are chosen here."""
VIDEO_FILES = ("video_preprocessor_config.json", "processor_config.json", "preprocessor_config.json")
FILES = ("preprocessor_config.json", "processor_config.json")


class Family(NamedTuple):
    """An architecture's rule, and what its processor takes absent fields for."""

    rule: str
    marker: str
    defaults: dict[str, Any]


def _family(rule: str, marker: str, **defaults: Any) -> Family:
    return Family(rule, marker, {"rescale_factor": 1 / 255, "do_resize": True, "resample": BICUBIC, **defaults})


FAMILIES: Mapping[str, Family] = {
    "Gemma3ForConditionalGeneration": _family(
        "fixed", "spans", size={"height": 224, "width": 224}, resample=BILINEAR, image_mean=_HALF, image_std=_HALF
    ),
    "Gemma3nForConditionalGeneration": _family(
        "fixed", "apart", size={"height": 768, "width": 768}, image_mean=_HALF, image_std=_HALF
    ),
    "Gemma4ForConditionalGeneration": _family(
        "budget", "wrapped", size={}, max_soft_tokens=280, do_normalize=False, image_mean=[0.0] * 3, image_std=[1.0] * 3
    ),
    "PaliGemmaForConditionalGeneration": _family(
        "fixed", "first", size={"height": 224, "width": 224}, image_mean=_HALF, image_std=_HALF
    ),
    "LlavaForConditionalGeneration": _family(
        "shortest", "same", size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224},
        do_center_crop=True, image_mean=_CLIP_MEAN, image_std=_CLIP_STD,
    ),
    "Idefics3ForConditionalGeneration": _family(
        "split", "tiles", size={"longest_edge": 4 * 364}, max_image_size={"longest_edge": 364}, resample=LANCZOS,
        do_image_splitting=True, image_mean=_HALF, image_std=_HALF,
    ),
    "SmolVLMForConditionalGeneration": _family(
        "split", "tiles", size={"longest_edge": 4 * 364}, max_image_size={"longest_edge": 364}, resample=LANCZOS,
        do_image_splitting=True, image_mean=_HALF, image_std=_HALF,
    ),
    "Qwen2VLForConditionalGeneration": _family(
        "smart", "same", size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        image_mean=_CLIP_MEAN, image_std=_CLIP_STD,
    ),
    "Mistral3ForConditionalGeneration": _family(
        "bounded", "lines", size={"longest_edge": 1024}, image_mean=_CLIP_MEAN, image_std=_CLIP_STD
    ),
    "InternVLForConditionalGeneration": _family(
        "canvas", "between", size={"height": 384, "width": 384}, crop_to_patches=False, min_patches=1, max_patches=12,
        image_mean=_CLIP_MEAN, image_std=_CLIP_STD,
    ),
}  # fmt: skip
_LIKE = {"Qwen2_5_VLForConditionalGeneration": "Qwen2VLForConditionalGeneration",
         "Qwen3VLForConditionalGeneration": "Qwen2VLForConditionalGeneration"}  # fmt: skip


def read_settings(
    folder: Path | None,
    architecture: str,
    info: VisionInfo,
    config: Mapping[str, Any],
    sound: SoundInfo | None = None,
) -> tuple[ImageSettings, Placeholders]:
    """How a model's pictures are prepared, and how they stand in its prompts.

    Args:
        folder: with the processor's files, where there are any.
        config: config.json.
        sound: how the model hears recordings beside; None: it does not.

    Raises:
        ConfigError: something there is not implemented, or does not fit the model; names the field.
    """
    family = FAMILIES[_LIKE.get(architecture, architecture)]
    values = {**family.defaults, **_given(folder, FILES, "image_processor")}
    most = config.get("vision_soft_tokens_per_image")
    if most is not None and values.get("max_soft_tokens", 0) > most:
        raise ConfigError(
            f"the image processor's max_soft_tokens = {values['max_soft_tokens']} is more than the model's "
            f"vision_soft_tokens_per_image = {most}; raise that by hf_overrides"
        )
    settings = _settings(family, values, info)
    if info.one_size and {settings.height, settings.width} != {info.one_size}:
        raise ConfigError(
            f"the image processor makes pictures of {settings.height} x {settings.width} pixels, the model takes "
            f"{info.one_size}; correct size in {FILES[0]}"
        )
    return settings, Placeholders.of(family.marker, info, config, sound)


def read_clip_settings(folder: Path | None, architecture: str, info: VisionInfo) -> ClipSettings:
    """How a model's videos are prepared.

    Raises:
        ConfigError: as for ``read_settings``.
    """
    own = FAMILIES.get(architecture)
    if own is not None and own.rule == "budget":
        return _sampled(own, folder, info)
    row, mean, std = info.patch * info.group, _CLIP_MEAN, _CLIP_STD
    size = {"shortest_edge": 128 * row * row, "longest_edge": 768 * row * row}
    if info.stamps:
        mean = std = _HALF
    family = _family("volume" if info.stamps else "smart", "same", size=size, image_mean=mean, image_std=std)
    values = {**family.defaults, **_given(folder, VIDEO_FILES, "video_processor")}
    if values.get("cap_pixels_per_frame"):
        raise ConfigError("the video processor's cap_pixels_per_frame is not implemented; turn it off")
    found = _settings(family, values, info)
    if info.stamps:  # that of all frames; rows are bounded picture by picture
        found = structs.replace(found, most=values["size"]["longest_edge"])
    fps = values.get("fps") or 2.0
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < 1e4:
        raise ConfigError(f"the video processor's fps = {fps!r:.40} must be a number of frames a second")
    return ClipSettings(found, float(fps))


def _sampled(family: Family, folder: Path | None, info: VisionInfo) -> ClipSettings:
    """Of a model that reads so many frames of a video, whatever its length (Gemma 4)."""
    given = _given(folder, VIDEO_FILES, "video_processor")
    values = {**family.defaults, "max_soft_tokens": 70, "num_frames": 32, **given}
    if "fps" in given:
        raise ConfigError(f"the video processor's fps = {given['fps']!r:.40} is not supported; set num_frames instead")
    most = values["num_frames"] if values.get("do_sample_frames", True) else 0
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise ConfigError(f"the video processor's num_frames = {most!r:.40} must be a number of frames")
    return ClipSettings(_settings(family, values, info), _CAMERA_FPS, most)


def _given(folder: Path | None, files: Sequence[str], part: str) -> dict[str, Any]:
    given = {name: value for name, value in read_fields(folder, files, part).items() if value is not None}
    for name, value in given.items():
        known = name in _HONOURED or name == "do_sample_frames"
        if name.startswith("do_") and not known and value not in _OFF.get(name, (None, False)):
            raise ConfigError(f"the image processor's {name} = {value!r:.60} is not implemented; turn it off")
    return given


def _settings(family: Family, values: Mapping[str, Any], info: VisionInfo) -> ImageSettings:
    def on(name: str) -> bool:
        return bool(values.get(name, True))

    size = values["size"]
    size = {"shortest_edge": size, "height": size, "width": size} if isinstance(size, int) else dict(size)
    row = info.patch * info.group
    found: dict[str, Any] = {
        "rule": family.rule,
        "resample": values["resample"],
        "scale": values["rescale_factor"] if on("do_rescale") else 1.0,
        "mean": tuple(values["image_mean"]) if on("do_normalize") else (0.0, 0.0, 0.0),
        "std": tuple(values["image_std"]) if on("do_normalize") else (1.0, 1.0, 1.0),
        "resize": on("do_resize"),
        "height": size.get("height", 0),
        "width": size.get("width", 0),
        "step": row,
        "most_rows": info.longest,
        "row_pixels": row,
    }
    rule = family.rule
    if rule == "shortest" and "shortest_edge" not in size:
        found["rule"] = "fixed"  # SigLIP beside Llava
    elif rule == "shortest":
        crop = values["crop_size"] if values.get("do_center_crop") else {}
        crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
        middle = (crop.get("height", 0), crop.get("width", 0))
        found |= {"longest": size["shortest_edge"], "crop": middle, "height": middle[0], "width": middle[1]}
    elif rule in ("smart", "volume"):
        # Older exporters wrote min_pixels and max_pixels, which win over size.
        least, most = (
            values.get("min_pixels", size.get("shortest_edge")),
            values.get("max_pixels", size.get("longest_edge")),
        )
        found |= {"least": least, "most": min(most, info.longest * row * row)}
    elif rule == "budget":
        for name, wanted in (("patch_size", info.patch), ("pooling_kernel_size", info.group), ("do_resize", True)):
            if values.get(name, wanted) != wanted:
                raise ConfigError(
                    f"the image processor's {name} = {values[name]!r} does not fit the model; set {wanted!r}"
                )
        # The tower takes twice what is normalised, minus 1.
        mean, std = found["mean"], tuple(each / 2 for each in found["std"])
        found |= {"mean": tuple(m + s for m, s in zip(mean, std, strict=True)), "std": std}
        found |= {"most": min(values["max_soft_tokens"], info.longest) * row * row}
    elif rule == "bounded":
        found |= {"longest": size.get("longest_edge") or size["height"], "height": 0, "width": 0}
    elif rule == "split":
        tile = values["max_image_size"]["longest_edge"]
        found |= {
            "longest": size["longest_edge"], "splits": on("do_image_splitting"), "height": tile, "width": tile,
        }  # fmt: skip
    elif rule == "canvas":
        found |= {
            "splits": values["crop_to_patches"], "least_tiles": values["min_patches"], "most_tiles": values["max_patches"],
        }  # fmt: skip
    try:
        return ImageSettings(**found)
    except TypeError as error:
        raise ConfigError(f"the image processor's settings are not understood: {error}") from None


def read_fields(folder: Path | None, files: Sequence[str], part: str) -> dict[str, Any]:
    """The processor's fields, in the processor's file a ``part``, or all with "" for one; a file before others wins. Of videos
    one file is read."""
    found: dict[str, Any] = {}
    for name in files:
        file = None if folder is None else folder / name
        if file is None or not file.is_file():
            continue
        try:
            values = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        values = values.get(part, {} if part and name == "processor_config.json" else values)
        found = {**values, **found} if isinstance(values, dict) else found
        if found and files is VIDEO_FILES:
            break
    return found
