"""Whether requests can be answered: asked of the engine, because a process that stands still looks like one that works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

from fastapi import FastAPI

from headway.server.lifecycle import Lifecycle, Phase
from headway.server.metrics_source import StatsSource, shared_source

if TYPE_CHECKING:
    from headway.api.async_llm import AsyncLLM

SILENT_SECONDS: Final = 5.0
"""An engine that says nothing for so long, and whose process does not work meanwhile, is stopped or stuck."""
LONG_STEP_SECONDS: Final = 60.0
"""The same for one whose process works: a step over a long prompt may take seconds on a CPU."""
TICK_SECONDS: Final = 0.25
WORK_SECONDS: Final = 0.002
"""Processor time in a tick that is work."""
SILENT: Final = "silent"


class Health:
    """Judges one engine when asked. Nothing runs in between. Belongs to the event loop's thread.

    Args:
        source: through which the engine is asked; its question is shared with all who ask for figures.
    """

    def __init__(
        self, llm: AsyncLLM, lifecycle: Lifecycle, source: StatsSource, clock: Callable[[], float] = monotonic
    ) -> None:
        self._llm, self._lifecycle, self._source, self._clock = llm, lifecycle, source, clock
        self._used: float | None = None
        self._worked = float("-inf")

    async def state(self) -> str:
        """ "ready", or why requests cannot be answered: "starting", "draining", "dead", "silent"."""
        if self._llm.dead_error is not None:
            return Phase.DEAD.value
        if self._lifecycle.phase is Phase.READY and not await self.answers():
            return Phase.DEAD.value if self._llm.dead_error is not None else SILENT
        return self._lifecycle.phase.value

    async def answers(self) -> bool:
        """Whether the engine answers or works. Takes up to ``SILENT_SECONDS`` when it does not."""
        self._look()
        question = self._source.ask()
        while True:
            done, _ = await asyncio.wait({question}, timeout=TICK_SECONDS)
            if done:
                return not question.cancelled() and question.exception() is None
            now = self._clock()
            works = self._look()
            said = max(self._source.asked_at, self._llm.signs_of_life()[0])
            if now - said <= LONG_STEP_SECONDS:
                if works:
                    return True
                if now - max(said, self._worked) <= SILENT_SECONDS:
                    continue
            return False

    def _look(self) -> bool:
        """Whether the engine's process has worked since the last look."""
        used = self._llm.signs_of_life()[1]
        works = used is not None and self._used is not None and used - self._used >= WORK_SECONDS
        self._used = used
        if works:
            self._worked = self._clock()
        return works


def shared_health(app: FastAPI, llm: AsyncLLM, lifecycle: Lifecycle | None = None) -> Health:
    """The app's judge, made when first asked for."""
    if not hasattr(app.state, "health"):
        app.state.health = Health(llm, lifecycle or Lifecycle(Phase.READY), shared_source(app, llm))
    return cast(Health, app.state.health)
