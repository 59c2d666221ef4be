"""Videos: frames become parts, parts stand at times, and what is asked reaches the model as transformers would see it.

That models see videos as transformers does, chunked, cached, preempted and at every depth, is in ``test_engine`` and
``tests/sim/test_sight.py``, whose prompts have some.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headway import LLM
from headway.api.pictures.clips import MAX_FRAMES, make_parts, read_clips
from headway.core.errors import InvalidRequestError
from headway.core.media import MAX_RUNS, VisionInfo
from headway.engine.boot import build_engine
from headway.multimodal.items import find_runs, make_item
from headway.multimodal.process import ImageSettings, cut_clip
from tests.engine.harness import run
from tests.multimodal.test_doors import GREEDY, noise, options
from tests.multimodal.test_engine import info_of
from tests.multimodal.tiny_sight import (
    SCALE,
    SHIFT,
    TOKEN,
    VIDEO,
    VOCAB,
    Film,
    arguments,
    film,
    hf_inputs,
    picture,
    prompt_of,
    request,
    sighted,
)

VOLUME = ImageSettings(rule="volume", step=8, least=2048, most=65536)


@pytest.mark.parametrize(
    ("count", "height", "width", "expected"),
    [(4, 100, 60, (96, 64)), (5, 300, 200, (136, 88)), (3, 10, 40, (16, 56)), (2, 7, 7, (32, 32)),
     (9, 64, 64, (64, 64)), (16, 33, 301, (16, 192))],
)  # fmt: skip
def test_all_frames_share_the_pixels(count: int, height: int, width: int, expected: tuple[int, int]) -> None:
    """Sizes that Qwen3-VL's video processor gives."""
    frames = [Image.new("RGB", (width, height))] * count
    assert cut_clip(frames, VOLUME, 2).shape == (count + count % 2, *expected, 3)


def test_frames_of_several_sizes_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="one size"):
        cut_clip([noise(1), noise(2, 64, 50)], VOLUME, 2)


def test_parts_and_their_times() -> None:
    """An odd frame counts twice; with a tempo parts are as far apart as their seconds."""
    frames = [noise(i) for i in range(5)]
    info = VisionInfo(patch=4, group=2, token=TOKEN, video_token=VIDEO, frames=2, tempo=3.0, rotates_by_place=True)
    parts = make_parts(info, frames, VOLUME, 4.0, range(5))
    assert [item.late for item in parts.items] == [-1, 1, 3]  # 1.5 positions a part
    assert parts.seconds == [0.125, 0.625, 1.0]
    twice = make_parts(info, [*frames, frames[-1]], VOLUME, 4.0, range(6))
    assert [a.key for a in twice.items] == [b.key for b in parts.items]


def places(info: VisionInfo, parts: list[Any]) -> torch.Tensor:
    """[3, T]: time, row and column of each token, by the rule: what comes behind a video begins behind its last moment."""
    found: list[tuple[int, int, int]] = []
    free = 0
    for part in parts:
        if isinstance(part, int):
            found.append((free,) * 3)
            free += 1
            continue
        times = [int(k * part.apart) for k in range(len(part.pixels) // 2)] if isinstance(part, Film) else [0]
        pixels = part.pixels if isinstance(part, Film) else part
        rows, columns = (side // info.patch // info.group for side in pixels.shape[1:3])
        found += [(free + t, free + y, free + x) for t in times for y in range(rows) for x in range(columns)]
        free = 1 + max(max(place) for place in found)
    return torch.tensor(found).T


@torch.no_grad()
def test_time_may_take_more_positions_than_the_picture() -> None:
    """Text goes on behind the last moment; that is what Qwen2.5-VL was trained with."""
    one = sighted("qwen2.5")
    core = build_engine(arguments(one.folder), progress=False)
    info = info_of(core)
    parts = [5, film("qwen2.5", 6, 3, 4.5), 7, picture("qwen2.5", 1), 8, 9]
    asked = request(info, "r", parts, max_tokens=1, prompt_logprobs=VOCAB - 1)
    answer = run(core, [asked])["r"]
    core.shutdown()
    assert answer.error is None
    ids, given = hf_inputs(one, info, parts)
    where = places(info, parts)
    assert where[0, -3] == 12, "time decides, not three columns"
    logits = one.model(input_ids=torch.tensor([ids]), position_ids=where[:, None], use_cache=False, **given).logits[0]
    expected = logits.float().log_softmax(-1)
    for (tokens, values, _), row in zip(answer.prompt_logprobs, expected[:-1], strict=True):
        np.testing.assert_allclose(values, row[torch.tensor(tokens)], atol=1e-3)


def test_equal_frames_at_another_tempo_are_another_prefix() -> None:
    one = sighted("qwen2.5")
    core = build_engine(arguments(one.folder), progress=False)
    info, tail = info_of(core), list(range(5, 25))
    found = []
    for number, apart in enumerate([1.0, 2.0, 1.0]):
        parts = [3, film("qwen2.5", 7, 3, apart), *tail]
        answer = run(core, [request(info, f"{number}", parts, max_tokens=1)])[f"{number}"]
        found.append(answer.num_cached_tokens)
    core.shutdown()
    assert found[0] == 0 and found[1] <= 8 and found[2] >= 32, found


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_text_with_pictures_and_videos(name: str) -> None:
    """They stand where the text has them, whatever order they were given in; files of ids give the same."""
    frames = np.random.default_rng(3).integers(0, 256, (5, 24, 40, 3), np.uint8)
    text = "see <boi><|video_pad|><eoi> and <boi><|image_pad|><eoi> and <boi><|video_pad|><eoi>?"
    videos = [frames, ([Image.fromarray(each) for each in frames[:4]], {"fps": 4.0})]
    with LLM(sighted(name).folder, **options()) as llm:
        data = {"image": noise(1), "video": videos}
        prompt: Any = {"prompt": text, "multi_modal_data": data}
        [first] = llm.generate(prompt, GREEDY)
        ids = first.prompt_token_ids
        encode = llm.get_tokenizer().encode
        bare = encode(text, add_special_tokens=False)
        assert bare.count(VIDEO) == 2
        for again in (ids, bare):
            prompt = {"prompt_token_ids": again, "multi_modal_data": data}
            [other] = llm.generate(prompt, GREEDY)
            assert other.prompt_token_ids == ids and other.outputs[0].token_ids == first.outputs[0].token_ids
        door, info = llm._door.pictures, llm.model_info.vision
        assert door is not None and info is not None and door._clips is not None
        settings = door._clips.images
        seen = [cut_clip([Image.fromarray(each) for each in some], settings, 2) for some in (frames, frames[:4])]
        rows = [each.shape[1] * each.shape[2] // 64 for each in seen]
        if name == "qwen3":
            stamps = [["<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>"], ["<0.1 seconds>", "<0.6 seconds>"]]
            shown = [
                [
                    token
                    for stamp in some
                    for token in [*encode(stamp, add_special_tokens=False), 101, *[VIDEO] * n, 102]
                ]
                for some, n in zip(stamps, rows, strict=True)
            ]
        else:
            shown = [[101, *[VIDEO] * n * parts, 102] for n, parts in zip(rows, (3, 2), strict=True)]
        part = {"type": "video", "video": videos[1]}
        [talk] = llm.chat([{"role": "user", "content": [part, {"type": "image", "image": noise(1)}]}], GREEDY)
        assert talk.prompt_token_ids[6 : 6 + len(shown[1])] == shown[1] and TOKEN in talk.prompt_token_ids
        with pytest.raises(InvalidRequestError, match="no place for videos"):
            plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
            llm.chat([{"role": "user", "content": [part]}], GREEDY, chat_template=plain)
        told, behind = ids.index(101) if name != "qwen3" else ids.index(shown[0][0], 4), len(shown[0])
        assert ids[told : told + behind] == shown[0]
        assert ids[-1 - len(shown[1]) : -1] == shown[1]


def test_a_video_is_read_as_the_engine_was_told() -> None:
    """Parts of a prompt that the door made are those that the engine's own test makes."""
    info = VisionInfo(patch=4, group=2, token=TOKEN, video_token=VIDEO, frames=2, rotates_by_place=True)
    ids, items = prompt_of(info, [5, film("qwen2", 1, 3), 6, picture("qwen2", 1), 7])
    runs = find_runs(info, ids, items)
    assert [(run.start, run.end, run.base, run.late) for run in runs] == [
        (1, 7, 1, 0), (7, 13, 1, 1), (13, 19, 1, 2), (20, 35, 5, 0)
    ]  # fmt: skip
    assert all(a.end <= b.start for a, b in pairwise(runs))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (noise(1), "a video must be"),
        (np.zeros((24, 40, 3), np.uint8), "a video must be"),
        ([b"file", b"file"], "an image must be"),
        ([noise(1)], "1 frames"),
        (([noise(1), noise(2)], {"fps": 0}), "fps"),
        (([noise(1), noise(2)], {"fps": "2"}), "fps"),
        (([noise(1), noise(2)], {"total_num_frames": 4}), "'total_num_frames'"),
        ([noise(1), noise(2)] * MAX_FRAMES, f"{MAX_FRAMES} are possible"),
    ],
)
def test_other_things_are_refused(data: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        if message.startswith("an image"):
            from headway.api.pictures.door import _picture

            _picture(read_clips(data)[0].frames[0])
        read_clips(data)


def test_videos_that_do_not_fit_are_refused() -> None:
    info = VisionInfo(patch=4, group=2, token=TOKEN, video_token=VIDEO, frames=2, tempo=4.0, rotates_by_place=True)
    ids, items = prompt_of(info, [5, film("qwen2.5", 1, 2, 50.0), 6])
    with pytest.raises(InvalidRequestError, match="higher fps"):
        find_runs(info, ids, items)
    with pytest.raises(InvalidRequestError, match="side by side"):
        find_runs(info, [*ids[:7], 9, *ids[7:]], items)
    swapped = [TOKEN if each == VIDEO else each for each in ids]
    with pytest.raises(InvalidRequestError, match="mixed up"):
        find_runs(info, swapped, items)
    tiny = np.zeros((2, 8, 8, 3), np.uint8)
    many = [make_item(info, tiny, SCALE, SHIFT, kind="video", frames=2, late=k or -1) for k in range(MAX_RUNS + 1)]
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_RUNS}"):
        find_runs(info, [VIDEO] * len(many), many)
