"""The pooling methods of ``LLM``. Texts are tokenised in a thread ahead of the loop, which waits for the first ones only."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, cast, overload

import numpy as np

from headway.api.pooling.door import PoolingDoor, Wanted, salts, task_of
from headway.api.pooling.outputs import request_outputs, scoring_outputs
from headway.api.pooling.requests import Floats, OpenPooling, PoolingProcessor
from headway.api.pooling.score import ScoreJob, pair_job, score_job
from headway.api.pooling.sparse import SparseVector, sparse_task, sparse_vectors
from headway.api.prompts import Prompt, is_token_ids
from headway.core.errors import EngineDeadError, InvalidRequestError
from headway.core.messages import AddRequest
from headway.core.outputs import (
    AnyPoolingOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
)
from headway.core.params import PoolingParams
from headway.core.pooling import PoolingInfo
from headway.core.task import Task

if TYPE_CHECKING:
    from headway.engine.client import EngineClient

PART_TEXTS: Final = 256
"""Prompts that are tokenised and submitted together."""
PART_TOKENS: Final = 16384
"""Prompts of token ids come in parts of so many tokens, too: checking one takes less time than the engine's steps for it."""
PARTS_AHEAD: Final = 4
"""Parts that wait tokenised, and parts that the engine has beside those: enough to keep it busy, few enough for the memory."""
POLL_SECONDS: Final = 0.001
"""How long an engine in another thread or process may keep a call that has more to submit."""

Parts = Generator[list[AddRequest] | None, bool | None, None]
PoolingPrompts = Any
"""A prompt as ``LLM.generate`` takes it, token ids as an array, or a list of these."""


class Pooled:
    """One call's groups, in the order of its prompts."""

    def __init__(self, groups: list[OpenPooling], pooling: PoolingInfo) -> None:
        self.groups = groups
        self.messages = [message for group in groups for message in group.messages]
        self.cached = [number for group in groups for number in group.cached]
        self._pooling = pooling

    def arrays(self) -> list[Floats]:
        """Of each prompt."""
        return [each for group in self.groups for each in group.arrays(self._pooling)]

    def vectors(self) -> list[Floats]:
        """Of each prompt, flat, as they came."""
        return [each for group in self.groups for each in group.vectors]


class PoolingRunner:
    """Runs pooling calls over one engine.

    Args:
        running: held while a call runs: one at a time.
    """

    def __init__(self, client: EngineClient, door: PoolingDoor, running: threading.Lock) -> None:
        self.door = door
        self._client, self._running = client, running
        self._processor = PoolingProcessor()

    def prompts(self, prompts: Sequence[object], wanted: Wanted, use_tqdm: bool) -> Pooled:
        """The vectors of prompts. Raises InvalidRequestError, RequestFailedError, EngineDeadError."""
        found_salts = salts(prompts)

        def messages(start: int, end: int) -> list[AddRequest]:
            ids = self.door.token_ids(prompts[start:end], wanted, start if len(prompts) > 1 else None)
            return self.door.messages(ids, wanted, salts=found_salts and found_salts[start:end])

        return self._run(len(prompts), messages, wanted, use_tqdm, ends=_ends(prompts))

    def pairs(self, job: ScoreJob, use_tqdm: bool) -> Pooled:
        """As ``prompts``, of a score job."""
        return self._run(1, lambda start, end: job.messages(), job.wanted, use_tqdm, job.num_requests)

    def _run(
        self,
        count: int,
        messages: Callable[[int, int], list[AddRequest]],
        wanted: Wanted,
        use_tqdm: bool,
        total: int | None = None,
        ends: Sequence[int] = (),
    ) -> Pooled:
        """``messages(start, end)`` of all ``count`` prompts, part by part, to the engine and back; ``ends`` see ``_ends``."""
        groups: list[OpenPooling] = []
        between = cast(Parts, (messages(start, end) for start, end in pairwise([0, *ends])))
        with self._running, _bar(total or count, use_tqdm and sys.stderr.isatty()) as advance:
            try:
                with contextlib.closing(between if ends else _ahead(count, messages)) as parts:
                    self._feed(parts, wanted, groups, advance)
            except BaseException:
                left = [name for group in groups for name in self._processor.drop(group)]
                with contextlib.suppress(EngineDeadError):
                    self._client.abort(left)
                raise
        for group in groups:
            group.check()
        return Pooled(groups, self.door.pooling)

    def _feed(
        self,
        parts: Parts,
        wanted: Wanted,
        groups: list[OpenPooling],
        advance: Callable[[int], None],
    ) -> None:
        num_open, more = 0, True
        while more or num_open:
            if more and sum(not group.finished for group in groups[-PARTS_AHEAD:]) < PARTS_AHEAD:
                try:
                    part = parts.send(num_open == 0) if groups else next(parts)
                except StopIteration:
                    part, more = None, False
                if part:
                    groups.append(self._processor.open(part, wanted, str(len(groups))))
                    num_open += len(part)
                    self._client.add(part)  # and its first step begins, before there is more
            if not num_open:
                continue
            updates = self._client.poll(POLL_SECONDS if more else None)
            before = num_open
            touched, _ = self._processor.apply(updates)
            if touched:
                num_open = sum(group.num_unfinished for group in groups)
                advance(before - num_open)
            if not updates and not self._client.has_work():
                raise EngineDeadError(f"the engine lost {num_open} requests")


def _ends(prompts: Sequence[object]) -> list[int]:
    """Where parts of prompts end that are all token ids; [] where one is something else. Such parts are made between the
    engine's steps: a thread that checks integers takes the interpreter's lock from them, for milliseconds each time."""
    ends: list[int] = []
    tokens = 0
    for place, prompt in enumerate(prompts):
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(ids, (list, tuple)) and not (isinstance(ids, np.ndarray) and ids.ndim):
            return []
        tokens += len(ids)
        if tokens >= PART_TOKENS or place + 1 - (ends[-1] if ends else 0) == PART_TEXTS:
            ends.append(place + 1)
            tokens = 0
    return ends if not prompts or ends[-1:] == [len(prompts)] else [*ends, len(prompts)]


def _ahead(count: int, messages: Callable[[int, int], list[AddRequest]]) -> Parts:
    """Parts, tokenised in a thread. What is sent in says whether to wait for the next; None: it is not there yet."""
    first = min(count, PART_TEXTS)
    if not count:
        return
    wait = yield messages(0, first)
    if first == count:
        return
    ready: queue.Queue[list[AddRequest] | BaseException | None] = queue.Queue(PARTS_AHEAD)
    stop = threading.Event()

    def work() -> None:
        last: BaseException | None = None
        try:
            for start in range(first, count, PART_TEXTS):
                if stop.is_set():
                    return
                ready.put(messages(start, min(start + PART_TEXTS, count)))
        except BaseException as error:
            last = error
        ready.put(last)

    thread = threading.Thread(target=work, name="headway-tokenising", daemon=True)
    thread.start()
    try:
        while True:
            try:
                part = ready.get(block=bool(wait))
            except queue.Empty:
                wait = yield None
                continue
            if isinstance(part, BaseException):
                raise part
            if part is None:
                return
            wait = yield part
    finally:
        stop.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                ready.get(timeout=0.01)
        thread.join()


@contextlib.contextmanager
def _bar(total: int, enabled: bool) -> Iterator[Callable[[int], None]]:
    if not enabled:
        yield lambda number: None
        return
    from tqdm import tqdm

    quiet = type("QuietBar", (tqdm,), {"monitor_interval": 0})  # a library leaves no monitor thread behind
    bar: Any = quiet(total=total, desc="Pooled prompts", dynamic_ncols=True)
    try:
        yield bar.update
    finally:
        bar.close()


def prompts_of(prompts: PoolingPrompts) -> list[Any]:
    """What the methods take, as a list of prompts. A flat list or array of integers is one prompt."""
    if isinstance(prompts, np.ndarray):
        if prompts.ndim == 1 and np.issubdtype(prompts.dtype, np.integer):
            return [prompts]
        return list(prompts) if prompts.ndim else [prompts.item()]
    if isinstance(prompts, (str, Mapping)) or is_token_ids(prompts):
        return [prompts]
    if isinstance(prompts, (list, tuple)):
        return list(prompts)
    raise InvalidRequestError(
        f"prompts must be a string, token ids, a dictionary or a list of these, got {type(prompts).__name__}", "prompt"
    )


class PoolingMethods:
    """``embed``, ``encode``, ``classify``, ``score`` and ``reward`` of an LLM, with vLLM's names and outputs.

    Outputs hold numpy arrays; Python lists are made when they are asked for. With ``as_numpy=True`` a method gives one
    float32 array instead of outputs.
    """

    _pooling: PoolingRunner

    @overload
    def embed(
        self, prompts: PoolingPrompts, *, use_tqdm: bool = ..., pooling_params: PoolingParams | None = ...,
        as_numpy: Literal[False] = ...,
    ) -> list[EmbeddingRequestOutput]: ...  # fmt: skip
    @overload
    def embed(
        self, prompts: PoolingPrompts, *, use_tqdm: bool = ..., pooling_params: PoolingParams | None = ...,
        as_numpy: Literal[True],
    ) -> Floats: ...  # fmt: skip
    def embed(
        self,
        prompts: PoolingPrompts,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        as_numpy: bool = False,
    ) -> list[EmbeddingRequestOutput] | Floats:
        """One vector for each prompt, in their order.

        Args:
            prompts: a string, token ids (a list or an array), ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}`` (both take
                a "cache_salt"), or a list of these.
            use_tqdm: show progress on stderr if that is a terminal.
            as_numpy: give one array, float32 [prompts, width].

        Raises:
            InvalidRequestError: a prompt cannot be served; none is then.
            RequestFailedError: one failed inside the engine.
            EngineDeadError: the engine stopped.
        """
        return self._one_each(prompts, Task.EMBED, pooling_params, use_tqdm, as_numpy)

    @overload
    def classify(
        self, prompts: PoolingPrompts, *, use_tqdm: bool = ..., pooling_params: PoolingParams | None = ...,
        text_pair: str | Sequence[str] | None = ..., as_numpy: Literal[False] = ...,
    ) -> list[ClassificationRequestOutput]: ...  # fmt: skip
    @overload
    def classify(
        self, prompts: PoolingPrompts, *, use_tqdm: bool = ..., pooling_params: PoolingParams | None = ...,
        text_pair: str | Sequence[str] | None = ..., as_numpy: Literal[True],
    ) -> Floats: ...  # fmt: skip
    def classify(
        self,
        prompts: PoolingPrompts,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        text_pair: str | Sequence[str] | None = None,
        as_numpy: bool = False,
    ) -> list[ClassificationRequestOutput] | Floats:
        """Numbers of the model's labels (``model_info.pooling.labels``) for each prompt; as ``embed``.

        Args:
            text_pair: second texts of pairs that the model reads at once, such as an NLI model's hypotheses: as many as there
                are prompts (texts), or for one prompt any number.
        """
        if text_pair is None:
            return self._one_each(prompts, Task.CLASSIFY, pooling_params, use_tqdm, as_numpy)
        job = pair_job(self._pooling.door, prompts, text_pair, pooling_params)
        return self._made(self._pooling.pairs(job, use_tqdm), Task.CLASSIFY, as_numpy)

    def encode(
        self,
        prompts: PoolingPrompts,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: Task | str | None = None,
    ) -> list[AnyPoolingOutput]:
        """Whatever ``pooling_task`` gives, as arrays: float32 [width], or [tokens, width] of "token_embed" and
        "token_classify".

        Args:
            pooling_task: may be left out where the model serves one task only.

        Raises:
            as ``embed``.
        """
        task = task_of(pooling_task, self._pooling.door)
        return self._one_each(prompts, task, pooling_params, use_tqdm, False, plain=True)

    def embed_sparse(
        self, prompts: PoolingPrompts, *, use_tqdm: bool = True, pooling_params: PoolingParams | None = None
    ) -> list[SparseVector]:
        """Entries of the vocabulary and their weights for each prompt, of models that make them (SPLADE, BGE-M3)."""
        door = self._pooling.door
        wanted = door.wanted(pooling_params, sparse_task(door))
        pooled = self._pooling.prompts(prompts_of(prompts), wanted, use_tqdm)
        return sparse_vectors(door, pooled.arrays(), [message.prompt_token_ids for message in pooled.messages])

    def reward(
        self, prompts: PoolingPrompts, *, use_tqdm: bool = True, pooling_params: PoolingParams | None = None
    ) -> list[AnyPoolingOutput]:
        """What a reward model says of each prompt: [width], or for process reward models [steps, width]."""
        tasks = self._pooling.door.info.tasks
        task = Task.TOKEN_CLASSIFY if Task.TOKEN_CLASSIFY in tasks else Task.CLASSIFY
        return self._one_each(prompts, task, pooling_params, use_tqdm, False, plain=True)

    @overload
    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], /, *, truncate_prompt_tokens: int | None = ...,
        use_tqdm: bool = ..., pooling_params: PoolingParams | None = ..., instruction: str | None = ...,
        as_numpy: Literal[False] = ...,
    ) -> list[ScoringRequestOutput]: ...  # fmt: skip
    @overload
    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], /, *, truncate_prompt_tokens: int | None = ...,
        use_tqdm: bool = ..., pooling_params: PoolingParams | None = ..., instruction: str | None = ...,
        as_numpy: Literal[True],
    ) -> Floats: ...  # fmt: skip
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        as_numpy: bool = False,
    ) -> list[ScoringRequestOutput] | Floats:
        """How well texts fit together: of (data_1[i], data_2[i]), or of one data_1 with every data_2.

        A cross-encoder reads both texts at once; other models make a vector of each, which are compared as their makers say
        (cosine, if they say nothing), or vectors of all tokens (ColBERT's MaxSim).

        Args:
            truncate_prompt_tokens: as of ``PoolingParams``; the longer text of a pair is cut first.
            instruction: for rerankers whose input has one; None: the model's own.
            as_numpy: give one array, float32 [pairs].

        Raises:
            as ``embed``.
        """
        params = pooling_params
        if truncate_prompt_tokens is not None:
            params = _truncating(params, truncate_prompt_tokens)
        job = score_job(self._pooling.door, data_1, data_2, params, instruction)
        pooled = self._pooling.pairs(job, use_tqdm)
        scores = job.scores(pooled.vectors())
        return scores if as_numpy else scoring_outputs(job, scores, pooled.messages, pooled.cached)

    def _one_each(
        self,
        prompts: PoolingPrompts,
        task: Task,
        params: PoolingParams | None,
        use_tqdm: bool,
        as_numpy: bool,
        plain: bool = False,
    ) -> Any:
        door = self._pooling.door
        wanted = door.wanted(params, task)
        listed: list[Prompt] = prompts_of(prompts)
        return self._made(self._pooling.prompts(listed, wanted, use_tqdm), task, as_numpy, plain)

    def _made(self, pooled: Pooled, task: Task, as_numpy: bool, plain: bool = False) -> Any:
        arrays = pooled.arrays()
        if as_numpy:
            return np.stack(arrays) if arrays else np.empty((0, self._pooling.door.pooling.width), np.float32)
        return request_outputs(task, arrays, pooled.messages, pooled.cached, plain)


def _truncating(params: PoolingParams | None, truncate: int) -> PoolingParams:
    if params is not None and params.truncate_prompt_tokens not in (None, truncate):
        raise InvalidRequestError("truncate_prompt_tokens is given twice", "truncate_prompt_tokens")
    return replace(params or PoolingParams(), truncate_prompt_tokens=truncate)
