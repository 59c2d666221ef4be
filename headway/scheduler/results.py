"""What a finished step means for its requests: tokens, log-probabilities, ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError
from headway.core.messages import AddRequest, RequestUpdate, StepUpdates, TokenLogprobsRow
from headway.core.plan import Exact, Finish, Int32s, LogprobsResult, StepPlan, StepResult
from headway.scheduler.drafts import DraftCounts
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


def _vectors_of(request: Request, row: int, result: StepResult) -> bytes | None:
    """What a request gets whose text ends in this row; None: nothing came."""
    if not request.by_token:
        return None if result.vectors is None else result.vectors[row].tobytes()
    if sum(map(len, request.pooled)) != request.prompt_len:
        return None
    return np.concatenate(request.pooled)[request.message.pool_start :].tobytes()


def _nonzero(values: npt.NDArray[Any]) -> list[int]:
    """Where ``values`` are not zero. The method: numpy's function of that name comes in three layers of Python."""
    return values.nonzero()[0].tolist()


def _token_update(request_id: str, token: int) -> RequestUpdate:
    return RequestUpdate(request_id=request_id, new_token_ids=[token])


class Collector:
    """Applies results to the requests and makes their updates.

    Args:
        width: most tokens of a decode row.
    """

    def __init__(self, life: Lifecycle, width: int = 1) -> None:
        self._life = life
        self._table = life.table
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.drafts = DraftCounts(width)

    def apply(self, plan: StepPlan, rows: Rows, result: StepResult) -> StepUpdates:
        """Updates in row order; then failures, and those of rows whose request no longer owns the row's slot.

        Rows of finished requests are ignored: zombies, and rows of requests aborted meanwhile.
        """
        if plan.pools:
            return self._apply_pooled(plan, rows, result)
        self.drafts.take(plan, result)
        others: list[RequestUpdate] = []
        for row in sorted(result.prompt_logprobs):
            request = rows.requests[row]
            if request.status is not Status.FINISHED:
                try:
                    self._collect_prompt(request, int(plan.starts_bound[row]), result.prompt_logprobs[row])
                except Exception as error:
                    others.append(self.fail(request, str(error)))
        for row, starts in result.aligned.items():
            rows.requests[row].aligned = starts.tolist()
        num_sampled = np.count_nonzero(result.counts)
        if rows.num_closed == self._table.num_closed and plan.num_decode_rows == num_sampled == len(rows):
            self._table.in_flight[rows.index] -= 1
            updates = self._apply_live(
                plan, rows, result, None
            )  # as almost always: all rows are live, and have sampled
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
        has_sampled = result.counts > 0
        for row in _nonzero(picked & ~has_sampled):
            others.append(self.fail(rows.requests[row], "the device ended the request without saying why"))
        sampled = (picked & has_sampled).nonzero()[0]
        updates = self._apply_live(plan, rows, result, sampled) if len(sampled) else StepUpdates()
        for row in _nonzero(~live):
            update = self._apply_detached(rows.requests[row], row, bool(plan.samples[row]), result)
            if update is not None:
                others.append(update)
        return updates

    def _apply_pooled(self, plan: StepPlan, rows: Rows, result: StepResult) -> StepUpdates:
        """Rows that ended their texts bring their vectors, which ends their requests; the others bring nothing yet."""
        owning = rows.epochs == self._table.epoch[rows.index]
        self._table.in_flight[rows.index[owning]] -= 1
        updates: list[RequestUpdate] = []
        pooled: list[int] = []  # rows that bring a vector and nothing else
        ends = plan.query_lens.cumsum() if plan.token_vectors else None
        going_on, ours = (~plan.samples).tolist(), owning.tolist()
        for row, request in enumerate(rows.requests):
            if request.status is Status.FINISHED:  # aborted, or failed
                continue
            if not ours[row]:
                request.in_flight -= 1
            if request.by_token and ends is not None:
                self._keep_tokens(request, plan, row, int(ends[row]), result)
            if going_on[row]:
                continue
            if not (request.by_token or request.cached_tokens or result.vectors is None):
                pooled.append(row)
            else:
                vectors = _vectors_of(request, row, result)
                if vectors is None:
                    updates.append(self.fail(request, "the step brought no vectors for a request that pools"))
                    continue
                update = RequestUpdate(request_id=request.request_id, new_token_ids=[], finish_reason="stop")
                update.pooled, update.num_cached_tokens = vectors, request.cached_tokens or 0
                updates.append(update)
            self.prompt_tokens += request.prompt_len
            self._life.finish(request)
        found = StepUpdates()
        if pooled and result.vectors is not None:
            picked = result.vectors if len(pooled) == len(rows) else result.vectors[pooled]
            ids = [rows.ids[row] for row in pooled]
            found = StepUpdates(ids, [0] * len(ids), {}, picked.tobytes(), picked.shape[1])
        found.add(updates)
        return found

    def _keep_tokens(self, request: Request, plan: StepPlan, row: int, end: int, result: StepResult) -> None:
        """Vectors of the row's tokens, which end at token ``end`` of the step; a text that begins again keeps nothing."""
        if plan.starts_bound[row] == 0:
            request.pooled = []
        if result.token_vectors is not None:
            request.pooled.append(result.token_vectors[end - int(plan.query_lens[row]) : end])

    # -- rows whose request still owns the slot ------------------------------------------------------------------

    def _apply_live(self, plan: StepPlan, rows: Rows, result: StepResult, picked: Int64s | None) -> StepUpdates:
        """``picked``: int64 [n], rows that sampled, ascending; None: all."""
        table = self._table
        slots, ids, requests, finish = rows.index, rows.ids, rows.requests, result.finish
        order: Sequence[int] = range(len(rows))
        if picked is not None:
            order = picked.tolist()
            slots, finish = slots[picked], finish[picked]
            ids, requests = [ids[row] for row in order], [requests[row] for row in order]
        if plan.width == 1:
            tokens = result.token_ids[:, 0] if picked is None else result.token_ids[picked, 0]
            counts, written = None, table.known[slots]  # the newest token's own KV is not written yet
            table.history[slots, written] = tokens
            table.known[slots] = written + 1
            updates = StepUpdates(ids, tokens.tolist())
            self.generation_tokens += len(ids)
        else:
            counts, written, updates = self._append_runs(plan, slots, ids, result, picked)
        if self._life.kv.caching:
            self._register(requests, written, counts)
        more = updates.more
        special = _nonzero(table.special[slots])
        asking = [i for i in special if requests[i].wants_logprobs]
        told = self._told(result, asking, order, counts) if asking else {}
        for i in special:
            request = requests[i]
            if not request.says_more:  # only its first update does, which is this one
                table.special[slots[i]] = False
            more[i] = self._decorate(request, more.get(i) or _token_update(ids[i], updates.token_ids[i]), told.get(i))
        for i in _nonzero(finish):
            if i not in more:
                more[i] = _token_update(ids[i], updates.token_ids[i])
            self._end(requests[i], more[i], int(finish[i]))
        return updates

    def _append_runs(
        self, plan: StepPlan, slots: Int64s, ids: list[str], result: StepResult, picked: Int64s | None
    ) -> tuple[Int32s, Int32s, StepUpdates]:
        """Appends the tokens of rows of drafts, and takes what was rejected back from the bounds.

        Returns:
            tokens of each row, int32 [n]; tokens whose KV is written, int32 [n]; updates with those tokens.
        """
        table = self._table
        counts, tokens = result.counts, result.token_ids
        planned = np.where(np.arange(len(counts)) < plan.num_decode_rows, plan.query_lens, counts)
        if picked is not None:
            counts, tokens, planned = counts[picked], tokens[picked], planned[picked]
        known = table.known[slots]
        row, place = (np.arange(plan.width) < counts[:, None]).nonzero()
        table.history[slots[row], known[row] + place] = tokens[row, place]
        table.known[slots] = known + counts
        table.scheduled[slots] -= planned - counts
        table.least[slots] += counts - 1
        self.generation_tokens += len(row)
        updates = StepUpdates(ids, tokens[:, 0].tolist())
        for i in _nonzero(counts > 1):
            updates.more[i] = RequestUpdate(request_id=ids[i], new_token_ids=tokens[i, : counts[i]].tolist())
        return counts, known + counts - 1, updates

    def _register(self, requests: list[Request], written: Int32s, counts: Int32s | None) -> None:
        """Names the blocks that are full now. ``written``, ``counts``: as of ``_append_runs``; None: one token each."""
        kv = self._life.kv
        filled = written % kv.block_size < (1 if counts is None else counts)
        for i in _nonzero(filled):
            kv.register(requests[i], self._table.history[requests[i].slot], Exact(int(written[i])))

    def _told(
        self, result: StepResult, asking: list[int], order: Sequence[int], counts: Int32s | None
    ) -> dict[int, list[TokenLogprobsRow | None]]:
        """Log-probabilities of each token that the rows ``asking`` brought."""
        width = result.token_ids.shape[1]
        lengths = [1 if counts is None else int(counts[i]) for i in asking]
        places = [order[i] * width + j for i, length in zip(asking, lengths, strict=True) for j in range(length)]
        rows = iter(logprobs_rows(result.logprobs, places))
        return {i: [next(rows) for _ in range(length)] for i, length in zip(asking, lengths, strict=True)}

    # -- rows whose request was preempted, is draining or is over --------------------------------------------------

    def _apply_detached(self, request: Request, row: int, samples: bool, result: StepResult) -> RequestUpdate | None:
        if request.status is Status.FINISHED:
            return None
        request.in_flight -= 1
        if not samples:
            return None
        count, width = int(result.counts[row]), result.token_ids.shape[1]
        if not count:
            return self.fail(request, "the device ended the request without saying why")
        tokens = result.token_ids[row, :count]
        request.tokens = np.append(request.tokens, tokens)
        self.generation_tokens += count
        update = RequestUpdate(request_id=request.request_id, new_token_ids=tokens.tolist())
        if request.wants_logprobs or not request.reported:
            places = range(row * width, row * width + count)
            update = self._decorate(request, update, logprobs_rows(result.logprobs, list(places)))
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
            del update.new_token_ids[-1]
            update.new_logprobs = update.new_logprobs[:-1] or None if update.new_logprobs else None
            update.finish_reason = "error"
            update.error, update.error_parameter = no_token_left(request.message)
            self._life.finish(request)
            return
        update.finish_reason = FINISH_REASONS[code]
        if code is Finish.STOP_TOKEN:
            update.stop_token_id = update.new_token_ids[-1]
        self._life.finish(request)

    def _decorate(
        self, request: Request, update: RequestUpdate, told: Sequence[TokenLogprobsRow | None] | None
    ) -> RequestUpdate:
        """Adds what a first update or log-probabilities bring; a request this raises for fails alone."""
        try:
            if request.wants_logprobs:
                update.new_logprobs = [each for each in told or [] if each is not None]
                if len(update.new_logprobs) != len(update.new_token_ids):
                    raise HeadwayError(NO_LOGPROBS)
            if not request.reported:
                update.num_cached_tokens = request.cached_tokens or 0
                update.new_prompt_logprobs = self._whole_prompt(request)
                update.aligned = request.aligned
                if request.whole and update.aligned is None:
                    raise HeadwayError("the step brought no times for a request that wants its tokens'")
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
