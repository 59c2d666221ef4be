"""Headway's logger, and the two forms of its lines. Commands and the engine's process configure logging, libraries must not."""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import Any, Final

import msgspec

logger = logging.getLogger("headway")
PLAIN: Final = re.compile(r"[^\s\"=]*")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the fields of ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """``LEVEL message key=value ...``"""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        text = " ".join([record.levelname, record.getMessage(), *(f"{k}={_word(v)}" for k, v in fields.items())])
        # A client chooses the path: what it writes must stay on its line, and in its field.
        text = text.encode("unicode_escape").decode()
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def _word(value: Any) -> str:
    """A value as one word: in quotes, and without any inside, where it could be taken for several or for another field."""
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return '"' + value.replace('"', "'") + '"'
    return str(value)


def show(log_format: str, level: int) -> None:
    """Send all logging of this process to stderr, as "text" or "json", and ours from ``level`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    # Looked up for each record, and in neither form: threads, processes, and (as logging's own documents say) the caller.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # noqa: SLF001
    logger.setLevel(min(logger.level or level, level))


def shown_format() -> str:
    """What a child process should be told to log as, so that its lines look like ours."""
    return "json" if any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers) else "text"
