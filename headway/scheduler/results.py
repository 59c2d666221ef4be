"""What a finished step means for its requests: tokens, log-probabilities, ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError
from headway.core.messages import AddRequest, RequestUpdate, TokenLogprobsRow
from headway.core.plan import Finish, LogprobsResult, StepPlan, StepResult
from headway.scheduler.lifecycle import Lifecycle
from headway.scheduler.request import Request, Status
from headway.scheduler.slots import Rows

FINISH_REASONS = {Finish.EOS: "stop", Finish.STOP_TOKEN: "stop", Finish.LENGTH: "length"}


def no_token_left(request: AddRequest) -> tuple[str, str | None]:
    """What to say, and the request's field at fault, when nothing was left to draw."""
    given = {
        "structured_outputs": request.automaton is not None or request.host_grammar is not None,
        "allowed_token_ids": request.params.allowed_token_ids is not None,
        "bad_words": bool(request.bad_words_token_ids),
        "min_tokens": request.params.min_tokens > 0,
    }
    narrowing = [name for name, is_given in given.items() if is_given]
    if not narrowing:
        return "no token could be drawn: the model's logits hold no number", None
    return f"no token was left that {', '.join(narrowing)} allow together; loosen them", narrowing[0]


def logprobs_row(result: LogprobsResult, i: int) -> TokenLogprobsRow:
    """Position ``i`` of a result, cut to its valid entries. Raises HeadwayError when it has none."""
    count = int(result.counts[i])
    if count < 1:
        raise HeadwayError("the step brought no log-probabilities for a row that asked for them")
    return TokenLogprobsRow(
        result.token_ids[i, :count].tolist(), result.logprobs[i, :count].tolist(), int(result.ranks[i])
    )


class Collector:
    """Applies results to the requests and makes their updates."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._table = life.table
        self.prompt_tokens = 0
        self.generation_tokens = 0

    def apply(self, plan: StepPlan, rows: Rows, result: StepResult) -> list[RequestUpdate]:
        """Updates in row order; then those of rows whose request no longer owns the row's slot, in row order.

        Rows of finished requests are ignored: zombies, and rows of requests aborted meanwhile.
        """
        updates: list[RequestUpdate] = []
        for row in sorted(result.prompt_logprobs):
            request = rows.requests[row]
            if request.status is not Status.FINISHED:
                try:
                    self._collect_prompt(request, int(plan.starts_bound[row]), result.prompt_logprobs[row])
                except Exception as error:
                    updates.append(self.fail(request, str(error)))
        live = self._table.epoch[rows.index] == rows.epochs
        live_rows = np.arange(len(rows)) if live.all() else np.flatnonzero(live)
        self._table.in_flight[rows.index[live_rows]] -= 1
        missing = plan.samples[live_rows] & ~result.sampled[live_rows]
        if missing.any():
            for row in live_rows[missing].tolist():
                updates.append(self.fail(rows.requests[row], "the device ended the request without saying why"))
            live_rows = live_rows[~missing]
        updates += self._apply_live(rows, result, live_rows[plan.samples[live_rows]])
        if not live.all():
            for row in np.flatnonzero(~live).tolist():
                update = self._apply_detached(rows.requests[row], row, bool(plan.samples[row]), result)
                if update is not None:
                    updates.append(update)
        return updates

    def fail(self, request: Request, message: str) -> RequestUpdate:
        """Ends one request with an error."""
        self._life.finish(request)
        return RequestUpdate(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason="error",
            error=message,
            num_cached_tokens=0 if request.reported else request.cached_tokens or 0,
        )

    # -- rows whose request still owns the slot ------------------------------------------------------------------

    def _apply_live(self, rows: Rows, result: StepResult, picked: npt.NDArray[np.int64]) -> list[RequestUpdate]:
        """``picked``: int64 [n], rows that sampled, ascending."""
        if not len(picked):
            return []
        table = self._table
        whole = len(picked) == len(rows)
        slots = rows.index if whole else rows.index[picked]
        tokens = result.token_ids if whole else result.token_ids[picked]
        known = table.known[slots]
        table.history[slots, known] = tokens
        table.known[slots] = known + 1
        order = picked.tolist()
        ids = rows.ids if whole else [rows.ids[row] for row in order]
        updates = [
            RequestUpdate(request_id=request_id, new_token_ids=[token])
            for request_id, token in zip(ids, tokens.tolist(), strict=True)
        ]
        self.generation_tokens += len(updates)
        if self._life.kv.caching:
            # The new token's own KV is not written yet: ``known`` tokens are, the one before it included.
            for i in np.flatnonzero(known % self._life.kv.block_size == 0).tolist():
                request = rows.requests[order[i]]
                self._life.kv.register(request, table.history[request.slot], int(known[i]))
        for i in np.flatnonzero(table.special[slots]).tolist():
            request = rows.requests[order[i]]
            updates[i] = self._decorate(request, updates[i], result, order[i])
            table.special[slots[i]] = request.wants_logprobs
        finish = result.finish if whole else result.finish[picked]
        for i in np.flatnonzero(finish).tolist():
            self._end(rows.requests[order[i]], updates[i], int(finish[i]))
        return updates

    # -- rows whose request was preempted, is draining or is over --------------------------------------------------

    def _apply_detached(self, request: Request, row: int, samples: bool, result: StepResult) -> RequestUpdate | None:
        if request.status is Status.FINISHED:
            return None
        request.in_flight -= 1
        if not samples:
            return None
        if not result.sampled[row]:
            return self.fail(request, "the device ended the request without saying why")
        token = int(result.token_ids[row])
        request.tokens = np.append(request.tokens, np.int32(token))
        self.generation_tokens += 1
        update = RequestUpdate(request_id=request.request_id, new_token_ids=[token])
        if request.wants_logprobs or not request.reported:
            update = self._decorate(request, update, result, row)
        finish = int(result.finish[row])
        if finish:
            self._end(request, update, finish)
        elif request.status is Status.DRAINING and not request.in_flight:
            return self.fail(request, "the device did not end the request at its last token")
        return update

    # -- both ----------------------------------------------------------------------------------------------------

    def _end(self, request: Request, update: RequestUpdate, finish: int) -> None:
        if request.status is Status.FINISHED:  # it failed while this update was made
            return
        code = Finish(finish)
        if code is Finish.NO_TOKEN:
            update.new_token_ids, update.new_logprobs = [], None
            update.finish_reason = "error"
            update.error, update.error_parameter = no_token_left(request.message)
            self._life.finish(request)
            return
        update.finish_reason = FINISH_REASONS[code]
        if code is Finish.STOP_TOKEN:
            update.stop_token_id = update.new_token_ids[0]
        self._life.finish(request)

    def _decorate(self, request: Request, update: RequestUpdate, result: StepResult, row: int) -> RequestUpdate:
        """Adds what a first update or log-probabilities bring; a request this raises for fails alone."""
        try:
            if request.wants_logprobs:
                if result.logprobs is None:
                    raise HeadwayError("the step brought no log-probabilities although a row asked for them")
                update.new_logprobs = [logprobs_row(result.logprobs, row)]
            if not request.reported:
                update.num_cached_tokens = request.cached_tokens or 0
                update.new_prompt_logprobs = self._whole_prompt(request)
                self.prompt_tokens += request.prompt_len
                request.reported = True
        except Exception as error:
            return self.fail(request, str(error))
        return update

    def _whole_prompt(self, request: Request) -> list[TokenLogprobsRow] | None:
        rows = request.prompt_rows
        if rows is not None and len(rows) != request.prompt_len - 1:
            raise HeadwayError(f"{len(rows)} prompt log-probabilities came for {request.prompt_len} prompt tokens")
        return rows

    def _collect_prompt(self, request: Request, start: int, result: LogprobsResult) -> None:
        """Keeps positions start+1, start+2, ...; those computed before a preemption are already there."""
        rows = request.prompt_rows
        if rows is None:
            return
        done = len(rows)
        if start > done:
            raise HeadwayError(f"prompt log-probabilities of positions {done + 1}..{start} never came")
        for i in range(done - start, len(result.counts)):
            if len(rows) < request.prompt_len - 1:
                rows.append(logprobs_row(result, i))
