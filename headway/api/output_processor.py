"""Engine updates to what users see: text, log-probabilities, finish reasons; ``n`` completions merged into one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, repeat
from time import monotonic
from typing import TYPE_CHECKING, cast

from headway.api.detokenizer import Detokenizer
from headway.api.inputs import PreparedRequest
from headway.api.request_metrics import RequestMetrics
from headway.core.messages import RequestUpdate, TokenLogprobsRow
from headway.core.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from headway.core.params import SamplingParams

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer


class OpenCompletion:
    """One completion as it grows. ``RequestMetrics`` keeps its times here: monotonic seconds, None until they happen."""

    def __init__(self, index: int, request_id: str, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        params = prepared.params
        self.index = index
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.cumulative_logprob: float | None = None
        if params.logprobs is not None or params.logprob_token_ids is not None:
            self.logprobs, self.cumulative_logprob = [], 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prepared.prompt_token_ids, params)
        self._sent_chars = self._sent_tokens = 0
        self._sent_finish = False
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.queue_seconds: float | None = None

    def apply(self, update: RequestUpdate) -> bool:
        """Take an update; True when a stop string ended the completion while the engine still runs it."""
        detokenizer = self._detokenizer
        before = detokenizer.num_tokens
        reason = cast("FinishReason | None", update.finish_reason)
        stopped = detokenizer.push(update.new_token_ids, ended_by_token=reason == "stop")
        if reason is not None and not stopped:
            stopped = detokenizer.finish()
        taken = detokenizer.num_tokens - before
        self.token_ids += update.new_token_ids[:taken]
        self._take_logprobs(update.new_logprobs or [], taken)
        if stopped:
            self.finish_reason, self.stop_reason = "stop", detokenizer.stop
        elif reason is not None:
            self.finish_reason, self.stop_reason = reason, update.stop_token_id
        return stopped and reason is None

    def _take_logprobs(self, rows: list[TokenLogprobsRow], taken: int) -> None:
        if self.logprobs is None or self.cumulative_logprob is None:
            return
        for row in rows[:taken]:
            self.logprobs.append(logprobs_dict(row, self._params, self._tokenizer))
            self.cumulative_logprob += row.logprobs[0]

    def abort(self) -> None:
        """End it here, keeping what there is."""
        self._detokenizer.finish()
        self.finish_reason = "abort"

    def changed(self) -> bool:
        """Whether ``delta`` has something new to say."""
        news = len(self.token_ids) > self._sent_tokens or len(self._detokenizer.text) > self._sent_chars
        return news or (self.finish_reason is not None and not self._sent_finish)

    def output(self, delta: bool) -> CompletionOutput:
        """All of it, or only what was not in an earlier delta."""
        text = self._detokenizer.text
        chars, tokens = (self._sent_chars, self._sent_tokens) if delta else (0, 0)
        if delta:
            self._sent_chars, self._sent_tokens = len(text), len(self.token_ids)
            self._sent_finish = self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=text[chars:],
            token_ids=self.token_ids[tokens:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class OpenRequest:
    """One prompt with its completions.

    Attributes:
        request_id: what the caller knows it by; need not be unique.
        num_unfinished: completions still running.
        arrived: when the caller asked, monotonic seconds; whoever knows of an earlier moment sets it.
        trace: whatever the metrics' observer gave for it.
    """

    def __init__(self, prepared: PreparedRequest, request_id: str, tokenizer: Tokenizer | None) -> None:
        self.request_id = request_id
        self.arrived = monotonic()
        self.trace: object = None
        self.prepared = prepared
        self.completions = [
            OpenCompletion(i, child.request_id, prepared, tokenizer) for i, child in enumerate(prepared.children)
        ]
        self.num_unfinished = len(self.completions)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.error_parameter: str | None = None
        self.aligned: list[int] | None = None
        self._sent_prompt_logprobs = False
        if prepared.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def num_generated(self) -> int:
        """Tokens of all completions so far."""
        return sum(len(completion.token_ids) for completion in self.completions)

    def unfinished_ids(self) -> list[str]:
        """Ids by which the engine knows the completions still running."""
        return [c.request_id for c in self.completions if c.finish_reason is None]

    def snapshot(self) -> RequestOutput:
        """Everything so far (lists are copies)."""
        prompt_logprobs = None if self.prompt_logprobs is None else list(self.prompt_logprobs)
        return self._output([c.output(delta=False) for c in self.completions], prompt_logprobs)

    def delta(self) -> RequestOutput:
        """What came since the last delta: changed completions only; prompt log-probabilities with the first of them.

        Not before: chunks of a prompt bring log-probabilities although there is nothing to deliver yet.
        """
        changed = [c.output(delta=True) for c in self.completions if c.changed()]
        rows = None
        if changed and not self._sent_prompt_logprobs:
            rows, self._sent_prompt_logprobs = self.prompt_logprobs, True
        return self._output(changed, rows)

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[TokenLogprobs | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.prepared.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            error_parameter=self.error_parameter,
            aligned=self.aligned,
        )


class OutputProcessor:
    """Keeps the open requests and routes updates to them. Not thread-safe: one thread (or event loop) owns it.

    Args:
        metrics: where requests are measured; None measures nothing.
    """

    def __init__(self, tokenizer: Tokenizer | None, metrics: RequestMetrics | None = None) -> None:
        self._tokenizer, self._metrics = tokenizer, metrics
        self._open: dict[str, tuple[OpenRequest, OpenCompletion]] = {}

    def open(self, prepared: PreparedRequest, request_id: str) -> OpenRequest:
        """Begin to follow a request."""
        request = OpenRequest(prepared, request_id, self._tokenizer)
        for completion in request.completions:
            self._open[completion.request_id] = (request, completion)
        if self._metrics is not None and self._metrics.observer is not None:
            request.trace = self._metrics.observer.opened()
        return request

    def requests(self) -> list[OpenRequest]:
        """Every request with a running completion."""
        return list({id(request): request for request, _ in self._open.values()}.values())

    def apply(self, updates: Iterable[RequestUpdate]) -> tuple[list[OpenRequest], list[str]]:
        """Take updates, in order; updates of requests no longer followed are ignored.

        Returns:
            (requests that changed, ids that the engine should abort because a stop string ended them).
        """
        touched: dict[int, OpenRequest] = {}
        aborts: list[str] = []
        metrics, now = self._metrics, monotonic()
        for update in updates:
            request, completion = self._open.get(update.request_id, (None, None))
            if request is None or completion is None:
                continue
            touched[id(request)] = request
            self._apply_to_request(request, update, first=completion.index == 0)
            if metrics is not None:
                metrics.took(request, completion, update, now)
            if completion.apply(update):
                aborts.append(update.request_id)
            if completion.finish_reason is not None:
                del self._open[update.request_id]
                request.num_unfinished -= 1
                self._ended(request, completion, now)
        return list(touched.values()), aborts

    def _apply_to_request(self, request: OpenRequest, update: RequestUpdate, first: bool) -> None:
        if first:
            request.num_cached_tokens = max(request.num_cached_tokens, update.num_cached_tokens)
        if update.new_prompt_logprobs and request.prompt_logprobs is not None:
            params = request.prepared.params
            request.prompt_logprobs += [logprobs_dict(r, params, self._tokenizer) for r in update.new_prompt_logprobs]
        if update.aligned is not None:
            request.aligned = update.aligned
        if update.finish_reason == "error":
            request.error = update.error or "the request failed inside the engine"
            request.error_parameter = update.error_parameter

    def drop(self, request: OpenRequest) -> list[str]:
        """Stop following a request: running completions end with "abort". Returns the ids to abort in the engine."""
        ids = request.unfinished_ids()
        now = monotonic()
        for completion in request.completions:
            if completion.finish_reason is None:
                completion.abort()
                del self._open[completion.request_id]
                request.num_unfinished -= 1
                self._ended(request, completion, now)
        return ids

    def _ended(self, request: OpenRequest, completion: OpenCompletion, now: float) -> None:
        if self._metrics is not None:
            self._metrics.ended(request, completion, now)
            if request.finished and self._metrics.observer is not None:
                self._metrics.observer.ended(request, now)


def logprobs_dict(row: TokenLogprobsRow, params: SamplingParams, tokenizer: Tokenizer | None) -> TokenLogprobs:
    """One position: the chosen token first, then the others with ranks 1, 2, ... (None where ids were asked for)."""
    ids, values = row.token_ids, row.logprobs
    ranks = count() if params.logprob_token_ids is None else repeat(None)
    if tokenizer is None or not params.detokenize:
        result = dict(zip(ids, map(Logprob, values, ranks)))
    else:
        result = dict(zip(ids, map(Logprob, values, ranks, map(tokenizer.token_text, ids))))
    chosen = result[ids[0]]  # its second entry, if it is among the others
    result[ids[0]] = Logprob(values[0], row.rank, chosen.decoded_token)
    return result
