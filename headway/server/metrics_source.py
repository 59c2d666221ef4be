"""Reading the engine's figures for whoever asks over HTTP, without letting askers multiply into engine work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic
from typing import cast

from fastapi import FastAPI

from headway.api.async_llm import AsyncLLM
from headway.core.errors import EngineDeadError
from headway.core.messages import EngineStats

PATIENCE_SECONDS = 5.0
"""An engine that has not answered by then is reported as not answering."""


class StatsSource:
    """One question to the engine at a time; all who ask meanwhile share its answer. Nothing runs between questions.

    Belongs to one event loop.

    Attributes:
        asked_at: when the last question was put (``monotonic``).
    """

    asked_at = float("-inf")

    def __init__(self, llm: AsyncLLM, patience: float = PATIENCE_SECONDS) -> None:
        self._llm, self._patience = llm, patience
        self._question: asyncio.Task[EngineStats] | None = None

    def ask(self) -> asyncio.Task[EngineStats]:
        """The question that is open, or a new one. Not to be cancelled: others may wait for it."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._llm.stats())
            self.asked_at = monotonic()
        return self._question

    async def read(self) -> EngineStats | None:
        """The engine's figures; None when it is dead or silent for ``patience`` seconds."""
        question = self.ask()
        await asyncio.wait({question}, timeout=self._patience)  # does not cancel it: others may be waiting too
        if not question.done() or question.cancelled():
            return None
        error = question.exception()
        if error is None:
            return question.result()
        if isinstance(error, EngineDeadError):
            return None
        raise error


def shared_source(app: FastAPI, llm: AsyncLLM) -> StatsSource:
    """The app's source, made when first asked for."""
    if not hasattr(app.state, "stats_source"):
        app.state.stats_source = StatsSource(llm)
    return cast(StatsSource, app.state.stats_source)


def served_name(llm: AsyncLLM, settings: object) -> str:
    """The model's name towards clients: the first served name of the settings, or else what the engine was given."""
    names = getattr(settings, "served_model_name", None)
    return str(names[0]) if isinstance(names, list) and names else shown_name(llm.model_info.model)


def shown_name(model: str) -> str:
    """What clients see of ``model``: of a folder or file its last part, since where it lies is none of their business."""
    path = Path(model)
    if path.is_absolute() or model.startswith((".", "~")) or path.exists():
        return path.name if path.name not in ("", "..") else path.resolve().name or "model"
    return model
