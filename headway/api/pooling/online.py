"""Pooling for ``AsyncLLM``: groups of prompts, tokenised beside the event loop, awaited as one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, cast

from headway.api.long_texts import LONG_TEXT_CHARS
from headway.api.pooling.door import PoolingDoor, Wanted, salts, task_of
from headway.api.pooling.outputs import request_outputs, scoring_outputs
from headway.api.pooling.requests import Floats, OpenPooling, PoolingProcessor
from headway.api.pooling.score import ScoreJob, pair_job, score_job
from headway.core.messages import AddRequest, ModelInfo
from headway.core.outputs import AnyPoolingOutput, ScoringRequestOutput
from headway.core.params import PoolingParams
from headway.core.task import Task

if TYPE_CHECKING:
    from headway.api.long_texts import TextLanes

CHARS_A_PROMPT: Final = 16
"""What a prompt costs beside its text, in characters: how much may be prepared in one turn of the event loop."""


class AsyncPooling:
    """The pooling methods of AsyncLLM."""

    _info: ModelInfo
    _pools: PoolingDoor
    _processor: Any
    _hub: Any
    _texts: TextLanes | None
    _numbers: itertools.count[int]

    def check_health(self) -> None:
        """See AsyncLLM."""
        raise NotImplementedError

    @property
    def pooling_door(self) -> PoolingDoor:
        """What checks requests that pool."""
        return self._pools

    async def encode(
        self,
        prompt: object,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: Task | str | None = None,
    ) -> AsyncIterator[AnyPoolingOutput]:
        """One prompt's vector, as vLLM's ``AsyncLLM.encode``: yields once. Leaving it early aborts the request.

        Args and errors as ``LLM.encode``.
        """
        task = task_of(pooling_task, self._pools)
        group = await self.pool([prompt], pooling_params, task, request_id)
        [output] = self.outputs(group, plain=task not in (Task.EMBED, Task.CLASSIFY))
        output.request_id = group.request_id
        yield output

    async def pool(
        self,
        prompts: Sequence[object],
        params: PoolingParams | None = None,
        task: Task = Task.EMBED,
        request_id: str | None = None,
    ) -> OpenPooling:
        """The finished group of some prompts. Cancelling aborts all of them.

        Raises:
            InvalidRequestError: a prompt cannot be served; none is then.
            RequestFailedError: one failed inside the engine.
            BusyError: too much is being tokenised.
            EngineDeadError: the engine stopped.
        """
        door, wanted = self._pools, self._pools.wanted(params, task)
        found_salts = salts(prompts)

        def messages() -> list[AddRequest]:
            return door.messages(door.token_ids(prompts, wanted), wanted, salts=found_salts)

        return await self._pooled(messages, wanted, _size(prompts), request_id)

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        params: PoolingParams | None = None,
        instruction: str | None = None,
    ) -> tuple[ScoreJob, OpenPooling]:
        """A job whose ``scores`` the finished group gives; as ``LLM.score``, errors as ``pool``."""
        job = score_job(self._pools, data_1, data_2, params, instruction)
        size = _size(job.first) + _size(job.second)
        return job, await self._pooled(job.messages, job.wanted, size, None)

    async def pool_pairs(self, prompts: object, text_pair: object, params: PoolingParams | None = None) -> OpenPooling:
        """The finished group of pairs that a classifier reads at once; as ``LLM.classify``, errors as ``pool``."""
        job = pair_job(self._pools, prompts, text_pair, params)
        return await self._pooled(job.messages, job.wanted, _size(job.first) + _size(job.second), None)

    def outputs(self, group: OpenPooling, plain: bool = False) -> list[AnyPoolingOutput]:
        """The outputs of a finished group."""
        arrays = self.arrays(group)
        return request_outputs(group.wanted.task, arrays, group.messages, group.cached, plain)

    def arrays(self, group: OpenPooling) -> list[Floats]:
        """float32 of each prompt, [width], or [tokens, width]."""
        return group.arrays(self._pools.pooling)

    @staticmethod
    def score_outputs(job: ScoreJob, group: OpenPooling) -> list[ScoringRequestOutput]:
        """The outputs of a finished score job."""
        return scoring_outputs(job, job.scores(group.vectors), group.messages, group.cached)

    async def _pooled(
        self, messages: Callable[[], list[AddRequest]], wanted: Wanted, size: int, request_id: str | None
    ) -> OpenPooling:
        arrived = monotonic()
        self.check_health()
        self._hub.attach()
        lanes = self._texts
        if lanes is None or (size <= LONG_TEXT_CHARS and lanes.has_time(size)):
            made = messages()
        else:
            made = await lanes.beside(messages, size)
        processor = cast(PoolingProcessor, self._processor)
        group = processor.open(made, wanted, str(next(self._numbers)) if request_id is None else request_id)
        group.arrived = arrived  # tokenising is part of what the caller waits for
        news = self._hub.open(group, only_final=True)
        try:
            if made:
                self._hub.add(made)
            while not group.finished:
                await news.wait()
                news.clear()
                if not group.finished:
                    self.check_health()
        finally:
            self._hub.leave(group)
        group.check()
        return group


def _size(prompts: Sequence[object]) -> int:
    """About how long preparing takes, in characters."""
    total = 0
    for prompt in prompts:
        text = prompt.get("prompt", "") if isinstance(prompt, dict) else prompt
        total += CHARS_A_PROMPT + (len(text) if hasattr(text, "__len__") else 0)
    return total
