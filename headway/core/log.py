"""Headway's logger. Libraries must not configure logging: the CLI and the server do."""

from __future__ import annotations

import logging

logger = logging.getLogger("headway")
