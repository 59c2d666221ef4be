"""``Scheduler``, the face of the floor: ``schedule`` and, up to ``depth`` steps later, ``apply``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from headway.core.cache import CacheKind
from headway.core.config import SchedulerConfig
from headway.core.errors import HeadwayError, InvalidRequestError
from headway.core.messages import AddRequest, EngineStats, RequestUpdate, StepUpdates
from headway.core.plan import Int32s, StepLimit, StepPlan, StepResult
from headway.scheduler.lifecycle import Lifecycle
from headway.scheduler.planner import Planner
from headway.scheduler.request import Request
from headway.scheduler.results import Collector
from headway.scheduler.slots import Rows


def count_prompt_ints(message: AddRequest) -> int:
    """Upload of a request that sends its prompt and nothing else."""
    return len(message.prompt_token_ids)


class Scheduler:
    """Continuous batching over slots and KV blocks, ahead of the device by any number of steps.

    After scheduling a row that samples, the host assumes as many more tokens as it can bring and goes on; drafts that the
    device rejects, and ends that only the device sees, arrive with ``apply``, and rows launched meanwhile are ignored.
    Requests never run past max_tokens.
    A plan that was returned must be launched, or discarded before the next one is asked for: later plans count on what
    it writes. One thread calls everything.
    """

    def __init__(self, config: SchedulerConfig, upload_ints: Callable[[AddRequest], int] = count_prompt_ints) -> None:
        """``upload_ints``: int32 values a first admission sends (prompt and sampling tables); a resumed one sends
        its generated tokens on top. Block-table edits are not counted against ``max_upload_ints``."""
        self._config = config
        self._upload_ints = upload_ints
        self._life = Lifecycle(config)
        self._planner = Planner(config, self._life)
        self._collector = Collector(self._life, config.width)
        self._launched: OrderedDict[int, Rows] = OrderedDict()
        self._next_step = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> None:
        """Queues a request. Everything that can be wrong with one request is found here.

        Raises:
            InvalidRequestError: its id is open, it is empty or too long, or one step cannot carry its state.
        """
        if message.task.pools != self._config.pools:
            serves = "requests that pool, such as embeddings" if self._config.pools else "generation"
            raise InvalidRequestError(f"this engine serves {serves}, not the task {message.task.value!r}", "task")
        self._check_media(message)
        self._check_alignment(message)
        upload = self._upload_ints(message)
        request = Request(message, self._config.max_model_len, upload)
        most = upload + max(request.max_total - 1 - request.prompt_len, 0)
        if most > self._config.max_upload_ints:
            raise InvalidRequestError(
                f"the request may have to send {most} values in one step, which carries "
                f"{self._config.max_upload_ints}; shorten the prompt, max_tokens or its token tables"
            )
        if self._life.media is not None:
            request.marks = self._life.media.marks(message)
        self._life.enter(request)

    def _check_media(self, message: AddRequest) -> None:
        """Raises InvalidRequestError: what the encoder is given is not what cross-attention reads."""
        last = self._config.groups[-1]
        read = [item for item in message.media if item.first < 0]
        if self._life.media is not None:
            if read:
                raise InvalidRequestError("this model has no cross-attention; leave those media out", "media")
            self._life.media.check(message)
        elif message.runs:
            raise InvalidRequestError("this model sees no pictures; leave them out", "media")
        elif last.kind is not CacheKind.CROSS:
            if read:
                raise InvalidRequestError("this model has no cross-attention; leave the media out", "media")
        elif len(read) != 1 or len(message.media) != 1:
            raise InvalidRequestError(
                f"this model's decoder reads the outputs of one encoder item; the request has {len(read)}", "media"
            )
        elif not 1 <= read[0].rows <= last.tokens:
            raise InvalidRequestError(
                f"the encoder's item has {read[0].rows} outputs; 1 to {last.tokens} are possible", "media"
            )

    def _check_alignment(self, message: AddRequest) -> None:
        """Raises InvalidRequestError: the prompt's tokens cannot be placed in what the encoder is given."""
        align, tokens = message.align, len(message.prompt_token_ids)
        if align is None:
            return
        if not self._config.aligns:
            raise InvalidRequestError("this engine cannot tell when words are heard; leave word times out", "align")
        if tokens > self._config.max_num_batched_tokens:
            raise InvalidRequestError(
                f"{tokens} tokens are placed in the recording in one step, which has room for "
                f"{self._config.max_num_batched_tokens}; raise max_num_batched_tokens, or leave word times out",
                "align",
            )
        if not 0 <= align.first < tokens - 1 or not 1 <= align.frames <= message.media[0].rows:
            raise InvalidRequestError("the tokens or frames to place lie outside the prompt or the recording", "align")
        if message.params.max_tokens != 1:
            raise InvalidRequestError("a text that is placed in a recording ends there; max_tokens must be 1", "align")

    def abort(self, request_id: str) -> bool:
        """Ends a request silently, in whatever state; False when the id is not open."""
        life = self._settled
        request = life.open.get(request_id)
        if request is None:
            return False
        life.finish(request)
        return True

    def fail(self, request_id: str, message: str) -> RequestUpdate | None:
        """Ends a request with an error; None when the id is not open."""
        request = self._settled.open.get(request_id)
        return None if request is None else self._collector.fail(request, message)

    def provide_mask(self, request_id: str, mask: Int32s) -> None:
        """The tokens that a request with a grammar on the host may draw next: int32 words, as in ``StepPlan.masks``.

        Until then no row of it draws; others are not held up. Unknown ids are ignored.
        """
        request = self._life.open.get(request_id)
        if request is not None:
            request.mask = mask

    @property
    def width(self) -> int:
        """Tokens of the next steps' decode rows: 1, or more where there are drafts to verify. May change from step to step."""
        return self._planner.width

    @width.setter
    def width(self, width: int) -> None:
        if not 1 <= width <= self._config.width:
            raise ValueError(f"rows have 1 to {self._config.width} tokens here, not {width}")
        self._planner.width = width

    # -- steps ---------------------------------------------------------------------------------------------------

    def schedule(self, limit: StepLimit | None = None) -> StepPlan | None:
        """The next step, within ``limit``, or None when nothing can run before another result is applied or request added."""
        built = self._planner.build(self._next_step, limit)
        if built is None:
            return None
        plan, rows = built
        self._launched[plan.step] = rows
        self._next_step += 1
        return plan

    def outlook(self) -> tuple[int, int, bool]:
        """What a later step would hold if nothing came, tokens and rows at most; and whether there would be prompts."""
        life, most = self._life, self._config.max_num_batched_tokens
        running = life.running
        rows = min(len(life.open), self._config.max_num_seqs)
        prompts = bool(life.waiting) or running.prefilling is not None or bool(running.lagging)
        tokens = rows * self._config.width
        if prompts:
            begun = [] if running.prefilling is None else [len(running.prefilling.tokens)]
            tokens += life.waiting.tokens(most) + sum(begun)
        return min(tokens, most), rows, prompts

    def apply(self, plan: StepPlan, result: StepResult) -> StepUpdates:
        """Takes the result of the oldest step in flight; returns one update per request that got something.

        Prompt log-probabilities are delivered whole, with the update that brings the first token.

        Raises:
            HeadwayError: the plan is not the oldest in flight.
        """
        if next(iter(self._launched), None) != plan.step:
            raise HeadwayError(f"step {plan.step} is not the oldest in flight; results are applied in order")
        rows = self._launched.pop(plan.step)
        self._planner.settle()
        return self._collector.apply(plan, rows, result)

    def discard(self, plan: StepPlan, message: str) -> list[RequestUpdate]:
        """The newest step could not be launched: the requests in it fail, the others go on; its number stays unused.

        Raises:
            HeadwayError: the plan is not the newest in flight.
        """
        if next(reversed(self._launched), None) != plan.step:
            raise HeadwayError(f"step {plan.step} is not the newest in flight; only that one can be discarded")
        rows = self._launched.pop(plan.step)
        # Its prefill rows had their blocks named, and nothing was written there.
        self._settled.kv.forget_prefixes()
        failed = [u for u in (self.fail(request_id, message) for request_id in rows.ids) if u is not None]
        if self._life.media is not None:
            self._life.media.discard(plan.encodes)
        return failed

    @property
    def _settled(self) -> Lifecycle:
        """The requests' state, with what the newest step left to be done behind its launch."""
        self._planner.settle()
        return self._life

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not applied."""
        return len(self._launched)

    def has_unfinished(self) -> bool:
        """Whether any request is open. Rows of ended requests may still be in flight when none is."""
        return bool(self._life.open)

    def stats(self) -> EngineStats:
        """The fields the scheduler knows; a draining request counts as running. The engine fills in the others."""
        life, drafts = self._settled, self._collector.drafts
        return EngineStats(
            num_running=len(life.running) + life.num_draining,
            num_waiting=len(life.waiting),
            kv_cache_usage=life.kv.usage,
            prefix_cache_queries=self._planner.cache_queries,
            prefix_cache_hits=self._planner.cache_hits,
            num_preemptions=life.num_preemptions,
            num_steps=self._next_step,
            prompt_tokens=self._collector.prompt_tokens,
            generation_tokens=self._collector.generation_tokens,
            num_drafts=drafts.rows,
            num_draft_tokens=drafts.drafted,
            num_accepted_tokens=drafts.accepted,
            num_accepted_tokens_per_pos=drafts.accepted_per_position,
        )

    def check_integrity(self) -> None:
        """Raises HeadwayError when slots, blocks, reference counts and requests do not add up. Slow; any time.

        With no request open this means: every block is free or cached, every slot free, every count zero.
        """
        self._settled.check()
