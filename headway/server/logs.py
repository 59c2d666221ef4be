"""Log lines of the server: one per request, text or JSON. Texts of prompts and answers are never among them."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec

from headway.core.log import logger

access = logging.getLogger("headway.access")


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
        text = " ".join([record.levelname, record.getMessage(), *(f"{k}={v}" for k, v in fields.items())])
        # A client chooses the path: what it writes must stay on its line.
        text = text.encode("unicode_escape").decode()
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def set_up(log_format: str) -> None:
    """Send everything to stderr in one form; call it once, from the command, never from a library."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def request_line(fields: dict[str, Any]) -> None:
    """Log one answered request."""
    access.info("request", extra={"fields": fields})
