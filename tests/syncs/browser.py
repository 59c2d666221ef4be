"""A real browser for the tests of a page: Debian's chromium and chromium-driver, over the W3C's WebDriver protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, address: str, binary: str, profile: Path) -> None:
        self._address = address
        chrome = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": chrome}}
        self._session = self._ask("POST", "/session", {"capabilities": wanted})["sessionId"]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def _do(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._ask("POST", f"/session/{self._session}{path}", body)

    def close(self) -> None:
        """End it."""
        self._ask("DELETE", f"/session/{self._session}")

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Show ``page`` in a window of ``width`` pixels; a phone's where it is narrow."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
        media = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        for command, options in (("setDeviceMetricsOverride", size), ("setEmulatedMedia", media)):
            self._do("/goog/cdp/execute", {"cmd": f"Emulation.{command}", "params": options})
        self._do("/url", {"url": page.as_uri()})

    def script(self, code: str) -> Any:
        """What ``code``, the body of a function, returns in the page."""
        return self._do("/execute/sync", {"script": code, "args": []})

    def _element(self, selector: str) -> str:
        found: dict[str, str] = self._do("/element", {"using": "css selector", "value": selector})
        return next(iter(found.values()))

    def click(self, selector: str) -> None:
        """As with a mouse: an element that is hidden or covered raises."""
        self._do(f"/element/{self._element(selector)}/click")

    def choose(self, selector: str, value: str) -> None:
        """Pick an option of a select."""
        self.click(f'{selector} option[value="{value}"]')

    def type(self, selector: str, text: str) -> None:
        """Press keys."""
        self._do(f"/element/{self._element(selector)}/value", {"text": text})

    def picture(self, file: Path) -> None:
        """The whole page."""
        self._do("/goog/cdp/execute", {"cmd": "Page.bringToFront", "params": {}})
        made = self._do(
            "/goog/cdp/execute", {"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": True}}
        )
        file.write_bytes(base64.b64decode(made["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in ``folder``; a skip on machines that have none."""
    driver, binary = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("chromium-browser")
    if driver is None or binary is None:
        pytest.skip("no chromium and chromedriver on this machine (Debian: chromium, chromium-driver)")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        started = next(line for line in process.stdout if "started successfully" in line)
        port = int(started.rstrip().rstrip(".").rpartition(" ")[2])
        made = Browser(f"http://127.0.0.1:{port}", binary, folder / "profile")
        try:
            yield made
        finally:
            made.close()
    finally:
        process.terminate()
        process.communicate()
