"""Images over HTTP: answered as ``LLM`` answers, and hostile ones refused clearly while the server goes on."""

from __future__ import annotations

import base64
import functools
import io
import struct
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from headway import LLM, AsyncLLM, SamplingParams
from headway.server.app import build_app
from headway.server.errors import ApiError
from headway.server.media_fetch import check_url, fetch, is_public
from headway.server.settings import ServerSettings
from tests.multimodal.test_doors import noise, options, png
from tests.multimodal.tiny_sight import sighted
from tests.server.children import Kept


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    llm = AsyncLLM(sighted("llava").folder, multiprocess=False, **options())
    with TestClient(build_app(llm, ServerSettings(allowed_hosts=["*"]))) as found:
        yield found
    llm.shutdown()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def body(*urls: str, text: str = "what?", **more: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 5, **more}


def ask(client: TestClient, request: dict[str, Any]) -> Any:
    return client.post("/v1/chat/completions", json=request)


def test_answers_are_those_of_llm(client: TestClient) -> None:
    one, two = noise(1), noise(2, 64, 50)
    answer = ask(client, body(data_url(png(one)), data_url(png(two))))
    assert answer.status_code == 200, answer.text
    with LLM(sighted("llava").folder, **options()) as llm:
        content = [{"type": "image", "image": one}, {"type": "image", "image": two}, {"type": "text", "text": "what?"}]
        [expected] = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=5))
    assert answer.json()["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert answer.json()["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    streamed = ask(client, body(data_url(png(one)), stream=True))
    assert streamed.status_code == 200 and streamed.text.rstrip().endswith("data: [DONE]")


def test_tokenize_counts_what_the_model_sees(client: TestClient) -> None:
    """A conversation's ids with those that stand for its images: as many as the usage of its answer says."""
    request = body(data_url(png(noise(1))), data_url(png(noise(2, 64, 50))))
    counted = client.post("/tokenize", json={"messages": request["messages"]})
    assert counted.status_code == 200, counted.text
    assert counted.json()["count"] == ask(client, request).json()["usage"]["prompt_tokens"]
    broken = client.post("/tokenize", json={"messages": body(data_url(b"not a picture"))["messages"]})
    assert broken.status_code == 400 and broken.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("role", "part"),
    [
        ("user", {"type": "text", "text": "x", "image_url": {"url": "data:"}}),
        ("user", {"type": "output_text", "image_url": {"url": "data:"}}),
        ("user", {"type": "image_url"}),
        ("user", {"type": "input_audio", "input_audio": {"data": "AAAA"}}),
        ("assistant", {"type": "image_url", "image_url": {"url": data_url(b"x")}}),
    ],
)
def test_wrong_parts_are_refused_wherever_conversations_come_in(
    client: TestClient, path: str, role: str, part: dict[str, Any]
) -> None:
    answer = client.post(path, json={"messages": [{"role": role, "content": [part]}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages[0]"), answer.text


def test_responses_take_images(client: TestClient) -> None:
    """In the newer form the answer is the same, streamed or whole."""
    url = data_url(png(noise(1)))
    content = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": "what?"}]
    request: dict[str, Any] = {
        "input": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_output_tokens": 5,
    }
    answer = client.post("/v1/responses", json=request)
    assert answer.status_code == 200, answer.text
    expected = ask(client, body(url)).json()
    assert answer.json()["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert answer.json()["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    streamed = client.post("/v1/responses", json={**request, "stream": True})
    assert "response.incomplete" in streamed.text or "response.completed" in streamed.text


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_image"}, "input_image has image_url"),
        ({"type": "input_image", "image_url": data_url(b"x"), "text": "y"}, "input_image has image_url"),
        ({"type": "input_text", "text": "y", "image_url": data_url(b"x")}, "no other has it"),
        ({"type": "input_image", "file_id": "file-1"}, "no files are kept"),
        ({"type": "input_image", "image_url": "http://127.0.0.1/a.png"}, ""),
        ({"type": "input_image", "image_url": data_url(b"not a picture")}, ""),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "/v1/audio/transcriptions"),
        ({"type": "input_file", "file_id": "file-1"}, "input_text"),
    ],
)
def test_wrong_parts_of_responses_are_refused(client: TestClient, part: dict[str, Any], message: str) -> None:
    for role in ("user", "assistant"):
        answer = client.post("/v1/responses", json={"input": [{"role": role, "content": [part]}]})
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"] or role == "assistant"
        assert answer.json()["error"]["param"].startswith("input")
    output = {"type": "function_call_output", "call_id": "c", "output": [part]}
    assert client.post("/v1/responses", json={"input": [output]}).status_code == 400


def test_sound_and_video_in_a_chat_are_refused(client: TestClient) -> None:
    for part, fix in (
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "/v1/audio/transcriptions"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "frames"),
    ):
        answer = ask(client, {"messages": [{"role": "user", "content": [part]}]})
        assert answer.status_code == 400 and fix in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "messages[0].content[0]"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, pixels: bytes = b"", *, depth: int = 8, extra: bytes = b"") -> bytes:
    """A PNG that says it is of this size."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    parts = [_chunk(b"IHDR", header), extra, _chunk(b"IDAT", zlib.compress(pixels)), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def saved(kind: str, **more: Any) -> bytes:
    file = io.BytesIO()
    noise(3).save(file, kind, **more)
    return file.getvalue()


@functools.cache
def hostile() -> dict[str, str]:
    """Name -> address of an image that must be refused."""
    whole = png(noise(1))
    text_bomb = _chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(2**26)))
    return {
        "nothing": "",
        "no scheme": "picture.png",
        "empty data": "data:image/png;base64,",
        "not base64": "data:image/png;base64,@@@@",
        "base64 cut short": "data:image/png;base64,abcde",
        "not an image type": "data:text/html;base64," + base64.b64encode(whole).decode(),
        "data without base64": "data:image/png,rawbytes",
        "text": data_url(b"hello, this is no image at all"),
        "html": data_url(b"<html><script>alert(1)</script></html>"),
        "svg": data_url(b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', "svg+xml"),
        "postscript": data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(x) run\n"),
        "tiff": data_url(saved("TIFF"), "tiff"),
        "ico": data_url(saved("ICO"), "x-icon"),
        "truncated png": data_url(whole[: len(whole) // 2]),
        "truncated jpeg": data_url(saved("JPEG")[:300], "jpeg"),
        "truncated webp": data_url(saved("WEBP")[:-40], "webp"),
        "header alone": data_url(whole[:33]),
        "bad checksum": data_url(whole[:50] + bytes([whole[50] ^ 255]) + whole[51:]),
        "bomb by size": data_url(png_of(60000, 60000, bytes(2**20))),
        "bomb by one side": data_url(png_of(2**30, 1, b"\0")),
        "no width": data_url(png_of(0, 10)),
        "fewer pixels than told": data_url(png_of(2000, 2000, b"\0" * 10)),
        "bomb of text": data_url(png_of(1, 1, b"\0" * 4, extra=text_bomb)),
        "zip": data_url(b"PK\x03\x04" + bytes(200)),
        "gif without frames": data_url(b"GIF89a\x01\x00\x01\x00\x00\x00\x00;", "gif"),
        "bmp of absurd size": data_url(b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 10**9, 10**9, 1, 24, 0, 0, 0, 0, 0, 0), "bmp"),  # noqa: E501
        "http": "http://example.org/a.png",
        "https with a user": "https://user:pw@example.org/a.png",
        "loopback": "http://127.0.0.1:1/a.png",
        "metadata service": "http://169.254.169.254/latest/meta-data/",
        "file": "file:///etc/passwd",
        "ftp": "ftp://example.org/a.png",
        "gopher": "gopher://127.0.0.1:6379/_FLUSHALL",
    }  # fmt: skip


@pytest.mark.parametrize("name", hostile())
def test_hostile_images_are_refused(client: TestClient, name: str) -> None:
    answer = ask(client, body(hostile()[name]))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "tools" not in error["message"]
    assert error["message"] and error["param"], error
    assert "Traceback" not in answer.text and "/work" not in answer.text


def test_the_server_goes_on(client: TestClient) -> None:
    """After all of them, twice, the same image is answered as before, by the same processes, which have their memory back."""
    good = body(data_url(png(noise(1))))
    for url in hostile().values():  # now each library is loaded
        ask(client, body(url))
    expected, kept = ask(client, good).json()["choices"], Kept("headway.api.pictures.worker")
    for url in [*hostile().values()] * 2:
        assert ask(client, body(url)).status_code == 400
    kept.check()
    assert ask(client, good).json()["choices"] == expected


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}]}, 400),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "data:"}}]}]},
            400,
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}]}, 400),
        (body(*[data_url(b"x")] * 33), 400),
        (body(*[data_url(png(noise(i))) for i in range(12)]), 400),
        (body(data_url(png(noise(1))), text="a\ufdd2b"), 400),
    ],
)
def test_wrong_messages_are_refused(client: TestClient, change: dict[str, Any], status: int) -> None:
    assert ask(client, {"max_tokens": 3, **change}).status_code == status


def test_models_without_sight_refuse(parrot_llm: AsyncLLM) -> None:
    with TestClient(build_app(parrot_llm, ServerSettings(allowed_hosts=["*"]))) as blind:
        answer = ask(blind, body(data_url(png(noise(1)))))
    assert answer.status_code == 400 and "sees no images" in answer.json()["error"]["message"]


# -- images by address ---------------------------------------------------------------------------------------------------


class Pages(BaseHTTPRequestHandler):
    """A web server with good and bad pictures."""

    def do_GET(self) -> None:
        name = self.path.strip("/")
        if name == "good.png":
            self._send(200, png(noise(1)))
        elif name == "endless":
            self.send_response(200)
            self.end_headers()
            for _ in range(64):
                try:
                    self.wfile.write(bytes(2**20))
                except OSError:
                    return
        elif name.startswith("to:"):
            self._send(302, b"", Location=name.removeprefix("to:"))
        elif name == "round":
            self._send(302, b"", Location="/round")
        elif name == "long":
            self._send(200, b"", **{"Content-Length": str(2**40)})
        else:
            self._send(404, b"")

    def _send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def pages() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def here(*_: Any) -> list[str]:
    """As if every allowed name were a public server."""
    return ["127.0.0.1"]


def test_a_picture_is_fetched(pages: int) -> None:
    found = fetch(f"http://pictures.test:{pages}/good.png", [".test"], "x", here)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(found))), np.asarray(noise(1)))
    moved = fetch(f"http://a.test:{pages}/to:http://b.test:{pages}/good.png", ["a.test", "b.test"], "x", here)
    assert moved == found


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none", "answered 404"),
        ("round", "redirects"),
        ("endless", "more than"),
        ("long", "more than"),
        ("to:http://elsewhere.org/a.png", "not among"),
        ("to:file:///etc/passwd", "not by 'file'"),
        ("to:http://127.0.0.1/a.png", "not among"),
        ("to:http://a.test@127.0.0.1/a.png", "with a user"),
    ],
)
def test_bad_pages_are_refused(pages: int, path: str, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        fetch(f"http://a.test:{pages}/{path}", ["a.test"], "x", here)


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.org/a.png", "http://a.test.evil.org/", "http://evil.org/?a.test", "http://evil.org#a.test",
        "http://a.test\\@evil.org/", "http://evil.org\\.a.test/", "http://a.test@evil.org/", "http://[::1]/", "http://0/",
        "http://2130706433/", "http://a.test:99999999/", "http:///a.png", "http://a.test%2f@evil.org/", "http://ａ.test/",
        "http://a.test/\r\nHost: x", "javascript:alert(1)", "//a.test/x", "http://" + "a" * 3000,
    ],
)  # fmt: skip
def test_addresses_that_are_not_allowed(url: str) -> None:
    with pytest.raises(ApiError):
        check_url(url, ["a.test"], "x")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.9.9", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1", "::1",
        "::", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::",
        "ff02::1", "nonsense", "240.0.0.1", "255.255.255.255",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1::1")


def test_a_name_that_leads_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All addresses of a name must be public: one that is not would be the next answer."""
    both = [(2, 1, 6, "", ("93.184.216.34", 80)), (2, 1, 6, "", ("10.0.0.1", 80))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: both)
    with pytest.raises(ApiError, match="no public address"):
        fetch("http://a.test/x.png", ["a.test"], "x")
