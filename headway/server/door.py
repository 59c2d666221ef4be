"""The outer door: every HTTP request passes here first. Deny by default: only /health and /live need no key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import time
from email.utils import formatdate
from typing import Any, Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.core.log import logger
from headway.server import logs
from headway.server.errors import ApiError, shutting_down
from headway.server.lifecycle import Lifecycle, Phase
from headway.server.settings import ServerSettings

HEALTH_PATH: Final = "/health"
LIVE_PATH: Final = "/live"
OPEN_PATHS: Final = frozenset({HEALTH_PATH, LIVE_PATH})
PAGE_PATH: Final = "/"
FIGURES_PATH: Final = "/live/figures"
PROBES: Final = frozenset({HEALTH_PATH, LIVE_PATH, FIGURES_PATH, "/ready", "/metrics"})
"""Asked every few seconds by machines: no log lines."""
MAX_TARGET_BYTES: Final = 8192
"""Of a path with its query; there is no longer one here."""
RAW_SEND: Final = "headway.send"
"""Where the scope holds the server's own ``send``: streams skip the wrappers around it."""
LOG_FIELDS: Final = "headway.log"
"""Where the scope holds what the log line shall say beside path and status."""
REQUEST_ID: Final = "headway.request_id"
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
PORT: Final = re.compile(r"[0-9]*")
CLOSE: Final = (b"connection", b"close")
LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})


class Door:
    """ASGI middleware: request ids, keys, host check, draining, the last catch of exceptions, the log line.

    Request ids are made here, always: a client's X-Request-Id is not read, so it can collide with nothing.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._keys = [_digest(key.encode()) for key in settings.api_key]
        self._hosts = {host.lower() for host in settings.hosts()}
        self._log = settings.access_log
        self._dated, self._date_text = 0, b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        take_absolute_form(scope)
        request_id = f"req-{os.urandom(16).hex()}"
        fields: dict[str, Any] = {}
        scope[RAW_SEND], scope[LOG_FIELDS], scope[REQUEST_ID] = send, fields, request_id
        status = 0

        async def send_start(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ours = [(b"x-request-id", request_id.encode()), (b"date", self._date()), NOSNIFF]
                if self._lifecycle.phase is Phase.DRAINING:
                    ours.append(CLOSE)
                names = {name for name, _ in ours}
                message["headers"] = [*(h for h in message.get("headers", ()) if h[0].lower() not in names), *ours]
            await send(message)

        counted = scope["method"] == "POST"
        try:
            if counted:
                self._lifecycle.enter()
            await self._admit(scope, receive, send_start)
        except Exception as error:
            logger.exception("request %s failed: %s", request_id, type(error).__name__)
            if status == 0:
                sorry = ApiError(500, f"internal error; the server's log has it under {request_id}", None, "internal")
                await sorry.response()(scope, receive, send_start)
            else:
                raise  # the server cuts the connection: the client must not take what it has for the whole
        finally:
            # It holds the scope in turn: requests would stay until the next garbage collection.
            scope.pop(RAW_SEND, None)
            if counted:
                self._lifecycle.leave()
            if self._log and scope["path"] not in PROBES:
                self._write_line(scope, request_id, status, start, fields)

    def _date(self) -> bytes:
        """The Date header, made once a second."""
        now = int(time.time())
        if now != self._dated:
            self._dated, self._date_text = now, formatdate(now, usegmt=True).encode()
        return self._date_text

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why this request may not go on, from its headers alone."""
        authorization: bytes | None = None
        host = b""
        names = set()
        for name, value in scope["headers"]:
            names.add(name)
            if name == b"authorization":
                authorization = value if authorization is None else b""  # of two, who knows which one a proxy has read
            elif name == b"host":
                host = value
        if names >= LENGTHS:
            # A proxy that believes the other one would take part of the body for a request of its own (smuggling).
            return ApiError(
                400, "Content-Length and Transfer-Encoding contradict each other", None, "http", {"Connection": "close"}
            )
        if len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) > MAX_TARGET_BYTES:
            message = f"the path and its query are longer than {MAX_TARGET_BYTES} bytes; send long values in a body"
            return ApiError(414, message, None, "http", {"Connection": "close"})
        if scope["path"] in OPEN_PATHS:
            return None
        if self._hosts and _host_name(host) not in self._hosts:
            return ApiError(
                403, "this Host header is not served; start the server with --allowed-hosts to allow it", None, "host"
            )
        if self._keys and not self._knows(authorization or b""):
            return ApiError(
                401,
                "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
                None,
                "invalid_api_key",
                # A person who opens the page can type a key: the browser sends it as a password.
                {"WWW-Authenticate": 'Basic realm="headway"' if scope["path"] == PAGE_PATH else "Bearer"},
            )
        if self._lifecycle.phase is Phase.DRAINING and scope["method"] == "POST":
            return shutting_down()
        return None

    def _knows(self, authorization: bytes) -> bool:
        """Compares with every key, in constant time; digests, so that not even a key's length shows."""
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() == b"basic":
            scheme, key = b"bearer", _password(key)
        given = _digest(key.strip())
        found = False
        for known in self._keys:
            found |= hmac.compare_digest(known, given)
        return found and scheme.lower() == b"bearer"

    def _write_line(self, scope: Scope, request_id: str, status: int, start: float, fields: dict[str, Any]) -> None:
        client = scope.get("client")
        logs.request_line(
            {
                "request_id": request_id,
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round((time.perf_counter() - start) * 1e3, 1),
                **fields,
            }
        )


def take_absolute_form(scope: Scope) -> None:
    """Make path and Host header of a target with scheme and host, which a server must accept (RFC 9112, 3.2.2)."""
    scheme, found, rest = scope.get("raw_path", b"").partition(b"://")
    if not found or scheme.lower() not in (b"http", b"https"):
        return
    host, _, path = rest.partition(b"/")
    if not host or b"@" in host:  # no such target exists, or one with a password (RFC 9110, 4.2): not found
        return
    scope["raw_path"] = b"/" + path
    scope["path"] = unquote("/" + path.decode("latin-1"))
    scope["headers"] = [(b"host", host), *((name, value) for name, value in scope["headers"] if name != b"host")]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _password(credentials: bytes) -> bytes:
    """The password of HTTP's Basic scheme; nothing for what is none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _host_name(header: bytes) -> str:
    """A Host header without its port."""
    host = header.decode("latin-1").lower()
    name, colon, port = host.rpartition(":")
    return name if colon and PORT.fullmatch(port) and not name.endswith(":") else host
