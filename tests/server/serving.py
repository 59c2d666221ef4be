"""A minimal app over AsyncLLM for tests of parts of the server: no authentication, and one route that streams chat."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace, TracebackType
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from headway import AsyncLLM, SamplingParams
from headway.server import metrics, page


def make_app(llm: AsyncLLM, name: str = "tiny") -> FastAPI:
    """/metrics, / and /live/figures as the server installs them; /v1/chat/completions in the stream form only."""
    app = FastAPI()
    settings = SimpleNamespace(served_model_name=[name])
    metrics.install(app, llm, settings)
    page.install(app, llm, settings)

    async def chat(request: Request) -> StreamingResponse:
        body: dict[str, Any] = await request.json()
        assert body["stream"] and body["model"] == name
        app.state.last_chat = body
        fields = {key: body[key] for key in ("temperature", "top_p", "max_tokens", "seed") if body.get(key) is not None}
        return StreamingResponse(
            events(llm, body["messages"], SamplingParams(**fields)), media_type="text/event-stream"
        )

    app.add_api_route("/v1/chat/completions", chat, methods=["POST"])
    return app


async def events(llm: AsyncLLM, messages: list[dict[str, str]], params: SamplingParams) -> AsyncIterator[str]:
    """OpenAI's server-sent events for one answer, usage last."""
    tokens, prompt = 0, 0
    async for output in llm.chat(messages, params, delta=True):
        prompt = len(output.prompt_token_ids)
        for completion in output.outputs:
            tokens += len(completion.token_ids)
            delta = {"content": completion.text}
            yield event(choices=[{"index": 0, "delta": delta, "finish_reason": completion.finish_reason}])
    yield event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": tokens})
    yield "data: [DONE]\n\n"


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def client_of(app: FastAPI) -> httpx.AsyncClient:
    """A client that calls the app without a socket."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


class Served:
    """An app behind uvicorn on a free port of the loopback, in a thread of its own; ``with`` stops it."""

    def __init__(self, app: FastAPI) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> str:
        self._thread.start()
        return self.address

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()
