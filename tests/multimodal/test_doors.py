"""Pictures through ``LLM`` and the server: what is asked reaches the model as transformers would see it, or is refused
clearly."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import processors

from headway import LLM, AsyncLLM, SamplingParams
from headway.api.pictures.placeholders import Placeholders, Shown
from headway.core.errors import InvalidRequestError
from headway.multimodal.process import cut
from tests.multimodal import tiny_sight
from tests.multimodal.tiny_sight import FAMILIES, TOKEN, VIDEO, arguments, hf_answer, hf_inputs, sighted
from tests.multimodal.tiny_texts import marker_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def options(**others: Any) -> dict[str, Any]:
    args = arguments("", skip_tokenizer_init=False, **others)
    names = ("dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_logprobs")
    return {name: getattr(args, name) for name in (*names, "kv_cache_memory_bytes")} | others


def noise(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def llava() -> Iterator[LLM]:
    with LLM(sighted("llava").folder, **options()) as llm:
        yield llm


TILED = {"smolvlm": 5, "internvl": 4}
"""Families that cut pictures, and the least number of tiles, the whole picture among them, that ``noise(1)`` becomes."""


@pytest.mark.parametrize("name", FAMILIES)
def test_text_with_pictures(name: str) -> None:
    """Expanded, tokenised, prepared and answered; a file gives what the picture gives, and so does a prompt of ids."""
    _, marker = marker_of(name)
    one, two = noise(1), noise(2, 64, 50)
    text = f"see {marker} and {marker}?"
    sizes = {"max_model_len": 250} if name == "smolvlm" else {}
    with LLM(sighted(name).folder, **options(**sizes)) as llm:
        prompt: Any = {"prompt": text, "multi_modal_data": {"image": [one, two]}}
        files: Any = {"prompt": text, "multi_modal_data": {"image": [png(one), png(two)]}}
        first, second = llm.generate([prompt, files], GREEDY)
        ids = first.prompt_token_ids
        again: Any = {"prompt_token_ids": ids, "multi_modal_data": {"image": [one, two]}}
        [third] = llm.generate(again, GREEDY)
        assert third.prompt_token_ids == second.prompt_token_ids == ids
        assert llm._door.pictures is not None
        tiles = cut(one, llm._door.pictures.settings).pixels
        assert len(tiles) >= TILED.get(name, 1) and (name != "mistral3" or tiles.shape[1] != tiles.shape[2])
        expected = hf_with_affine(llm, name, ids, [one, two])
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids == expected


def hf_with_affine(llm: LLM, name: str, ids: list[int], images: list[Image.Image]) -> list[int]:
    """Greedy tokens of transformers for the prompt that the engine saw, wherever its placeholders lie."""
    pictures, info = llm._door.pictures, llm.model_info.vision
    assert pictures is not None and info is not None
    tiles = [cut(image, pictures.settings).pixels for image in images]
    scale, shift = pictures.settings.affine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_sight, "SCALE", scale)
        patch.setattr(tiny_sight, "SHIFT", shift)
        _, given = hf_inputs(sighted(name), info, tiles)
    return hf_answer(sighted(name), ids, len(ids), [], given, 6)


def test_chat_with_pictures_in_several_messages(llava: LLM) -> None:
    one, two = noise(1), noise(2, 64, 50)
    url = "data:image/png;base64," + base64.b64encode(png(two)).decode()
    messages: Any = [
        {"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": "one?"}]},
        {"role": "assistant", "content": "yes"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "two?"}, {"type": "image_url", "image_url": {"url": url}}],
        },
    ]
    [output] = llava.chat(messages, GREEDY)
    ids = output.prompt_token_ids
    assert output.outputs[0].token_ids == hf_with_affine(llava, "llava", ids, [one, two])
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    [shown] = llava.chat(messages[:1], GREEDY, chat_template=plain)
    assert shown.prompt_token_ids == [TOKEN] * 16 + llava.get_tokenizer().encode("\none?", add_special_tokens=False)


def test_a_message_cannot_spell_a_picture(llava: LLM) -> None:
    """A marker in a user's text stays text."""
    [output] = llava.chat([{"role": "user", "content": [{"type": "text", "text": "<image>"}]}], GREEDY)
    assert TOKEN not in output.prompt_token_ids
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "<image>"}, {"type": "image", "image": noise(1)}]}
    ]
    [output] = llava.chat(messages, GREEDY)
    assert output.prompt_token_ids.count(TOKEN) == 16


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "none", "multi_modal_data": {"image": noise(1)}}, "0 image placeholders"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": noise(1)}}, "2 image placeholders"),
        ({"prompt": "<image>"}, "1 placeholders"),
        ({"prompt": "<image>", "multi_modal_data": {"image": []}}, "1 image placeholders"),
        ({"prompt": "x", "multi_modal_data": {"video": noise(1)}}, "'video'"),
        ({"prompt": "x", "multi_modal_data": noise(1)}, "dictionary"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "file:///etc/passwd"}}, "got str"),
        ({"prompt": "<image>" * 40, "multi_modal_data": {"image": [noise(1)] * 40}}, "at most 32"),
        ({"prompt_token_ids": [5, TOKEN, TOKEN], "multi_modal_data": {"image": noise(1)}}, "2 image placeholders"),
        ({"prompt_token_ids": [5] + [TOKEN] * 17}, "17 placeholders"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(llava: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llava.generate(prompt, GREEDY)


def test_a_model_without_sight_refuses_pictures() -> None:
    with LLM(dtype="float32", device="cpu", max_model_len=64, max_num_seqs=2) as llm:
        with pytest.raises(InvalidRequestError, match="sees no pictures"):
            llm.generate({"prompt": "x", "multi_modal_data": {"image": noise(1)}}, GREEDY)
        with pytest.raises(InvalidRequestError, match="sees no pictures"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": noise(1)}]}], GREEDY)


@pytest.mark.parametrize("name", ["llava", "paligemma"])
def test_both_doors_read_a_prompt_alike(name: str) -> None:
    """With a tokenizer that begins texts with a token, whoever asks for that or not, and with pictures or without."""
    _, marker = marker_of(name)
    llm = AsyncLLM(sighted(name).folder, multiprocess=False, **options())
    try:
        backend, first = llm.get_tokenizer().backend, 5
        backend.post_processor = processors.TemplateProcessing(
            single=f"{backend.id_to_token(first)}:0 $A:0", special_tokens=[(backend.id_to_token(first), first)]
        )
        data = {"multi_modal_data": {"image": noise(1)}}
        prompts: list[Any] = ["see it", {"prompt": "see it"}, {"prompt": f"{marker}see"} | data]
        for prompt, special in itertools.product(prompts, (True, False)):
            beside = asyncio.run(llm._prepare(prompt, GREEDY, {"add_special_tokens": special}))
            at_once = llm._door.prepare(prompt, GREEDY, add_special_tokens=special)
            ids = at_once.children[0].prompt_token_ids
            assert beside.children[0].prompt_token_ids == ids
            own = (
                name == "paligemma" and isinstance(prompt, dict) and len(prompt) == 2
            )  # its form brings the first token
            assert ids.count(first) == (special and not own)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("fences", [(), (101, 102)])
def test_ids_with_and_without_all_placeholders_mean_the_same(fences: tuple[int, ...]) -> None:
    """A picture alone, videos alone, both, and none."""
    own = Placeholders("same", TOKEN, TOKEN, (), 8, video=VIDEO, fences=fences)
    for picture, *clips in itertools.product((0, 1, 3), (0, 1, 4), (0, 2)):
        shown = [Shown(TOKEN, [TOKEN] * picture)] if picture else []
        shown += [own.of_clip([rows], [0.5]) for rows in clips if rows]
        bare, whole = [7], [7]
        for rows, marker in zip((picture, *clips), (TOKEN, VIDEO, VIDEO), strict=True):
            around = fences if marker == VIDEO and rows else ()
            stamp = [50] if around else []
            bare += [*around[:1], *[marker] * (rows > 0), *around[1:], 8]
            whole += [*stamp, *around[:1], *[marker] * rows, *around[1:], 8]
        order = list(range(len(shown)))
        assert own.into_ids(bare, shown, lambda _: [50]) == (whole, order)
        if picture + sum(clips) != len(shown):  # a row each: they look like what has none yet
            assert own.into_ids(whole, shown, lambda _: [50]) == (whole, order)
