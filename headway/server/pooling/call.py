"""What all pooling routes share: prompts, parameters, room, and answers written without holding up the event loop."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from headway.api.pooling.requests import Floats, OpenPooling
from headway.core.errors import EngineDeadError
from headway.core.params import PoolingParams
from headway.core.task import Task
from headway.server.errors import named, refuse, shutting_down
from headway.server.lifecycle import Phase
from headway.server.report import new_id
from headway.server.service import Service, log_usage, time_limit, until_gone
from headway.server.sse import encode

try:
    import orjson
except ImportError:  # the extra "embeddings"
    orjson = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from headway.api.pooling.score import ScoreJob
    from headway.server.pooling.protocol import Cut, Input, TeiCut

T = TypeVar("T")
INLINE_FLOATS: Final = 2**15
"""So many numbers are written in the event loop, in a millisecond or two; more in a thread."""
ROUTES_OF: Final = {
    Task.EMBED: "/v1/embeddings",
    Task.CLASSIFY: "/classify",
    Task.SCORE: "/score or /rerank",
    Task.TOKEN_EMBED: "/pooling",
    Task.TOKEN_CLASSIFY: "/pooling",
    Task.GENERATE: "/v1/chat/completions or /v1/completions",
}


def need_task(service: Service, *tasks: Task) -> None:
    """Raises ApiError where the model serves none of ``tasks``."""
    served = service.info.tasks
    if not set(tasks) & set(served):
        words = ", ".join(f"{task.value} ({ROUTES_OF[task]})" for task in served)
        wanted = " or ".join(task.value for task in tasks)
        raise refuse(f"{service.names[0]} serves {words}, not {wanted}", "model", "model_not_supported")


def inputs_of(given: Input, name: str) -> list[Any]:
    """The prompts of all forms: text, texts, token ids, lists of token ids. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise refuse(f"{name} is an empty list; give at least one text", name)
    whole = [isinstance(item, int) for item in given]
    if all(whole):
        return [given]
    if any(whole):
        raise refuse(f"{name} mixes token ids with whole prompts", name)
    return given


def params_of(body: Cut, **more: Any) -> PoolingParams:
    """The parameters of a body; ``more``: those that its route adds."""
    return PoolingParams(
        truncate_prompt_tokens=body.truncate_prompt_tokens, truncation_side=body.truncation_side, **more
    )


def tei_params(body: TeiCut, **more: Any) -> PoolingParams:
    """As ``params_of``, of TEI's bodies."""
    side = body.truncation_direction
    return PoolingParams(
        truncate_prompt_tokens=-1 if body.truncate else None, truncation_side=side and side.lower(), **more
    )


class PoolingCall:
    """One request.

    Args:
        names: fields of the API floor -> those of the request, for errors.
    """

    def __init__(self, service: Service, request: Request, model: str | None, names: Mapping[str, str]) -> None:
        self.service, self.llm = service, service.llm
        self._request, self._names = request, names
        self.model = service.check_model(model)
        self.created = int(time.time())
        self.num_tokens = 0

    async def answer(self, count: int, what: str, work: Callable[[], Awaitable[bytes]]) -> Response:
        """The response that ``work`` writes, with room for ``count`` texts of the field ``what``; ends when the client leaves.

        Raises:
            ApiError: no room, too late, or cut short by the server's end.
            InvalidRequestError, RequestFailedError, EngineDeadError: as ``AsyncLLM.pool``.
        """

        async def whole() -> Response:
            async with time_limit(self.service.settings.request_timeout):
                with self.service.room_for_texts(count, what), named(self._names):
                    content = await work()
            log_usage(self._request.scope, self.num_tokens, 0, "stop")
            return Response(content, media_type="application/json")

        try:
            return await until_gone(self._request.scope, self._request.receive, whole())
        except EngineDeadError:
            if self.service.lifecycle.phase is Phase.DRAINING:
                raise shutting_down(cut=True) from None
            raise

    async def pool(self, prompts: Sequence[Any], params: PoolingParams, task: Task) -> tuple[OpenPooling, list[Floats]]:
        """A finished group and its arrays."""
        group = await self.llm.pool(prompts, params, task)
        self.num_tokens += group.num_tokens
        return group, await _apart(lambda: self.llm.arrays(group), sum(vector.size for vector in group.vectors))

    async def pairs(self, first: Any, second: Any, params: PoolingParams) -> list[Floats]:
        """The arrays of a classifier's pairs."""
        group = await self.llm.pool_pairs(first, second, params)
        self.num_tokens += group.num_tokens
        return self.llm.arrays(group)

    async def score(
        self, first: str | list[str], second: list[str], params: PoolingParams, instruction: str | None
    ) -> tuple[ScoreJob, list[float]]:
        """A finished job and its scores."""
        job, group = await self.llm.score(first, second, params, instruction)
        self.num_tokens += group.num_tokens
        scores = await _apart(lambda: job.scores(group.vectors), sum(vector.size for vector in group.vectors))
        return job, scores.tolist()  # host: numpy

    def usage(self) -> dict[str, int]:
        """As OpenAI writes it."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens, "completion_tokens": 0}

    def listing(self, prefix: str, data: bytes) -> bytes:
        """vLLM's and OpenAI's list of ``data``, which is written already."""
        head = encode({"id": new_id(prefix), "object": "list", "created": self.created, "model": self.model})
        return b'%b,"data":%b,"usage":%b}' % (head[:-1], data, encode(self.usage()))


async def written(arrays: Sequence[Floats], write: Callable[[int, Floats], bytes]) -> bytes:
    """A JSON list of what ``write`` makes of each array and its number."""

    def all_of_it() -> bytes:
        return b"[" + b",".join([write(number, array) for number, array in enumerate(arrays)]) + b"]"

    return await _apart(all_of_it, sum(array.size for array in arrays))


async def _apart(work: Callable[[], T], floats: int) -> T:
    """``work()``, in a thread if it handles many numbers."""
    return work() if floats <= INLINE_FLOATS else await asyncio.to_thread(work)


def numbers(array: Floats, encoding: str | None) -> bytes:
    """JSON of an array: nested lists, or base64 of little-endian float32."""
    if encoding == "base64":
        return b'"' + base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()) + b'"'
    if orjson is None:
        return encode(array.tolist())  # host: numpy
    # The fewest digits that give the same float32, where the line above writes those of a float64: half the time and bytes.
    return orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
