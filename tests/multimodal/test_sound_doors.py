"""Recordings in prompts through ``LLM`` and over HTTP: what is asked reaches the model as transformers would hear it, or is
refused clearly."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from headway import LLM, AsyncLLM, SamplingParams
from headway.api.pictures.sounds import MAX_SOUND_BYTES
from headway.core.errors import InvalidRequestError
from headway.multimodal.audio.layout import fourth
from headway.multimodal.process import cut
from headway.server.app import build_app
from headway.server.settings import ServerSettings
from tests.multimodal import tiny_sight
from tests.multimodal.test_audio import HOSTILE, wav
from tests.multimodal.test_doors import GREEDY, noise, options, png
from tests.multimodal.tiny_sight import AUDIO, Sound, hf_answer, hf_inputs, sighted
from tests.server.children import Kept


def samples(seed: int, count: int) -> Any:
    """As a file of 16 bits holds them."""
    drawn = np.random.default_rng(seed).normal(0, 0.2, count).clip(-0.99, 0.99)
    return np.round(drawn * 2**15).astype(np.int16)


def heard(values: Any) -> Sound:
    return Sound(values.astype(np.float32) / 2**15)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(sighted("gemma4").folder, **options(max_model_len=250)) as found:
        yield found


def expected(llm: LLM | AsyncLLM, ids: list[int], parts: list[Any], count: int = 6) -> list[int]:
    """Greedy tokens of transformers for the prompt that the engine saw; ``parts``: ``Sound``s and pictures, in order."""
    pictures, info = llm._door.pictures, llm._door.info.vision
    assert pictures is not None and info is not None
    with pytest.MonkeyPatch.context() as patch:
        scale, shift = pictures.settings.affine()
        patch.setattr(tiny_sight, "SCALE", scale)
        patch.setattr(tiny_sight, "SHIFT", shift)
        cuts = [each if isinstance(each, Sound) else cut(each, pictures.settings).pixels for each in parts]
        _, given = hf_inputs(sighted("gemma4"), info, cuts)
    return hf_answer(sighted("gemma4"), ids, len(ids), [], given, count)


def test_text_with_recordings(llm: LLM) -> None:
    """Files, arrays at their own rate, and ids give the same prompt and the same answer; pictures lie between."""
    one, two, seen = samples(1, 5000), samples(2, 1700), noise(1)
    text = "a <|audio|> b <|image|> c <|audio|>?"
    prompt: Any = {"prompt": text, "multi_modal_data": {"audio": [(one, 16000), (two, 16000)], "image": seen}}
    files: Any = {"prompt": text, "multi_modal_data": {"audio": [file_of(one), file_of(two)], "image": [png(seen)]}}
    first, second = llm.generate([prompt, files], GREEDY)
    ids = first.prompt_token_ids
    rows = [fourth(each) for each in (31, 10)]
    assert ids.count(AUDIO) == sum(rows) and [106, *[AUDIO] * rows[0], 107] == ids[2 : 4 + rows[0]]
    [third] = llm.generate({"prompt_token_ids": ids, "multi_modal_data": prompt["multi_modal_data"]}, GREEDY)
    markers = [5, AUDIO, 7, tiny_sight.TOKEN, 8, AUDIO]
    [bare] = llm.generate({"prompt_token_ids": markers, "multi_modal_data": prompt["multi_modal_data"]}, GREEDY)
    assert second.prompt_token_ids == third.prompt_token_ids == ids
    assert bare.prompt_token_ids.count(AUDIO) == sum(rows)
    want = expected(llm, ids, [heard(one), seen, heard(two)])
    assert [each.outputs[0].token_ids for each in (first, second, third)] == [want] * 3
    own = bare.prompt_token_ids
    assert bare.outputs[0].token_ids == expected(llm, own, [heard(one), seen, heard(two)])


def file_of(values: Any) -> bytes:
    return wav(values.astype(np.float64) / (2**15 - 1))


def test_chat_with_recordings(llm: LLM) -> None:
    """In several messages, as OpenAI's parts and as ours; a marker in a user's text stays text."""
    one, two = samples(1, 5000), samples(2, 1700)
    data = base64.b64encode(file_of(two)).decode()
    messages: Any = [
        {"role": "user", "content": [{"type": "audio", "audio": (one, 16000)}, {"type": "text", "text": "<|audio|>?"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]},
    ]
    [output] = llm.chat(messages, GREEDY)
    ids = output.prompt_token_ids
    assert ids.count(106) == ids.count(107) == 2
    assert output.outputs[0].token_ids == expected(llm, ids, [heard(one), heard(two)])
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="no place for recordings"):
        llm.chat(messages[:1], GREEDY, chat_template=plain)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "none", "multi_modal_data": {"audio": (np.zeros(900), 16000)}}, "0 recording placeholders"),
        ({"prompt": "<|audio|><|audio|>", "multi_modal_data": {"audio": (np.zeros(900), 16000)}}, "2 recording"),
        ({"prompt": "<|audio|>"}, "1 placeholders"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"image": noise(1)}}, "image placeholders"),
        ({"prompt": "<|audio|>" * 9, "multi_modal_data": {"audio": [(np.zeros(900), 16000)] * 9}}, "at most 8"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": "/etc/passwd"}}, "got str"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": np.zeros(900)}}, "got ndarray"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": (np.zeros(900), "16k")}}, "sampling rate"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": ([[0.0], [0.0, 1.0]], 16000)}}, "equally long"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": (np.full(900, np.nan), 16000)}}, "no numbers"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": (np.zeros(100), 16000)}}, "100 samples"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": (np.zeros(65_000), 16000)}}, "at most 4 s"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": (np.zeros(10**6), 16000)}}, "at most 4 s"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": bytes(MAX_SOUND_BYTES + 1)}}, "bytes"),
        (
            {"prompt_token_ids": [5, AUDIO, AUDIO, AUDIO], "multi_modal_data": {"audio": (np.zeros(900), 16000)}},
            "placeholders",
        ),
    ],
)
def test_prompts_that_do_not_fit_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, GREEDY)


def test_models_that_only_see_say_so() -> None:
    with LLM(sighted("llava").folder, **options()) as seeing:
        with pytest.raises(InvalidRequestError, match="'audio' is not served; 'image' is"):
            seeing.generate({"prompt": "x", "multi_modal_data": {"audio": (np.zeros(900), 16000)}}, GREEDY)
        with pytest.raises(InvalidRequestError, match="not served"):
            seeing.chat([{"role": "user", "content": [{"type": "audio", "audio": (np.zeros(900), 16000)}]}], GREEDY)


def test_an_engine_of_its_own_process_hears() -> None:
    """What the door is told of recordings passes the channel."""
    llm = AsyncLLM(sighted("gemma4").folder, multiprocess=True, **options(max_model_len=250))
    try:
        one = samples(1, 5000)
        prompt: Any = {"prompt": "a <|audio|>", "multi_modal_data": {"audio": file_of(one)}}

        async def ask_once() -> Any:
            async for output in llm.generate(prompt, GREEDY, "r"):
                last = output
            return last

        output = asyncio.run(ask_once())
        assert output.outputs[0].token_ids == expected(llm, output.prompt_token_ids, [heard(one)])
    finally:
        llm.shutdown()


# -- over HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    llm = AsyncLLM(sighted("gemma4").folder, multiprocess=False, **options(max_model_len=250))
    with TestClient(build_app(llm, ServerSettings(allowed_hosts=["*"]))) as found:
        yield found


def part(data: bytes | str, **more: Any) -> dict[str, Any]:
    encoded = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav", **more}}


def ask(client: TestClient, *parts: dict[str, Any], **more: Any) -> Any:
    content = [*parts, {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 5, **more}
    return client.post("/v1/chat/completions", json=body)


def test_answers_are_those_of_llm(client: TestClient, llm: LLM) -> None:
    one = file_of(samples(1, 5000))
    answer = ask(client, part(one))
    assert answer.status_code == 200, answer.text
    content = [{"type": "audio", "audio": one}, {"type": "text", "text": "what?"}]
    [want] = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=5))
    assert answer.json()["choices"][0]["message"]["content"] == want.outputs[0].text
    assert answer.json()["usage"]["prompt_tokens"] == len(want.prompt_token_ids)
    body = {"input": [{"role": "user", "content": [part(one), {"type": "input_text", "text": "what?"}]}]}
    newer = client.post("/v1/responses", json={**body, "temperature": 0, "max_output_tokens": 5})
    assert newer.status_code == 200, newer.text
    assert newer.json()["output"][0]["content"][0]["text"] == want.outputs[0].text


def hostile() -> dict[str, Any]:
    """Name -> a part that must be refused; beside the files of ``test_audio``."""
    whole = file_of(samples(1, 5000))
    files = {name: part(data) for name, data in HOSTILE.items() if name != "too long"}
    return files | {
        "too long": part(wav(np.zeros(90_000))),
        "very long": part(wav(np.zeros(16000), 1000)),
        "too short": part(wav(np.zeros(100))),
        "not base64": part("@@@@"),
        "base64 cut short": part("abcde"),
        "a data URL": part("data:audio/wav;base64,AAAA"),
        "an address": part("http://127.0.0.1:1/a.wav"),
        "a path": part("file:///etc/passwd"),
        "another format": part(whole, format="exe"),
        "another field": part(whole, url="http://127.0.0.1:1/a.wav"),
        "no data": {"type": "input_audio", "input_audio": {"format": "wav"}},
        "nothing": {"type": "input_audio"},
        "text beside": {**part(whole), "text": "x"},
        "an image's type": {**part(whole), "type": "image_url"},
        "audio_url": {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/a.wav"}},
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_recordings_are_refused(client: TestClient, name: str) -> None:
    answer = ask(client, hostile()[name])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["param"], error
    assert "Traceback" not in answer.text and "/work" not in answer.text


def test_the_server_goes_on(client: TestClient) -> None:
    """After all of them, twice, a recording is answered as before, by the same processes, which have their memory back."""
    good = part(file_of(samples(1, 5000)))
    for bad in hostile().values():  # now each library is loaded
        ask(client, bad)
    before, kept = ask(client, good).json()["choices"], Kept("headway.api.pictures.sound_worker")
    for bad in [*hostile().values()] * 2:
        assert ask(client, bad).status_code == 400
    kept.check()
    assert ask(client, good).json()["choices"] == before


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_recordings_come_from_users(client: TestClient, role: str) -> None:
    message = {"role": role, "content": [part(file_of(samples(1, 5000)))], "tool_call_id": "x"}
    answer = client.post("/v1/chat/completions", json={"messages": [message]})
    assert answer.status_code == 400 and "users" in answer.json()["error"]["message"]


def test_as_many_as_are_allowed(client: TestClient) -> None:
    one = part(file_of(samples(1, 400)))
    assert ask(client, *[one] * 8).status_code == 200
    answer = ask(client, *[one] * 9)
    assert answer.status_code == 400 and "at most 8 recordings" in answer.json()["error"]["message"]


def test_the_page_is_told_what_a_conversation_takes(client: TestClient) -> None:
    """Most pictures and recordings, and the longest that is heard: a sample more is one too many."""
    media = client.get("/live/figures").json()["media"]
    assert (media["pictures"], media["recordings"]) == (32, 8)
    most = int(media["seconds"] * 16000)
    assert ask(client, part(file_of(samples(1, most)))).status_code == 200
    assert ask(client, part(file_of(samples(1, most + 1)))).status_code == 400
