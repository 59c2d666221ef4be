"""``headway chat --url`` against a fake server."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headway.cli.main import app
from tests.cli.fake_server import Answer, event, serving


def say(url: str, *arguments: str, typed: str = "hi\n") -> Result:
    return CliRunner().invoke(app, ["chat", "--url", url, *arguments], input=typed)


def spoken(*texts: str, finish: str = "stop") -> Answer:
    parts = [event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})]
    parts += [event({"choices": [{"delta": {"content": text}}]}) for text in texts]
    parts.append(event({"choices": [{"delta": {}, "finish_reason": finish}]}))
    parts.append(event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}}))
    return Answer([*parts, event(b"[DONE]")], borders=1)


@pytest.mark.parametrize("suffix", ["", "/v1", "/v1/"])
def test_a_conversation(suffix: str) -> None:
    with serving(lambda request: spoken("Gr\u00fc", "\u00df dich ", str(len(request["messages"])))) as server:
        result = say(
            server.url + suffix, "--system", "be", "--temperature", "0.5", "--max-tokens", "7", "--api-key", "k",
            typed="one\ntwo\n/reset\nthree\n",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == "Gr\u00fc\u00df dich 2\nGr\u00fc\u00df dich 4\nGr\u00fc\u00df dich 2\n"
    assert "4 tokens in " in result.stderr
    assert "prompt 11 tokens, finish stop" in result.stderr
    request = server.requests[1]
    assert [m["content"] for m in request["messages"]] == ["be", "one", "Gr\u00fc\u00df dich 2", "two"]
    assert [m["role"] for m in request["messages"]] == ["system", "user", "assistant", "user"]
    assert (request["path"], request["model"]) == ("/v1/chat/completions", "fake-model")
    assert (request["temperature"], request["max_tokens"]) == (0.5, 7)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer k"}


def test_the_model_may_be_named() -> None:
    with serving(lambda _: spoken("a")) as server:
        assert say(server.url, "mine").exit_code == 0
    assert server.requests[0]["model"] == "mine"
    assert "authorization" not in server.headers[0]


def test_a_refused_question_leaves_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: dict[str, Any]) -> Answer:
        last = request["messages"][-1]["content"]
        if last == "broken":
            return Answer(spoken("half", "way").parts, cut=250)
        if last == "error":
            return Answer([event({"error": {"message": "engine died"}}), event(b"[DONE]")])
        if last == "no":
            return Answer([b'{"error": {"message": "too long"}}'], status=400, framing="length")
        return spoken("fine")

    with serving(answer) as server:
        result = say(server.url, typed="broken\nerror\nno\nyes\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("fine\n")
    for part in ("in the middle", "engine died", "HTTP 400: too long"):
        assert part in result.stderr
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["yes"]


def test_engine_options_are_refused() -> None:
    result = say("http://127.0.0.1:1", "--dtype", "float16", "--enforce-eager")
    assert result.exit_code == 2
    assert "--dtype, --enforce-eager cannot go with --url" in result.stderr


def test_nobody_there() -> None:
    with serving() as server:
        pass
    result = say(server.url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no connection to" in result.stderr
