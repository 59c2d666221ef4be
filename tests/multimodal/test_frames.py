"""Videos that are frames with their times (Gemma 4): which frames are read, what stands for them, and what the model makes of
them. Chunks, neighbours, preemption and depths are in ``test_engine``, whose prompts have some."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor, get_aspect_ratio_preserving_size
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from headway import LLM
from headway.api.pictures.clips import ClipSettings
from headway.api.pictures.door import Pictures
from headway.api.pictures.placeholders import Placeholders
from headway.api.pictures.settings import read_clip_settings
from headway.core.errors import ConfigError, InvalidRequestError
from headway.core.media import VisionInfo
from headway.engine.boot import build_engine
from headway.multimodal.items import find_runs
from headway.multimodal.process import ImageSettings, cut_clip
from tests.engine.harness import run
from tests.multimodal import tiny_sight
from tests.multimodal.test_doors import GREEDY, noise, options
from tests.multimodal.test_engine import info_of
from tests.multimodal.tiny_sight import (
    TOKEN,
    VIDEO,
    Film,
    arguments,
    film,
    hf_answer,
    hf_greedy,
    hf_inputs,
    picture,
    prompt_of,
    request,
    sighted,
)

NAME = "Gemma4ForConditionalGeneration"
INFO = VisionInfo(patch=4, group=3, token=TOKEN, video_token=VIDEO, stamps=True, longest=280)
PLACEHOLDERS = Placeholders.of("wrapped", INFO, {"boi_token_id": 101, "eoi_token_id": 102})


def clip(seed: int, frames: int, height: int = 24, width: int = 40) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


@pytest.mark.parametrize("total", [2, 31, 32, 33, 40, 63, 64, 65, 500])
def test_frames_are_chosen_as_transformers_does(total: int) -> None:
    """Where there are fewer than it takes, transformers refuses; here all are read."""
    settings = ClipSettings(ImageSettings(rule="budget"), 24.0, 32)
    count = min(total, 32)
    expected = default_sample_indices_fn(VideoMetadata(total_num_frames=total), num_frames=count)
    assert list(settings.chosen(total)) == expected.tolist()
    assert list(settings._replace(most=0).chosen(total)) == list(range(total))


@pytest.mark.parametrize(
    ("numbers", "fps"),
    [([0, 1], 24.0), ([0, 7, 15, 22], 0.25), ([0, 59, 60, 61], 1.0), ([0, 5990, 5999], 1.0), ([0, 3, 1797], 29.97)],
)
def test_times_are_written_as_transformers_does(numbers: list[int], fps: float) -> None:
    """Minutes and seconds, cut and not rounded; behind each frame but the last a blank."""
    texts = SimpleNamespace(boi_token="(", video_token="v", eoi_token=")")
    meta = VideoMetadata(total_num_frames=9999, fps=fps, frames_indices=numbers)
    given = {"num_soft_tokens_per_video": [3], "video_metadata": [meta]}
    names = {101: "(", 102: ")", VIDEO: "v"}
    shown = PLACEHOLDERS.of_clip([3] * len(numbers), [number / fps for number in numbers])
    text = "".join(names[each] if isinstance(each, int) else each for each in shown.pieces)
    assert text == Gemma4Processor.replace_video_token(texts, given, 0)


@pytest.mark.parametrize(("height", "width"), [(24, 40), (100, 60), (30, 3000), (3000, 30), (7, 7), (333, 801)])
def test_frames_are_as_large_as_transformers_makes_them(height: int, width: int) -> None:
    settings = ImageSettings(rule="budget", step=12, most=70 * 144)
    expected = get_aspect_ratio_preserving_size(height, width, 4, 70 * 9, 3)
    found = cut_clip([Image.new("RGB", (width, height))] * 2, settings, 1)
    assert found.shape == (2, *expected, 3)


@pytest.mark.parametrize(("frames", "height", "width"), [(40, 60, 90), (33, 301, 77), (32, 48, 768)])
def test_pixels_are_those_of_transformers(frames: int, height: int, width: int, tmp_path: Path) -> None:
    """With its own processor, where torchvision is, which that needs."""
    pytest.importorskip("torchvision", reason="torchvision is not installed: transformers resizes videos with it")
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    info = VisionInfo(patch=16, group=3, token=TOKEN, video_token=VIDEO, stamps=True, longest=1120)
    theirs = Gemma4VideoProcessor()
    theirs.save_pretrained(tmp_path)
    settings = read_clip_settings(tmp_path, NAME, info)
    video = clip(frames, frames, height, width)
    found = theirs(video, return_tensors="np", return_metadata=True)
    numbers = list(settings.chosen(frames))
    assert numbers == list(found["video_metadata"][0].frames_indices)
    ours = cut_clip([Image.fromarray(video[each]) for each in numbers], settings.images, 1)
    count, tall, wide, _ = ours.shape
    patches = ours.reshape(count, tall // 16, 16, wide // 16, 16, 3).swapaxes(2, 3).reshape(count, -1, 768)
    expected = found["pixel_values_videos"][:, : patches.shape[1]] * 255
    assert found["num_soft_tokens_per_video"][0] * 9 == patches.shape[1]
    apart = np.abs(patches - expected)
    assert apart.max() < 2.5 and apart.mean() < 0.01, "torchvision rounds in other places than Pillow"


def test_processor_files_are_read(tmp_path: Path) -> None:
    def read(**values: Any) -> ClipSettings:
        (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": values}))
        return read_clip_settings(tmp_path, NAME, INFO)

    plain = read_clip_settings(None, NAME, INFO)
    assert (plain.most, plain.fps, plain.images.most) == (32, 24.0, 70 * 144)
    assert read(num_frames=8).most == 8 and read(do_sample_frames=False).most == 0
    assert read(max_soft_tokens=140).images.most == 140 * 144
    for values in ({"fps": 2}, {"num_frames": -1}, {"num_frames": 2.5}, {"patch_size": 16}, {"do_flip": True}):
        with pytest.raises(ConfigError):
            read(**values)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(sighted("gemma4").folder, **options(max_model_len=250)) as found:
        yield found


def expected(llm: LLM, ids: list[int], parts: list[Any]) -> list[int]:
    """Greedy tokens of transformers for the prompt that the engine saw; ``parts``: frames and pictures, in order."""
    pictures, info = llm._door.pictures, llm.model_info.vision
    assert pictures is not None and info is not None and pictures._clips is not None
    settings = pictures._clips.images
    with pytest.MonkeyPatch.context() as patch:
        scale, shift = settings.affine()
        patch.setattr(tiny_sight, "SCALE", scale)
        patch.setattr(tiny_sight, "SHIFT", shift)
        cuts = [
            Film(cut_clip([Image.fromarray(frame) for frame in each], settings, 1), 1.0)
            if each.ndim == 4
            else cut_clip([Image.fromarray(each)], pictures.settings, 1)
            for each in parts
        ]
        _, given = hf_inputs(sighted("gemma4"), info, cuts)
    return hf_answer(sighted("gemma4"), ids, len(ids), [], given, 6)


def test_text_with_videos(llm: LLM) -> None:
    """Of nine frames four are read, each behind its time; a list of pictures is a video; ids give the same."""
    long, short, seen = clip(1, 9), clip(2, 3), np.asarray(noise(1))
    text = "see <|video|> and <|image|> and <|video|>?"
    videos = [(long, {"fps": 0.05}), [Image.fromarray(each) for each in short]]
    data = {"image": noise(1), "video": videos}
    prompt: Any = {"prompt": text, "multi_modal_data": data}
    [first] = llm.generate(prompt, GREEDY)
    encode, ids = llm.get_tokenizer().encode, first.prompt_token_ids
    rows = 2  # a frame of 24 x 40 pixels becomes 1 x 2 squares of 12
    shown = [
        [token for text in some for token in [*encode(text, add_special_tokens=False), 101, *[VIDEO] * rows, 102]]
        for some in (["00:00 ", " 00:40 ", " 01:20 ", " 02:00 "], ["00:00 ", " 00:00 ", " 00:00 "])
    ]
    assert ids[4 : 4 + len(shown[0])] == shown[0] and ids[-1 - len(shown[1]) : -1] == shown[1]
    answer = expected(llm, ids, [long[[0, 2, 4, 6]], seen, short])
    assert first.outputs[0].token_ids == answer
    for again in (ids, encode(text, add_special_tokens=False)):
        prompt = {"prompt_token_ids": again, "multi_modal_data": data}
        [other] = llm.generate(prompt, GREEDY)
        assert other.prompt_token_ids == ids and other.outputs[0].token_ids == answer
    part: dict[str, Any] = {"type": "video", "video": videos[0]}
    [talk] = llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "<|video|>?"}]}], GREEDY)
    assert talk.prompt_token_ids[6 : 6 + len(shown[0])] == shown[0]
    assert talk.prompt_token_ids.count(VIDEO) == 4 * rows, "what a user types is text"
    assert talk.outputs[0].token_ids == expected(llm, talk.prompt_token_ids, [long[[0, 2, 4, 6]]])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "none", "multi_modal_data": {"video": clip(1, 4)}}, "0 video placeholders"),
        ({"prompt": "<|video|>"}, "1 placeholders"),
        ({"prompt": "<|video|>", "multi_modal_data": {"image": noise(1)}}, "image placeholders"),
        ({"prompt": "<|video|>" * 5, "multi_modal_data": {"video": [clip(1, 4)] * 5}}, "at most 4"),
        ({"prompt": "<|video|>", "multi_modal_data": {"video": b"mp4"}}, "a video must be"),
        ({"prompt": "<|video|>", "multi_modal_data": {"video": [noise(1), noise(2, 64, 50)]}}, "one size"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, GREEDY)


def test_a_tokenizer_without_the_token_leaves_videos_out() -> None:
    """Else whatever it calls a token that it does not know would stand for one."""
    found = []
    for names in ({VIDEO: "<|video|>"}, dict[int, str]()):
        tokenizer: Any = SimpleNamespace(backend=SimpleNamespace(id_to_token=names.get))
        pictures = Pictures(INFO, NAME, None, {}, tokenizer)
        found.append((pictures.kinds, pictures.placeholders.video))
    assert found == [(("image", "video"), VIDEO), (("image",), -1)]


def test_pictures_and_frames_are_told_apart() -> None:
    """They have tokens of their own, however equal what a tower makes of them."""
    ids, items = prompt_of(INFO, [5, film("gemma4", 1, 2), 6, picture("gemma4", 1), 7])
    runs = find_runs(INFO, ids, items)
    assert [(run.item, run.end - run.start, run.columns) for run in runs] == [(0, 2, 1), (1, 2, 1), (2, 8, 1)]
    with pytest.raises(InvalidRequestError, match="mixed up"):
        find_runs(INFO, [TOKEN if each == VIDEO else each for each in ids], items)
    with pytest.raises(InvalidRequestError, match="placeholders of media"):
        find_runs(INFO, ids[:4] + ids[5:], items)


def test_another_order_is_another_prefix() -> None:
    """Equal frames behind each other the other way round hit nothing; the same video does."""
    one = sighted("gemma4")
    core = build_engine(arguments(one.folder), progress=False)
    info, tail, shown = info_of(core), list(range(5, 25)), film("gemma4", 7, 3)
    back = Film(shown.pixels[::-1].copy(), 1.0)
    for number, (each, hit) in enumerate([(shown, False), (back, False), (shown, True)]):
        parts = [3, each, *tail]
        answer = run(core, [request(info, f"{number}", parts, max_tokens=4)])[f"{number}"]
        assert answer.token_ids == hf_greedy(one, info, parts, 4), number
        assert (answer.num_cached_tokens >= 16) == hit, number
    core.shutdown()
