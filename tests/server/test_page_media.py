"""The live page with pictures and recordings: chosen, pasted, dropped and recorded in a real browser; offered only where the
model takes them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from headway import AsyncLLM
from headway.multimodal.audio.decode import decode_audio
from headway.multimodal.audio.wav import Floats
from headway.server.app import build_app
from headway.server.page import assemble
from headway.server.settings import ServerSettings
from tests.api import tiny_whisper
from tests.multimodal.test_audio import wav
from tests.multimodal.test_doors import noise, options, png
from tests.multimodal.tiny_sight import sighted
from tests.server import chromium
from tests.server.serving import Served
from tests.server.test_page import check_clean

FILE = """
const bytes = Uint8Array.from(atob("{data}"), c => c.charCodeAt(0));
const given = new DataTransfer();
given.items.add(new File([bytes], "{name}", {{ type: "{kind}" }}));
"""


class Heard:
    """An app, and the bodies of what it was asked to do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.bodies = app, list[bytes]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []

        async def listened() -> Any:
            message = await receive()
            parts.append(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body") and scope["method"] == "POST":
                self.bodies.append(b"".join(parts))
            return message

        await self._app(scope, listened, send)


@contextmanager
def visited(llm: AsyncLLM, tmp_path: Path) -> Iterator[tuple[chromium.Browser, Heard]]:
    path = chromium.find()
    if path is None:
        pytest.skip("no chromium on this machine")
    app = Heard(build_app(llm, ServerSettings(allowed_hosts=["*"], served_model_name=["tiny"])))
    try:
        with Served(app) as address, chromium.Browser(path, tmp_path / "profile", (1400, 900)) as browser:  # type: ignore[arg-type]
            browser.open(address)
            browser.until("document.querySelector('#state').innerText === 'ready'")
            yield browser, app
            check_clean(browser, address)
    finally:
        llm.shutdown()


def give(browser: chromium.Browser, data: bytes, name: str, kind: str, then: str) -> None:
    """Run ``then`` with a ``DataTransfer`` named given that holds the file."""
    source = FILE.format(data=base64.b64encode(data).decode(), name=name, kind=kind)
    browser.evaluate(f"(() => {{ {source} {then} }})()")


def chosen(field: str) -> str:
    return f"const f = document.querySelector('{field}'); f.files = given.files; f.dispatchEvent(new Event('change'));"


PASTED = """document.querySelector("#prompt").dispatchEvent(
  new ClipboardEvent("paste", { clipboardData: given, bubbles: true, cancelable: true }));"""
DROPPED = """document.querySelector("#chat").dispatchEvent(
  new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));"""


def shots(browser: chromium.Browser, tmp_path: Path, name: str) -> None:
    """What a person sees: wide and narrow, light and dark; nothing wider than the window."""
    for theme in ("light", "dark"):
        for width in (1400, 375):
            browser.resize(width, 900)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert len(browser.screenshot(tmp_path / f"{name}-{theme}-{width}.png")) > 10_000
        browser.click("#theme")
    browser.resize(1400, 900)


def num_attached(browser: chromium.Browser) -> str:
    return "document.querySelectorAll('#attached img').length"


@pytest.mark.slow
def test_pictures_are_chosen_pasted_dropped_and_sent(tmp_path: Path) -> None:
    llm = AsyncLLM(sighted("llava").folder, multiprocess=False, **options())
    with visited(llm, tmp_path) as (browser, app):
        count = num_attached(browser)
        assert browser.evaluate(
            "document.querySelector('#add-sound').hidden && document.querySelector('#record').hidden"
        )
        assert not browser.evaluate("document.querySelector('#add-picture').hidden")
        one = png(noise(1))
        give(browser, one, "a.png", "image/png", chosen("#picture-file"))
        browser.until(f"{count} === 1")
        give(browser, one, "b.png", "image/png", PASTED)
        browser.until(f"{count} === 2")
        give(browser, one, "c.png", "image/png", DROPPED)
        browser.until(f"{count} === 3")
        give(browser, b"nothing", "d.wav", "audio/wav", DROPPED)
        browser.until("document.querySelector('#complaint').innerText.includes('d.wav')")
        browser.click(".thumb button")
        browser.until(f"{count} === 2")
        browser.evaluate("document.querySelector('#max_tokens').value = 8")
        shots(browser, tmp_path, "attached")
        browser.click("#prompt")
        browser.type("What is this?")
        browser.click("#send")
        browser.until("document.querySelector('.assistant .about')")
        assert browser.evaluate("document.querySelectorAll('.user .shown img').length") == 2
        assert browser.evaluate(count) == 0 and not browser.evaluate("document.querySelector('.turn .problem')")
        sent = app.bodies[-1]
        assert sent.count(base64.b64encode(one)) == 2 and b'"What is this?"' in sent
        shots(browser, tmp_path, "sent")


MICROPHONE = """
navigator.mediaDevices.getUserMedia = async () => {
  const context = window.microphone = new AudioContext();
  const source = context.createOscillator(), end = context.createMediaStreamDestination();
  source.connect(end);
  source.start();
  return end.stream;
};"""
LATE = "const after = setTimeout; window.setTimeout = (f, ms) => after(f, ms > 2000 ? ms + 400 : ms);"
"""Recorders end later than they were told to."""
RECORD, SENT = "document.querySelector('#record')", "document.querySelector('.assistant .about')"
CHIPS = "[...document.querySelectorAll('#attached .chip')].map(chip => chip.innerText.replace(/\\s+/g, ' '))"


def heard(data: str) -> Floats:
    """Samples of a recording in base64."""
    return decode_audio(base64.b64decode(data), most_seconds=9)


@pytest.mark.slow
def test_recordings_go_with_a_message(tmp_path: Path) -> None:
    """Chosen, dropped and recorded beside a picture, where the model hears in conversations; what it cannot take is refused
    before anything is sent."""
    llm = AsyncLLM(sighted("gemma4").folder, multiprocess=False, **options(max_model_len=250))
    pictures = llm.pictures
    assert pictures is not None and pictures.sounds is not None
    longest, count = pictures.sounds.longest_seconds, "document.querySelectorAll('#attached .chip').length"
    complaint = "document.querySelector('#complaint').innerText"
    with visited(llm, tmp_path) as (browser, app):
        for button in ("#add-picture", "#add-sound", "#record"):
            assert not browser.evaluate(f"document.querySelector('{button}').hidden")
        one = wav(tiny_whisper.sounds(1.7, 2))
        give(browser, one, "a.wav", "audio/wav", chosen("#sound-file"))
        browser.until(f"{count} === 1")
        give(browser, png(noise(1)), "b.png", "image/png", PASTED)
        browser.until(f"{num_attached(browser)} === 1")
        give(browser, wav(tiny_whisper.sounds(longest + 0.5, 2)), "long.wav", "audio/wav", DROPPED)
        browser.until(f"{complaint}.includes('long.wav lasts')")
        assert f"up to {int(longest)} s" in browser.evaluate(complaint) and browser.evaluate(count) == 1
        browser.evaluate(MICROPHONE)
        browser.click("#record")
        browser.until(f"{RECORD}.innerText === 'End recording'")
        browser.click("#prompt")
        browser.type("What is said?")
        browser.click("#send")
        browser.until(f"{complaint} === 'End the recording first'")
        browser.until("window.microphone.currentTime > 0.3")
        browser.click("#record")
        browser.until(f"{count} === 2")
        names = browser.evaluate(CHIPS)
        assert names[0] == "a.wav 1.7 s" and names[1].startswith("Your recording 0."), names
        browser.evaluate("document.querySelector('#max_tokens').value = 4")
        shots(browser, tmp_path, "heard-attached")
        browser.click("#send")
        browser.until(SENT)
        assert browser.evaluate("document.querySelectorAll('.user .shown :is(.chip, img)').length") == 3
        assert browser.evaluate(count) == 0 and not browser.evaluate("document.querySelector('.turn .problem')")
        [message] = json.loads(app.bodies[-1])["messages"]
        kinds = [part["type"] for part in message["content"]]
        assert kinds == ["input_audio", "image_url", "input_audio", "text"]
        files = [part["input_audio"] for part in message["content"] if part["type"] == "input_audio"]
        sounds = [heard(each["data"]) for each in files]
        assert all(each["format"] == "wav" for each in files) and len(sounds[0]) == int(1.7 * 16000)
        assert np.abs(sounds[1]).max() > 0.5, "the microphone's tone"
        np.testing.assert_allclose(sounds[0], decode_audio(one, most_seconds=9), atol=1e-4)
        shots(browser, tmp_path, "heard-sent")


@pytest.mark.slow
def test_a_conversation_takes_as_many_recordings_as_the_server_does(tmp_path: Path) -> None:
    """Those of earlier messages count, as they are sent again; one's own ends where the model hears no further."""
    limits = {"image": 0, "audio": 2}
    llm = AsyncLLM(
        sighted("gemma4").folder, multiprocess=False, **options(max_model_len=250, limit_mm_per_prompt=limits)
    )
    count = "document.querySelectorAll('#attached .chip').length"
    pictures = llm.pictures
    assert pictures is not None and pictures.sounds is not None
    longest = pictures.sounds.longest_seconds
    with visited(llm, tmp_path) as (browser, app):
        assert browser.evaluate("document.querySelector('#add-picture').hidden")
        browser.evaluate(MICROPHONE + LATE + "document.querySelector('#max_tokens').value = 3")
        browser.click("#record")  # ends by itself
        browser.until(f"{count} === 1")
        browser.click("#send")
        browser.until(SENT)
        one = wav(tiny_whisper.sounds(0.4, 1))
        give(browser, one, "a.wav", "audio/wav", PASTED)
        browser.until(f"{count} === 1")
        give(browser, one, "b.wav", "audio/wav", PASTED)
        browser.until("document.querySelector('#complaint').innerText === 'A conversation takes up to 2 recordings'")
        browser.click(".thumb button")
        browser.until(f"{count} === 0")
        [part] = json.loads(app.bodies[-1])["messages"][0]["content"]
        assert len(heard(part["input_audio"]["data"])) == int(longest * 16000)


@pytest.mark.slow
def test_a_recording_becomes_text(tmp_path: Path) -> None:
    _, folder = tiny_whisper.make(tmp_path / "whisper")
    llm = AsyncLLM(folder, multiprocess=False, dtype="float32", device="cpu", kv_cache_memory_bytes=2**22)
    with visited(llm, tmp_path) as (browser, app):
        assert browser.evaluate("document.querySelector('#add-picture').hidden")
        assert not browser.evaluate("document.querySelector('#add-sound').hidden")
        give(browser, wav(tiny_whisper.sounds(1.7, 2)), "a.wav", "audio/wav", chosen("#sound-file"))
        browser.until("document.querySelector('.assistant .about')")
        assert browser.evaluate("document.querySelector('.user .text').innerText").startswith("a.wav · 1.7 s")
        assert not browser.evaluate("document.querySelector('.turn .problem')")
        assert not browser.evaluate("document.querySelector('#attached .chip')")
        assert b"RIFF" in app.bodies[-1] and b'name="stream"' in app.bodies[-1]
        shots(browser, tmp_path, "heard")
        give(browser, b"no sound", "b.ogg", "audio/ogg", DROPPED)
        browser.until("document.querySelector('#complaint').innerText.includes('cannot read')")


def test_media_leave_the_policy_as_it_is() -> None:
    """No address but this server's, and no pictures but those that the page itself makes."""
    html, policy = assemble()
    assert "img-src data:;" in policy and "media-src" not in policy and "blob:" not in policy
    assert 'id="picture-file"' in html and "http" not in html.split("pictures and recordings")[1].split("-- polling")[
        0
    ].replace("https", "")
