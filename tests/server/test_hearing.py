"""/v1/audio/transcriptions and /v1/audio/translations over a tiny Whisper; every wrong form is a clear 4xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headway import AsyncLLM
from headway.api.hearing import online
from headway.multimodal.audio.decode import RATE
from headway.server.app import build_app
from headway.server.settings import ServerSettings
from tests.api import tiny_whisper as tiny
from tests.multimodal.test_audio import HOSTILE, wav
from tests.server.children import Kept

GRANULARITIES = "timestamp_granularities[]"
TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    _, folder = tiny.make(tmp_path_factory.mktemp("whisper"))
    llm = AsyncLLM(folder, multiprocess=False, dtype="float32", device="cpu", kv_cache_memory_bytes=2**22)
    settings = ServerSettings(
        allowed_hosts=["*"], served_model_name=["ear"], max_audio_seconds=4.0, max_audio_bytes=2**20
    )
    with TestClient(build_app(llm, settings), raise_server_exceptions=False) as made:
        yield made
    llm.shutdown()


def post(client: TestClient, path: str = TRANSCRIBE, data: bytes | None = None, more: Any = None, **fields: Any) -> Any:
    audio = wav(tiny.sounds(1.7, 2)) if data is None else data
    return client.post(path, files={"file": ("a.wav", audio)}, data={"model": "ear", **fields, **(more or {})})


def test_every_format_says_the_same(client: TestClient) -> None:
    whole = post(client, response_format="verbose_json", more={GRANULARITIES: "segment"}).json()
    assert whole["duration"] == pytest.approx(1.7) and whole["language"] in ("en", "de")
    assert whole["text"] == "".join(each["text"] for each in whole["segments"]).strip()
    times = [time for each in whole["segments"] for time in (each["start"], each["end"])]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 1.7
    srt, vtt = (post(client, response_format=name).text for name in ("srt", "vtt"))
    assert srt.count("-->") == vtt.count("-->") == len(whole["segments"]) and vtt.startswith("WEBVTT")
    plain = post(client).json()
    assert set(plain) == {"text", "usage"} and post(client, response_format="text").text == plain["text"] + "\n"
    assert post(client, TRANSLATE).status_code == 200
    assert post(client, language="de", prompt="Before.", temperature="0.4", seed="3").status_code == 200


@pytest.mark.parametrize("previous", [False, True])
def test_words_have_times(client: TestClient, previous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several windows, with and without segments; one behind the other or side by side they are the same."""
    if previous:
        monkeypatch.setattr("headway.api.hearing.online._side_by_side", one_by_one)
    timed: dict[str, Any] = {"response_format": "verbose_json", "language": "en"}
    both = post(client, more={GRANULARITIES: ["word", "segment"]}, **timed).json()
    words = post(client, more={GRANULARITIES: "word"}, **timed).json()
    assert "segments" not in words and words["text"] == both["text"] and words["words"] == both["words"]
    assert set(both["words"][0]) == {"word", "start", "end"} and len(both["words"]) > 5
    times = [each["start"] for each in both["words"]]
    assert times == sorted(times) and times[0] >= 0 and both["words"][-1]["end"] <= 1.7
    shown = "".join(each["word"] for each in both["words"])
    assert "".join(shown.split()) == "".join("".join(each["text"] for each in both["segments"]).split())
    segment = post(client, more={GRANULARITIES: "segment"}, **timed).json()
    assert "words" not in segment and segment["segments"] == both["segments"]


async def one_by_one(recording: online.Recording) -> Any:
    """Windows that are not given each other's text, in order."""
    for number in range(len(recording.spans)):
        async for found in online._window(recording, number, ()):
            yield number, *found


def test_a_model_on_several_ranks_refuses_words(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.core.hearing import HearingInfo

    hearing: HearingInfo = client.app.state.service.hearing.transcriber.hearing  # type: ignore[attr-defined]
    monkeypatch.setattr(hearing, "aligns", False)
    answer = post(client, response_format="verbose_json", more={GRANULARITIES: "word"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == GRANULARITIES


def test_windows_that_go_wrong_are_asked_again(client: TestClient) -> None:
    """Random weights go wrong at every temperature; a stream then has whole windows."""
    fields: dict[str, Any] = {"temperature_fallback": "true", "temperature": "0.8", "seed": "3", "language": "en"}
    whole = post(client, response_format="verbose_json", **fields).json()
    assert whole["segments"] and {each["temperature"] for each in whole["segments"]} == {1.0}
    untimed = post(client, **fields).json()["text"]
    streamed = [json.loads(line[6:]) for line in post(client, stream="true", **fields).text.split("\n\n")[:-2]]
    assert streamed[-1]["text"].strip() == untimed


def test_a_stream_gives_the_same_text(client: TestClient) -> None:
    answer = post(client, stream="true")
    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    *deltas, done = [json.loads(line) for line in lines[:-1]]
    assert {each["type"] for each in deltas} == {"transcript.text.delta"} and done["type"] == "transcript.text.done"
    assert "".join(each["delta"] for each in deltas) == done["text"]
    assert done["text"].strip() == post(client).json()["text"]


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(client: TestClient, kind: str) -> None:
    answer = post(client, data=HOSTILE[kind])
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["message"]


def test_the_server_goes_on(client: TestClient) -> None:
    """After all of them, twice, a recording is heard as before, by the same processes, which have their memory back."""
    for data in HOSTILE.values():  # now each library is loaded
        post(client, data=data)
    expected, kept = post(client, language="en").json(), Kept("headway.api.hearing.decode_child")
    for data in [*HOSTILE.values()] * 2:
        assert post(client, data=data).status_code in (400, 413)
    kept.check()
    assert post(client, language="en").json() == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"model": "other"}, "model"), ({"language": "xx"}, "language"), ({"temperature": "hot"}, "temperature"),
     ({"temperature": "2"}, "temperature"), ({"response_format": "xml"}, "response_format"), ({"stream": "maybe"}, "stream"),
     ({"stream": "true", "response_format": "srt"}, "stream"), ({GRANULARITIES: "word"}, GRANULARITIES),
     ({GRANULARITIES: "letter", "response_format": "verbose_json"}, GRANULARITIES),
     ({"stream": "true", "response_format": "verbose_json", GRANULARITIES: "word"}, "stream"),
     ({GRANULARITIES: "segment"}, GRANULARITIES), ({"beam": "3"}, "beam"),
     ({"seed": "x"}, "seed"), ({"prompt": "x" * 9000}, "prompt")],
)  # fmt: skip
def test_wrong_fields_are_named(client: TestClient, fields: dict[str, str], param: str) -> None:
    answer = post(client, more=fields)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param


def part(name: str, value: bytes, file: bool = False) -> bytes:
    more = b'; filename="a"' if file else b""
    return (
        b'--b\r\nContent-Disposition: form-data; name="' + name.encode() + b'"' + more + b"\r\n\r\n" + value + b"\r\n"
    )


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [("application/json", b"{}", 415), ("multipart/form-data", b"x", 400), ("multipart/form-data; boundary=b", b"", 400),
     ("multipart/form-data; boundary=b", part("file", b"x", file=True), 400),
     ("multipart/form-data; boundary=b", part("model", b"ear") + b"--b--\r\n", 400),
     ("multipart/form-data; boundary=b", b"--b\r\n\r\n--b--\r\n", 400),
     ("multipart/form-data; boundary=b", part("file", b"x", file=True) * 2 + b"--b--\r\n", 400),
     ("multipart/form-data; boundary=b", part("model", b"\xff") + b"--b--\r\n", 400),
     ("multipart/form-data; boundary=b", part("prompt", b"x") * 70 + b"--b--\r\n", 400),
     ("multipart/form-data; boundary=b", part("prompt", bytes(70_000)) + b"--b--\r\n", 400),
     ("multipart/form-data; boundary=b", bytes(2**20 + 1), 413)],
)  # fmt: skip
def test_broken_forms_are_refused(client: TestClient, kind: str, body: bytes, status: int) -> None:
    answer = client.post(TRANSCRIBE, content=body, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text


def test_a_recording_that_is_too_long_is_refused(client: TestClient) -> None:
    answer = post(client, data=wav(tiny.sounds(4.2)))
    assert answer.status_code == 400 and "4 s" in answer.json()["error"]["message"]


def test_a_body_that_is_too_long_names_its_option(client: TestClient) -> None:
    answer = post(client, data=bytes(2**20))
    assert answer.status_code == 413 and "--max-audio-bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", ["false", "true"])
def test_samples_of_all_recordings_are_bounded(
    client: TestClient, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file may hold a long recording; one alone may always be heard."""
    hearing: Any = client.app.state.service.hearing  # type: ignore[attr-defined]
    monkeypatch.setattr("headway.server.hearing.hearing.MAX_HELD_BYTES", 4 * RATE)
    assert post(client, stream=stream).status_code == 200
    with hearing.hold(8):
        answer = post(client, stream=stream)
        assert (
            answer.status_code == 503 and answer.json()["error"]["code"] == "busy" and "Retry-After" in answer.headers
        )
    assert post(client, stream=stream).status_code == 200


def test_conversations_do_not_hear(client: TestClient) -> None:
    """Not even where the model does: the error says where recordings go."""
    talk = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]
    answer = client.post("/v1/chat/completions", json={"messages": talk})
    assert answer.status_code == 400 and TRANSCRIBE in answer.json()["error"]["message"]


def test_models_without_hearing_say_so(parrot_llm: AsyncLLM) -> None:
    with TestClient(build_app(parrot_llm, ServerSettings(allowed_hosts=["*"]))) as client:
        answer = client.post(TRANSCRIBE, files={"file": ("a.wav", b"x")})
        assert answer.status_code == 400 and "hear" in answer.json()["error"]["message"]
        talk = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]
        answer = client.post("/v1/chat/completions", json={"messages": talk})
        assert answer.status_code == 400 and "input_audio" in answer.json()["error"]["message"]
