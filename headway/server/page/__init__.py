"""The page at ``/``: chat with the model beside live figures of the engine. And ``GET /live/figures``, which feeds it.

The page is one HTML document put together from the files in this folder: no build step, no request to anywhere but
this server, and a Content-Security-Policy under which nothing else could run or be loaded. It holds no data, so it may be
given to browsers without a key; ``/live/figures`` and the chat ask for one where the server does. The browser asks for
figures once a second while the page is in view; no history is kept on this side, so a page out of view costs nothing.
"""

from __future__ import annotations

import base64
import hashlib
import time
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse

from headway import __version__
from headway.api.async_llm import AsyncLLM
from headway.core.histogram import Histogram
from headway.core.messages import EngineStats, ModelInfo
from headway.server.door import FIGURES_PATH
from headway.server.metrics_source import served_name, shared_source

if TYPE_CHECKING:
    from headway.api.pictures.door import Pictures


class Requests(msgspec.Struct):
    """What the page shows of requests."""

    first_token: Histogram
    next_token: Histogram
    finished: dict[str, int]
    whole: Histogram
    tasks: dict[str, int]


class Media(msgspec.Struct):
    """What a conversation may have beside text.

    Attributes:
        pictures, recordings: most of them; 0: the model takes none.
        seconds: the longest recording.
    """

    pictures: int
    recordings: int = 0
    seconds: float = 0.0


class Live(msgspec.Struct):
    """The answer of ``GET /live/figures``. Counters count from the start; the page takes differences.

    Attributes:
        now: this server's monotonic clock in seconds.
        engine: None when the engine does not answer.
        media: None: conversations are text alone.
    """

    model: str
    version: str
    now: float
    info: ModelInfo
    engine: EngineStats | None
    requests: Requests
    media: Media | None = None


def install(app: FastAPI, llm: AsyncLLM, settings: object) -> None:
    """Add ``GET /`` and ``GET /live/figures``."""
    source, name = shared_source(app, llm), served_name(llm, settings)
    info = msgspec.structs.replace(llm.model_info, model=name)
    media = None if llm.pictures is None else _media(llm.pictures)
    html, policy = assemble()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }

    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    async def live() -> Response:
        stats, kept = await source.read(), llm.request_metrics
        requests = Requests(kept.first_token, kept.next_token, kept.finished, kept.whole, kept.tasks)
        answer = Live(name, __version__, time.monotonic(), info, stats, requests, media)
        return Response(
            msgspec.json.encode(answer), media_type="application/json", headers={"Cache-Control": "no-store"}
        )

    app.add_api_route("/", page, methods=["GET"], response_class=HTMLResponse, include_in_schema=False)
    app.add_api_route(FIGURES_PATH, live, methods=["GET"], response_class=Response, summary="Figures for the live page")


def _media(pictures: Pictures) -> Media:
    sounds, seen = pictures.sounds, pictures.limits["image"] if "image" in pictures.kinds else 0
    return Media(seen) if sounds is None else Media(seen, pictures.limits["audio"], sounds.longest_seconds)


def assemble() -> tuple[str, str]:
    """The document, and the policy that allows its one script and its one style sheet by their hashes and nothing else."""
    folder = files(__package__)
    names = ("page.css", "chat.js", "media.js", "markdown.js", "live.js", "index.html")
    style, chat, media, markdown, live, html = ((folder / name).read_text(encoding="utf-8") for name in names)
    script = f'"use strict";\n(() => {{\n{chat}{media}{markdown}{live}}})();\n'
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    return html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script), policy


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
