"""Memory of large requests goes back to the system: the C library keeps what was freed, for a next time that may never come."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

LARGE_BYTES: Final = 128 * 1024
"""Bodies from so many bytes on leave something worth returning: their text, tokens, and what tokenising took."""
DELAY_SECONDS: Final = 2.0
"""By then most requests that are refused or abandoned have ended; a flood of them is one return every so often."""


class Returns:
    """Returns free memory a moment after large requests; does nothing while there are none. Of the event loop's thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def after(self, size: int) -> None:
        """A body of ``size`` bytes has come."""
        loop = asyncio.get_running_loop()
        if size >= LARGE_BYTES and self._loop is not loop:
            self._loop = loop
            loop.call_later(DELAY_SECONDS, self._start)

    def _start(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run_in_executor(None, return_memory)


def return_memory() -> bool:
    """Give free memory of all threads back; False where the C library cannot (only glibc can). Other threads go on."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
