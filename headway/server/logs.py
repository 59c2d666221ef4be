"""Log lines of the server: one per request. Texts of prompts and answers are never among them."""

from __future__ import annotations

import logging
from typing import Any

from headway.core import log

access = logging.getLogger("headway.access")


def set_up(log_format: str) -> None:
    """Send everything to stderr in one form; call it once, from the command, never from a library."""
    log.show(log_format, logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def request_line(fields: dict[str, Any]) -> None:
    """Log one answered request."""
    access.info("request", extra={"fields": fields})
