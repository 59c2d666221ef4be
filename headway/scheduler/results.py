"""What a finished step means for its requests: tokens, log-probabilities, ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError
from headway.core.messages import AddRequest, RequestUpdate, StepUpdates, TokenLogprobsRow
from headway.core.plan import Finish, LogprobsResult, StepPlan, StepResult
from headway.scheduler.lifecycle import Lifecycle
from headway.scheduler.request import Request, Status
from headway.scheduler.slots import Int64s, Rows

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


NO_LOGPROBS = "the step brought no log-probabilities for a row that asked for them"


def logprobs_rows(result: LogprobsResult | None, positions: list[int]) -> list[TokenLogprobsRow | None]:
    """Some positions of a result, ascending, each cut to its valid entries; None for one that has none."""
    if result is None or not positions:
        return [None] * len(positions)
    wanted = positions if len(positions) < len(result.counts) else slice(None)
    columns = (result.token_ids, result.logprobs, result.ranks, result.counts)
    rows, width = zip(*(each[wanted].tolist() for each in columns), strict=True), result.token_ids.shape[1]
    return [TokenLogprobsRow(i, v, rank) if n == width else _cut(i, v, rank, n) for i, v, rank, n in rows]


def _cut(ids: list[int], values: list[float], rank: int, count: int) -> TokenLogprobsRow | None:
    return TokenLogprobsRow(ids[:count], values[:count], rank) if count > 0 else None


def _nonzero(values: npt.NDArray[Any]) -> list[int]:
    """Where ``values`` are not zero. The method: numpy's function of that name comes in three layers of Python."""
    return values.nonzero()[0].tolist()


def _token_update(request_id: str, token: int) -> RequestUpdate:
    return RequestUpdate(request_id=request_id, new_token_ids=[token])


class Collector:
    """Applies results to the requests and makes their updates."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._table = life.table
        self.prompt_tokens = 0
        self.generation_tokens = 0

    def apply(self, plan: StepPlan, rows: Rows, result: StepResult) -> StepUpdates:
        """Updates in row order; then failures, and those of rows whose request no longer owns the row's slot.

        Rows of finished requests are ignored: zombies, and rows of requests aborted meanwhile.
        """
        others: list[RequestUpdate] = []
        for row in sorted(result.prompt_logprobs):
            request = rows.requests[row]
            if request.status is not Status.FINISHED:
                try:
                    self._collect_prompt(request, int(plan.starts_bound[row]), result.prompt_logprobs[row])
                except Exception as error:
                    others.append(self.fail(request, str(error)))
        num_sampled = np.count_nonzero(result.sampled)
        if rows.num_closed == self._table.num_closed and plan.num_decode_rows == num_sampled == len(rows):
            self._table.in_flight[rows.index] -= 1
            updates = self._apply_live(rows, result, None)  # as almost always: all rows are live, and have sampled
        else:
            updates = self._apply_mixed(plan, rows, result, others)
        updates.add(others)
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

    def _apply_mixed(self, plan: StepPlan, rows: Rows, result: StepResult, others: list[RequestUpdate]) -> StepUpdates:
        """Rows that sampled and whose request still owns the slot; those of the others' are added to ``others``."""
        live = self._table.epoch[rows.index] == rows.epochs
        self._table.in_flight[rows.index[live]] -= 1
        picked = live & plan.samples
        for row in _nonzero(picked & ~result.sampled):
            others.append(self.fail(rows.requests[row], "the device ended the request without saying why"))
        sampled = (picked & result.sampled).nonzero()[0]
        updates = self._apply_live(rows, result, sampled) if len(sampled) else StepUpdates()
        for row in _nonzero(~live):
            update = self._apply_detached(rows.requests[row], row, bool(plan.samples[row]), result)
            if update is not None:
                others.append(update)
        return updates

    # -- rows whose request still owns the slot ------------------------------------------------------------------

    def _apply_live(self, rows: Rows, result: StepResult, picked: Int64s | None) -> StepUpdates:
        """``picked``: int64 [n], rows that sampled, ascending; None: all."""
        table = self._table
        slots, ids, requests, tokens, finish = rows.index, rows.ids, rows.requests, result.token_ids, result.finish
        order: Sequence[int] = range(len(rows))
        if picked is not None:
            order = picked.tolist()
            slots, tokens, finish = slots[picked], tokens[picked], finish[picked]
            ids, requests = [ids[row] for row in order], [requests[row] for row in order]
        known = table.known[slots]
        table.history[slots, known] = tokens
        table.known[slots] = known + 1
        updates = StepUpdates(ids, tokens.tolist())
        self.generation_tokens += len(ids)
        if self._life.kv.caching:
            # The new token's own KV is not written yet: ``known`` tokens are, the one before it included.
            for i in _nonzero(known % self._life.kv.block_size == 0):
                self._life.kv.register(requests[i], table.history[requests[i].slot], int(known[i]))
        more = updates.more
        special = _nonzero(table.special[slots])
        asking = [i for i in special if requests[i].wants_logprobs]
        told = dict(zip(asking, logprobs_rows(result.logprobs, [order[i] for i in asking]), strict=True))
        for i in special:
            request = requests[i]
            if not request.says_more:  # only its first update does, which is this one
                table.special[slots[i]] = False
            more[i] = self._decorate(request, _token_update(ids[i], updates.token_ids[i]), told.get(i))
        for i in _nonzero(finish):
            if i not in more:
                more[i] = _token_update(ids[i], updates.token_ids[i])
            self._end(requests[i], more[i], int(finish[i]))
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
        update = _token_update(request.request_id, token)
        if request.wants_logprobs or not request.reported:
            update = self._decorate(request, update, logprobs_rows(result.logprobs, [row])[0])
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

    def _decorate(self, request: Request, update: RequestUpdate, told: TokenLogprobsRow | None) -> RequestUpdate:
        """Adds what a first update or log-probabilities bring; a request this raises for fails alone."""
        try:
            if request.wants_logprobs:
                if told is None:
                    raise HeadwayError(NO_LOGPROBS)
                update.new_logprobs = [told]
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
        end = min(len(result.counts), request.prompt_len - 1 - start)
        for told in logprobs_rows(result, list(range(done - start, end))):
            if told is None:
                raise HeadwayError(NO_LOGPROBS)
            rows.append(told)
