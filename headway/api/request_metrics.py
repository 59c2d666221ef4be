"""What the front end measures of requests: plain numbers, added up where updates arrive.

Each of a request's ``n`` completions counts as a request here, as in vLLM. An interval between tokens is observed once for
each delivery to a completion, however many tokens it brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headway.core.histogram import Histogram
from headway.core.task import Task

if TYPE_CHECKING:
    from headway.api.output_processor import OpenCompletion, OpenRequest
    from headway.api.pooling.requests import OpenPooling
    from headway.core.messages import RequestUpdate

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
FAST_TOKEN_BOUNDS = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075)
"""Below vLLM's first bucket of 10 ms, where most of our intervals lie."""
NEXT_TOKEN_BOUNDS = (
    *FAST_TOKEN_BOUNDS,
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
SHORT_WAIT_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Below vLLM's first bucket of 0.3 s."""
REQUEST_BOUNDS = (
    *SHORT_WAIT_BOUNDS,
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
COUNT_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
FINISH_REASONS = ("stop", "length", "abort", "error")


def token_bounds(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``most`` tokens."""
    powers = range(len(str(most)))
    return tuple(bound for power in powers for base in (1, 2, 5) if (bound := base * 10**power) <= most)


class RequestObserver(Protocol):
    """Somebody else who wants to know of requests, a tracer for one. Called in the event loop; must not block or raise."""

    def opened(self) -> object:
        """A request begins, in the context of its caller. What this returns is kept as its ``trace``."""

    def ended(self, request: OpenRequest | OpenPooling, now: float) -> None:
        """All its completions have ended, at ``now`` (monotonic seconds)."""


class RequestMetrics:
    """Histograms in seconds or tokens, and finished requests by reason.

    Args:
        max_model_len: the largest number of tokens a request can have.

    Attributes:
        observer: see RequestObserver; None: there is none.
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.first_token = Histogram.over(FIRST_TOKEN_BOUNDS)
        self.next_token, self.per_token = Histogram.over(NEXT_TOKEN_BOUNDS), Histogram.over(NEXT_TOKEN_BOUNDS)
        self.whole, self.queue, self.prefill, self.decode, self.inference = (
            Histogram.over(REQUEST_BOUNDS) for _ in range(5)
        )
        self.prompt_tokens, self.generation_tokens, self.max_tokens = (Histogram.over(tokens) for _ in range(3))
        self.n = Histogram.over(COUNT_BOUNDS)
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.tasks: dict[str, int] = {}
        """Finished requests that pool, by task."""
        self.observer: RequestObserver | None = None

    def took(self, request: OpenRequest, completion: OpenCompletion, update: RequestUpdate, now: float) -> None:
        """An update arrived at ``now`` (monotonic seconds). Called before the completion takes it."""
        if update.queue_seconds is not None:
            completion.queue_seconds = update.queue_seconds
        if completion.last_token_at == now or not update.new_token_ids:
            return  # an earlier update of the same delivery has been observed
        if completion.last_token_at is None:
            completion.first_token_at = now
            self.first_token.observe(now - request.arrived)
        else:
            self.next_token.observe(now - completion.last_token_at)
        completion.last_token_at = now

    def pooled(self, task: Task, tokens: int, seconds: float, queued: float | None, reason: str) -> None:
        """A request that pools has ended, ``seconds`` after its arrival."""
        self.finished[reason] += 1
        self.tasks[task.value] = self.tasks.get(task.value, 0) + 1
        self.whole.observe(seconds)
        self.prompt_tokens.observe(tokens)
        if queued is not None:
            self.queue.observe(queued)
            self.inference.observe(max(seconds - queued, 0.0))

    def ended(self, request: OpenRequest, completion: OpenCompletion, now: float) -> None:
        """A completion has its finish reason."""
        self.finished[completion.finish_reason or "error"] += 1
        whole = now - request.arrived
        self.whole.observe(whole)
        self.prompt_tokens.observe(len(request.prepared.prompt_token_ids))
        self.generation_tokens.observe(len(completion.token_ids))
        params = request.prepared.children[completion.index].params
        if params.max_tokens is not None:
            self.max_tokens.observe(params.max_tokens)
        if completion.index == 0:
            self.n.observe(len(request.completions))
        queued, first = completion.queue_seconds, completion.first_token_at
        if queued is None or first is None:
            return  # it ended before it began
        last = first if completion.last_token_at is None else completion.last_token_at
        self.queue.observe(queued)
        self.prefill.observe(max(first - request.arrived - queued, 0.0))
        self.decode.observe(last - first)
        self.inference.observe(max(last - request.arrived - queued, 0.0))
        if len(completion.token_ids) > 1:
            self.per_token.observe((last - first) / (len(completion.token_ids) - 1))
