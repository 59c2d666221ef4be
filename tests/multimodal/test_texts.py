"""What stands in a prompt for its pictures, against transformers' own processors: the same token ids, to the last newline."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from PIL import Image
from tokenizers import models, pre_tokenizers

from headway.api.pictures.placeholders import Shown
from headway.api.pictures.settings import read_settings
from headway.core.media import VisionInfo
from headway.multimodal.process import cut
from tests.multimodal.test_process import theirs_of

SPECIAL = ("<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>", "<boi>", "<eoi>", "<row>")
PICTURES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
    for seed, (height, width) in enumerate([(24, 40), (100, 30)])
]
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any], list[tuple[str, int]]]] = {
    # architecture, image processor, its settings, the processor's own, the model's numbers, prompts and their pictures
    "gemma3": (
        "Gemma3ForConditionalGeneration", "gemma3.Gemma3", {"size": {"height": 28, "width": 28}}, {"image_seq_length": 4},
        {"patch": 7, "group": 2, "one_size": 28}, [("a<boi>b", 1), ("<boi><boi>", 2)],
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration", "siglip.Siglip", {"size": {"height": 28, "width": 28}}, {},
        {"patch": 7, "group": 2, "one_size": 28}, [("<image>see it", 1), ("see it", 1), ("<image><image>see both", 2)],
    ),
    "llava": (
        "LlavaForConditionalGeneration", "clip.CLIP",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"patch": 7, "one_size": 28}, [("a<image>b", 1), ("<image>\n<image>", 2)],
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration", "idefics3.Idefics3",
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True},
        {"image_seq_len": 16}, {"patch": 7, "group": 2, "one_size": 56}, [("a<image>b", 1), ("<image>, <image>", 2)],
    ),
    "idefics3-whole": (
        "Idefics3ForConditionalGeneration", "idefics3.Idefics3",
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": False},
        {"image_seq_len": 16}, {"patch": 7, "group": 2, "one_size": 56}, [("a<image>b", 1)],
    ),
}  # fmt: skip


@functools.cache
def backend() -> tokenizers.Tokenizer:
    """A token for each character, and one for whatever is special."""
    chars = [chr(32 + i) for i in range(95)] + ["\n"]
    made = tokenizers.Tokenizer(
        models.WordLevel({text: i for i, text in enumerate([*SPECIAL, *chars])}, unk_token="<row>")
    )
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(list(SPECIAL))
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, images, settings, more, numbers, prompts = CASES[name]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend(),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    )
    image_processor = theirs_of(images, settings)
    image_processor.image_seq_length = 4  # PaliGemma's asks it
    kind = getattr(transformers, architecture.replace("ForConditionalGeneration", "Processor"))
    processor = kind(image_processor, tokenizer, **more)

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    id_of = backend().token_to_id
    config = {"boi_token_index": id_of("<boi>"), "eoi_token_index": id_of("<eoi>")}
    info = VisionInfo(token=SPECIAL.index("<image>"), longest=10**6, **numbers)
    ours, placeholders = read_settings(tmp_path, architecture, info, config)
    for prompt, count in prompts:
        given = PICTURES[:count]
        shown = [Shown(placeholders.marker, placeholders.pieces(cut(each, ours))) for each in given]
        text, order = placeholders.into_text(prompt, shown, lambda token: str(backend().id_to_token(token)), "<s>")
        assert order == list(range(count))
        expected = np.asarray(processor(text=prompt, images=given)["input_ids"]).ravel().tolist()
        assert backend().encode(text, add_special_tokens=False).ids == expected, prompt


ALONE: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # architecture, image processor, processor, image processor's settings, what the processor knows, the model's numbers
    "mistral3": (
        "Mistral3ForConditionalGeneration", "pixtral.Pixtral", "pixtral.Pixtral",
        {"size": {"longest_edge": 40}, "patch_size": 8},
        {"patch_size": 4, "spatial_merge_size": 2, "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        {"patch": 4, "group": 2},
    ),
    "internvl": (
        "InternVLForConditionalGeneration", "got_ocr2.GotOcr2", "internvl.InternVL",
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6},
        {"start_image_token": "<img>", "end_image_token": "</img>", "image_seq_length": 4},
        {"patch": 7, "group": 2, "one_size": 28},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.filterwarnings("ignore")
def test_what_stands_for_a_picture_is_that_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of processors that cannot be made without torchvision: what one puts in a marker's place is asked of its class. Pixtral's
    module imports its other image processor, which needs torchvision, for a size that is not asked for here."""
    architecture, images, processor, settings, known, numbers = ALONE[name]
    folder, kind = processor.split(".")
    absent = ModuleType("absent")
    absent.__dict__["get_resize_output_image_size"] = None
    monkeypatch.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", absent)
    module = importlib.import_module(f"transformers.models.{folder}.processing_{folder}")
    monkeypatch.delitem(sys.modules, module.__name__)
    replace = getattr(module, f"{kind}Processor").replace_image_token
    knowing = SimpleNamespace(image_token="<image>", **known)

    own = {key: value for key, value in settings.items() if key != "patch_size"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    info = VisionInfo(token=SPECIAL.index("<image>"), longest=10**6, **numbers)
    ours, placeholders = read_settings(tmp_path, architecture, info, {})
    for number, picture in enumerate(PICTURES):
        pieces = placeholders.pieces(cut(picture, ours))
        written = "".join(str(backend().id_to_token(each)) if isinstance(each, int) else each for each in pieces)
        expected = replace(knowing, theirs_of(images, settings)(PICTURES, return_tensors=None), number)
        assert written == expected, number
