"""What stands in a prompt for its pictures, against transformers' own processors: the same token ids, to the last newline."""

from __future__ import annotations

import functools
import json
from pathlib import Path
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
