"""Drives headless Chromium through its debugging pipe, with nothing but the standard library: click, type, look."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-extensions --disable-dev-shm-usage --hide-scrollbars
--force-color-profile=srgb --remote-debugging-pipe"""
PATIENCE = 60.0
"""Seconds to wait for an answer of the browser."""


def find() -> str | None:
    """Chromium's path, if it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One browser with one page. Messages are JSON ended by a zero byte, on descriptors 3 (in) and 4 (out) of the browser."""

    def __init__(self, path: str, profile: Path, size: tuple[int, int]) -> None:
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (child_in, child_out)]
        actions = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        flags = [*FLAGS.split(), f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "about:blank"]
        self._pid = os.posix_spawn(path, [path, *flags], os.environ, file_actions=[*quiet, *actions])
        for fd in (child_in, child_out, *high):
            os.close(fd)
        self._ids, self._rest = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        [target] = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)
        os.close(self._from)  # a browser whose pipe is gone leaves; the signal is for one that hangs
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive meanwhile are kept."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = monotonic() + PATIENCE
        while b"\0" not in self._rest:
            readable, _, _ = select.select([self._from], [], [], max(deadline - monotonic(), 0))
            assert readable, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser is gone"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, address: str) -> None:
        """Go there."""
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression; a promise is awaited. What it throws fails the test."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 30) -> None:
        """Wait, inside the browser, until ``condition`` holds."""
        body = f"try {{ if ({condition}) return done(true); }} catch (e) {{}}"
        look = (
            f"(function look() {{ {body} if (performance.now() > end) return done(false); setTimeout(look, 15); }})()"
        )
        promise = f"new Promise(done => {{ const end = performance.now() + {seconds * 1000}; {look} }})"
        assert self.evaluate(promise), f"never came true: {condition}\n{self.evaluate('document.body.innerText')}"

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element."""
        place = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({place})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse to a point of an element, in parts of its size."""
        place = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        at = self.evaluate(f"(r => [r.x + r.width * {x}, r.y + r.height * {y}])({place})")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    def type(self, text: str) -> None:
        """Put text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """One key; ``code`` is its virtual key code, ``text`` what it writes."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int) -> None:
        """Another window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> bytes:
        """A PNG of what is in view, written to ``path`` too."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data

    def named(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of this name so far."""
        return [event["params"] for event in self.events if event["method"] == method]
