"""Log lines of the server: one per request. Texts of prompts and answers are never among them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from headway.core import log

access = logging.getLogger("headway.access")
MAX_CHARS: Final = 200
"""Of a value in a line: clients choose paths and methods."""
SELDOM_SECONDS: Final = 60.0


def set_up(log_format: str) -> None:
    """Send everything to stderr in one form; call it once, from the command, never from a library."""
    log.show(log_format, logging.INFO)
    # Its warnings are one a request that is no HTTP, and so one a packet of whoever sends such; ``Seldom`` tells of these.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def request_line(fields: dict[str, Any]) -> None:
    """Log one answered request; long values are cut."""
    access.info("request", extra={"fields": {name: cut(value) for name, value in fields.items()}})


def cut(value: Any) -> Any:
    """``value``, or the beginning of a text that is long."""
    return f"{value[:MAX_CHARS]}..." if isinstance(value, str) and len(value) > MAX_CHARS else value


class Seldom:
    """Logs warnings of one kind at most once a minute, and then says how often it happened."""

    def __init__(self, seconds: float = SELDOM_SECONDS, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._next = float("-inf")
        self._count = 0

    def warn(self, message: str) -> None:
        """It has happened (again)."""
        self._count += 1
        if self._clock() >= self._next:
            more = f" ({self._count} times since the last such line)" if self._count > 1 else ""
            log.logger.warning("%s%s", message, more)
            self._next = self._clock() + self._seconds
            self._count = 0
