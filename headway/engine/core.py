"""``EngineCore.step``: THE host loop, plain and overlapped side by side."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from time import perf_counter

from headway.core.automaton import Vocabulary
from headway.core.config import USUAL_THRESHOLDS
from headway.core.errors import HeadwayError, InvalidRequestError
from headway.core.log import logger
from headway.core.messages import AddRequest, EngineStats, ModelInfo, RequestUpdate, StepTrace, StepUpdates
from headway.core.plan import StepLimit, StepPlan, StepResult
from headway.device.base import DeviceError
from headway.engine.accord import Accord
from headway.engine.draft_pacer import DraftPacer
from headway.engine.host_grammars import HostGrammars
from headway.engine.host_waits import HostWaits
from headway.engine.metrics import StepMeter
from headway.engine.pacer import Pacer
from headway.parallel.dp import IDLE, Want
from headway.runner.executor import BACK_PRESSURE
from headway.runner.runner import InFlight, ModelRunner
from headway.scheduler import OnePassScheduler, Scheduler
from headway.scheduler.drafts import reached
from headway.scheduler.results import no_token_left
from headway.syncs import SyncError

MASK_WAIT_SECONDS = 0.05
REST_SECONDS = 5.0
"""How long an engine that is shut down runs the steps that other replicas need it for."""


class EngineCore:
    """Joins the scheduler (host, integers) and the runner (device). Not thread-safe: one thread drives it.

    Args:
        info: what the API floor needs to know.
        waits: counts host waits inside ``step``; None: they are not counted.
        traced_steps: see ``Thresholds``.
        draft_pacer: says when drafts pay; None: they always do, or there are none.
        accord: with other replicas that run the same steps; None: it is on its own.
    """

    def __init__(
        self,
        scheduler: Scheduler | OnePassScheduler,
        runner: ModelRunner,
        pacer: Pacer,
        info: ModelInfo,
        waits: HostWaits | None = None,
        traced_steps: int = USUAL_THRESHOLDS.traced_steps,
        draft_pacer: DraftPacer | None = None,
        accord: Accord | None = None,
    ) -> None:
        self.info = info
        self._accord = accord
        self._waits = waits
        self._scheduler, self._runner, self._pacer = scheduler, runner, pacer
        self._in_flight: deque[InFlight] = deque()
        self._failures: list[RequestUpdate] = []
        self._grammars = HostGrammars(info.vocab_size)
        self._preparing: dict[str, AddRequest] = {}
        self._meter = StepMeter(runner.clock, traced_steps)
        self._num_steps = 0
        self._draft_pacer = draft_pacer
        self._owned = ExitStack()
        self._is_broken = False

    def close_at_shutdown(self, resources: ExitStack) -> None:
        """Own ``resources``, such as the device where the engine chose it."""
        self._owned.push(resources)

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the bytes of the model's tokens, which grammars need. Once, before the first request with a grammar."""
        self._runner.learn(vocabulary)
        self._grammars.learn(vocabulary)

    def add(self, request: AddRequest) -> None:
        """Queue a request. One that cannot be served is answered with an error update; only a broken engine raises."""
        idle = not self.has_work()
        try:
            if request.task not in self.info.tasks:
                serves = ", ".join(task.value for task in self.info.tasks)
                raise InvalidRequestError(f"this model serves {serves}, not the task {request.task.value!r}", "task")
            if request.host_grammar is None:
                self._scheduler.add(request)
            else:
                self._grammars.open(request)
                self._preparing[request.request_id] = request  # queued when its first mask has come
            self._meter.arrived(request.request_id, idle)
        except Exception as error:
            if _is_fatal(error):
                raise
            self._runner.admissions.forget(request.request_id)
            self._failures.append(_failure(request.request_id, error))

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is. Unknown ids are ignored: it may just have finished."""
        self._scheduler.abort(request_id)
        self._preparing.pop(request_id, None)
        self._forget(request_id)

    def step(self) -> StepUpdates:
        """One turn of the loop; empty when there is nothing to report yet."""
        self._is_broken = True  # unless the turn comes to its end
        if self._waits is None:
            updates = self._turn()
        else:
            with self._waits.watching():
                updates = self._turn()
        self._is_broken = False
        return updates

    def _turn(self) -> StepUpdates:
        self._runner.check_followers()
        if self._grammars.is_working:
            self._take_masks()
        num_steps = self._num_steps
        updates = self._plain_step() if self._pacer.depth == 0 else self._overlapped_step()
        self._feed_grammars(updates)
        if self._num_steps == num_steps and not self._in_flight and not self._failures and self._grammars.is_working:
            self._grammars.wait(MASK_WAIT_SECONDS)  # there is nothing else to do
        if self._failures:
            updates.add(self._failures)
            self._failures = []
        self._meter.stamp(updates)
        for update in updates.more.values():  # of the others nothing is kept once they are stamped
            if update.finish_reason is not None:
                self._forget(update.request_id)
        return updates

    def _forget(self, request_id: str) -> None:
        self._runner.admissions.forget(request_id)
        self._grammars.drop(request_id)
        self._meter.forget(request_id)

    def _take_masks(self) -> None:
        """Hand masks that have come to the scheduler, and requests whose first one it is."""
        for request_id, mask, error in self._grammars.ready():
            request = self._preparing.pop(request_id, None)
            try:
                if mask is None:
                    raise InvalidRequestError(f"structured_outputs: {error}", "structured_outputs")
                if request is not None:
                    self._scheduler.add(request)
                self._scheduler.provide_mask(request_id, mask)
            except Exception as failure:
                update = self._scheduler.fail(request_id, _reason(failure)) or _failure(request_id, failure)
                update.error_parameter = _parameter(failure)
                self._failures.append(update)

    def _feed_grammars(self, updates: StepUpdates) -> None:
        """Give the drawn tokens to the matchers; an answer that its grammar did not allow is an error."""
        for update in updates.more.values():  # requests with a grammar on the host are always there
            if update.request_id not in self._grammars or not update.new_token_ids:
                continue
            [token] = update.new_token_ids
            if not self._grammars.allows(update.request_id, token):
                update.new_token_ids, update.new_logprobs, update.stop_token_id = [], None, None
                running, update.finish_reason = update.finish_reason is None, "error"
                update.error, update.error_parameter = no_token_left(self._grammars.request(update.request_id))
                if running:
                    self._scheduler.abort(update.request_id)
            elif update.finish_reason is None:
                self._grammars.feed(update.request_id, token)

    def _plain_step(self) -> StepUpdates:
        """Schedule, launch, wait, apply: the synchronous oracle."""
        self._next_step()
        return self._apply_oldest() if self._in_flight else StepUpdates()

    def _overlapped_step(self) -> StepUpdates:
        """Schedule and launch the next step while up to ``depth`` earlier ones run; then apply the oldest."""
        planned = False
        if len(self._in_flight) <= self._pacer.depth:
            planned = self._next_step()
        if self._in_flight and (not planned or len(self._in_flight) > self._pacer.depth):
            return self._apply_oldest()
        return StepUpdates()

    def _next_step(self) -> bool:
        """Schedule and launch a step; whether there was one."""
        self._meter.begin()
        limit = None
        if self._accord is not None:
            assert isinstance(self._scheduler, Scheduler), "models that share experts generate"
            tokens, rows, prompts = self._scheduler.outlook()
            limit = self._accord.begin(Want(tokens, rows, 1, not prompts) if rows else IDLE)
            if limit is None:
                if not self._in_flight and self._accord.is_needed():
                    self._accord.wait()
                return False
        plan = self._scheduler.schedule(limit) if isinstance(self._scheduler, Scheduler) else self._scheduler.schedule()
        if plan is not None:
            self._launch(plan, limit)
        elif limit is not None:
            self._in_flight.append(self._runner.launch(None, limit))
        if self._accord is not None:
            self._accord.launched()
        return plan is not None or limit is not None

    def _launch(self, plan: StepPlan, limit: StepLimit | None) -> None:
        self._meter.scheduled()
        replays = self._runner.num_replays
        try:
            step = self._runner.launch(plan, limit)
        except Exception as error:
            if limit is not None:
                raise  # the other replicas run the step
            self._fail_plan(plan, error)
            return
        self._num_steps += 1
        self._in_flight.append(step)
        self._meter.launched(plan, step, replayed=self._runner.num_replays > replays)

    def _apply_oldest(self) -> StepUpdates:
        step = self._in_flight.popleft()
        asked = perf_counter()
        result = self._runner.collect(step)
        arrived = perf_counter()
        if step.plan is None:
            if step.events is not None:
                self._runner.clock.measure(step.events)
            return StepUpdates()
        updates = self._scheduler.apply(step.plan, result)
        trace = self._meter.applied(step, asked, arrived)
        if trace.idle_us is not None and trace.headway_us is not None and trace.busy_us is not None:
            host_us = trace.schedule_us + trace.launch_us + trace.apply_us
            self._pacer.observe(trace.headway_us, trace.busy_us, host_us)
        if self._draft_pacer is not None:
            self._pace_drafts(self._draft_pacer, step.plan, result, trace)
        return updates

    def _pace_drafts(self, pacer: DraftPacer, plan: StepPlan, result: StepResult, trace: StepTrace) -> None:
        """Let the width of the next rows follow what this step brought, and took."""
        took = None
        if plan.num_decode_rows == plan.num_rows:  # without a clock the host computes the step while it launches it
            took = trace.launch_us + trace.wait_us if trace.busy_us is None else trace.busy_us
        self._scheduler.width = pacer.observe(plan.width, reached(plan, result), took)

    def _fail_plan(self, plan: StepPlan, error: Exception) -> None:
        """A step could not be launched: its requests fail, the others and the engine live on.

        Raises:
            The error itself when nothing can run any more: the device is lost, or a check of the engine's own rules failed.
        """
        if _is_fatal(error):
            raise error
        logger.error("step %d could not be launched", plan.step, exc_info=error)
        self._failures += self._scheduler.discard(plan, _reason(error))

    @property
    def watches(self) -> bool:
        """Whether it should be asked for work now and then although none was added: another rank may have gone."""
        return self._runner.followers is not None or self._accord is not None

    @property
    def wakes(self) -> int | None:
        """A file descriptor that can be read when another replica needs this one; None: none does."""
        return None if self._accord is None else self._accord.box.fileno()

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return (
            self._scheduler.has_unfinished()
            or bool(self._in_flight or self._failures or self._preparing)
            or (self._accord is not None and self._accord.is_needed())
            or self._runner.is_lost
        )

    def stats(self) -> EngineStats:
        """Counters and gauges; no device access."""
        stats = self._scheduler.stats()
        runner = self._runner
        stats.num_steps, stats.num_graph_steps = self._num_steps, runner.num_replays
        waits = runner.waits() | ({} if self._accord is None else self._accord.waits())
        stats.waits = {reason: counter.waits for reason, counter in waits.items()}
        stats.wait_seconds = {reason: counter.seconds for reason, counter in waits.items()}
        stats.back_pressure_waits, stats.back_pressure_seconds = (
            waits[BACK_PRESSURE].waits,
            waits[BACK_PRESSURE].seconds,
        )
        stats.run_ahead, stats.num_in_flight = self._pacer.depth, len(self._in_flight)
        stats.draft_saved_seconds = 0.0 if self._draft_pacer is None else self._draft_pacer.saved_us / 1e6
        stats.has_device_clock = runner.device.clock is not None
        stats.host_waits = None if self._waits is None else self._waits.counts()
        self._meter.fill(stats)
        return stats

    def check_integrity(self) -> None:
        """When idle: every block and slot is back, and nothing of a former request is kept. Raises HeadwayError otherwise."""
        self._scheduler.check_integrity()
        kept = self._runner.admissions.num_prepared + self._meter.num_kept
        if kept:
            raise HeadwayError(f"slot edits or times of {kept} former requests are still kept")

    def shutdown(self) -> None:
        """Wait for launched steps, drop them, and let go of the device's memory. The engine cannot be used afterwards."""
        with self._owned:  # closed whatever happens: the last steps fail where another rank has gone first
            self._grammars.close()
            if self._accord is not None and not self._is_broken:
                self._rest(self._accord)
            self._drop_steps()
            self._runner.release()
            if self._waits is not None:
                self._waits.close()
                if self._waits.counts():
                    logger.warning("unexpected host waits in the loop:\n%s", self._waits.text())

    def _rest(self, accord: Accord) -> None:
        """Run the steps that replicas have agreed on, without rows, until all rest: they would wait for one that left."""
        end = perf_counter() + REST_SECONDS
        while accord.is_needed() and perf_counter() < end:
            limit = accord.begin(IDLE)
            if limit is not None:
                self._in_flight.append(self._runner.launch(None, limit))
                accord.launched()
            elif not self._in_flight:
                accord.wait()
            self._drop_steps()

    def _drop_steps(self) -> None:
        """Wait for launched steps; where a rank has gone, their results do not come any more."""
        while self._in_flight and not self._runner.is_lost:
            self._runner.collect(self._in_flight.popleft())


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"


def _failure(request_id: str, error: Exception) -> RequestUpdate:
    return RequestUpdate(
        request_id=request_id,
        new_token_ids=[],
        finish_reason="error",
        error=_reason(error),
        error_parameter=_parameter(error),
    )


def _parameter(error: Exception) -> str | None:
    """The request's field at fault; None where the engine is to blame."""
    return (error.parameter or "request") if isinstance(error, InvalidRequestError) else None


def _is_fatal(error: Exception) -> bool:
    """CUDA errors other than running out of memory leave the context unusable; a broken rule is a bug, and blaming the
    requests of one step would hide it."""
    if isinstance(error, DeviceError | SyncError):
        return True
    name = type(error).__name__
    return name == "AcceleratorError" or (isinstance(error, RuntimeError) and "CUDA error" in str(error))
