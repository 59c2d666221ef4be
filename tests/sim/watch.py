"""Compares the device's truth, when a step runs, with what the scheduler believed when it planned the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.plan import StepLimit, StepPlan
from headway.device.sim import InvariantError
from headway.device.sim.invariants import arguments
from headway.device.sim.ops import Observer
from headway.device.sim.tensor import SimTensor
from headway.engine.core import EngineCore
from headway.runner.config import RunnerConfig
from headway.scheduler import OnePassScheduler, Scheduler

GARBAGE = 1e4
"""What a KV block holds until its owner writes it: finite, as whatever a former owner left, and impossible to overlook."""


@dataclass(slots=True)
class Believed:
    """A plan, and who held which blocks when it was made.

    Attributes:
        owners: request id of each row.
        held: request id -> block ids, of every request that owned a slot.
        fresh: blocks that the step's edits hand out with nothing of use in them.
    """

    plan: StepPlan
    owners: list[str]
    held: dict[str, list[int]]
    fresh: list[int]


class PlanWatch:
    """R3 and R6 on every step of an engine. Give ``observers()`` to the device, then ``attach`` the engine."""

    def __init__(self) -> None:
        self._launched: deque[Believed] = deque()
        self._caches: list[torch.Tensor] = []
        self._planned: Believed | None = None
        self._writers: dict[int, str] = {}
        self._attached = False
        self.num_steps = 0
        self.num_zombie_rows = 0
        self._running: Believed | None = None
        self._drafting = False

    def observers(self) -> list[tuple[str, Observer]]:
        return [("step_unpack", self._on_unpack), ("chain_unpack", self._on_chain)]

    def attach(self, core: EngineCore) -> None:
        scheduler, runner = core._scheduler, core._runner
        launch = runner.launch
        if isinstance(scheduler, OnePassScheduler):
            self._watch_texts(scheduler)
        else:
            self._watch_planner(scheduler, runner.config)

        def watched_launch(plan: StepPlan | None, limit: StepLimit | None = None) -> Any:
            if plan is None:  # an empty step
                return launch(None, limit)
            assert self._planned is not None and self._planned.plan is plan
            self._launched.append(self._planned)
            try:
                return launch(plan, limit)
            except BaseException:
                self._attached = False  # nobody knows how far the launch came, so steps cannot be told apart any more
                raise

        pool = runner.executor.body.caches
        states = [state for layer in pool.states for state in layer]
        theirs = {id(state) for state in states}
        chain = getattr(runner.executor.body._drafter, "_chain", None)  # of drafters with a cache
        own = [] if chain is None else chain.caches.layers
        self._drafting = runner.config.width > 1
        every = [cache for layer in [*pool.layers, *own] for cache in layer]
        self._caches = [_on_device(cache) for cache in every if id(cache) not in theirs]
        for cache in self._caches:
            cache[1:] = GARBAGE
        with torch.inference_mode():  # views of one memory, made by an operation
            for state in states:
                _on_device(state).fill_(GARBAGE)
        runner.launch = watched_launch  # type: ignore[method-assign]
        self._attached = True

    def _watch_planner(self, scheduler: Scheduler, config: RunnerConfig) -> None:
        planner: Any = scheduler._planner
        assemble, block_size, num_slots = planner._assemble, config.block_size, config.max_num_seqs
        of_tokens = scheduler._life.kv.num_groups  # groups behind these are written by encoder jobs (``CrossWatch``)

        def watched_assemble(*args: Any) -> Any:
            plan, rows = assemble(*args)
            running = scheduler._life.running.requests()
            held = {
                request.request_id: [block for blocks in request.blocks for block in blocks if block]
                for request in [*running, *rows.requests]
            }
            self._planned = Believed(plan, list(rows.ids), held, _fresh_blocks(plan, block_size, num_slots, of_tokens))
            return plan, rows

        planner._assemble = watched_assemble

    def _watch_texts(self, scheduler: OnePassScheduler) -> None:
        schedule = scheduler.schedule

        def watched_schedule() -> StepPlan | None:
            plan = schedule()
            if plan is not None:
                assert plan.texts is not None
                self._planned = Believed(plan, plan.texts.request_ids, {}, [])
            return plan

        scheduler.schedule = watched_schedule  # type: ignore[method-assign]

    def _on_unpack(self, args: tuple[Any, ...]) -> Callable[[], None] | None:
        if not self._attached:
            return None
        named = arguments("step_unpack", args)
        packed, num_computed, alive, block_size = named.packed, named.num_computed, named.alive, named.block_size
        query_start, kv_slots = named.query_start, named.kv_slots.reshape(-1, len(named.input_ids))
        believed = self._running = self._launched.popleft()
        plan = believed.plan
        self.num_steps += 1
        rows = packed[int(packed[4]) :][: 4 * plan.num_rows].view(-1, 4)
        need(rows[:, 0].tolist() == plan.slots.tolist(), f"step {plan.step} runs another step's rows")
        for block in believed.fresh:
            for cache in self._caches:
                cache[block] = GARBAGE
        truths = num_computed[plan.slots].tolist()
        live = alive[plan.slots].tolist()
        for row, (truth, bound) in enumerate(zip(truths, plan.starts_bound.tolist(), strict=True)):
            if not live[row]:
                self.num_zombie_rows += 1
                continue
            need(bound >= truth, f"step {plan.step}, row {row}: starts_bound {bound} < {truth}")
            exact = (
                not self._drafting or row >= plan.num_decode_rows
            )  # of other rows some drafts may have been rejected
            need(bound == truth or not exact, f"step {plan.step}, row {row}: starts_bound {bound}, truth {truth}")

        def after() -> None:
            for row, owner in enumerate(believed.owners):
                places = kv_slots[:, int(query_start[row]) : int(query_start[row + 1])].reshape(-1)
                for block in sorted({place // block_size for place in places.tolist() if place >= 0}):
                    self._check_write(believed, owner, block)

        return after

    def _on_chain(self, args: tuple[Any, ...]) -> Callable[[], None] | None:
        """What a drafter writes behind the known tokens lies in blocks of the row's own."""
        if not self._attached or self._running is None:
            return None
        named, believed = arguments("chain_unpack", args), self._running

        def after() -> None:
            for owner, place in zip(believed.owners, named.kv_slots.tolist(), strict=False):
                if place >= 0:
                    self._check_write(believed, owner, place // named.block_size)

        return after

    def _check_write(self, believed: Believed, owner: str, block: int) -> None:
        step = believed.plan.step
        need(block in believed.held[owner], f"step {step}: {owner} writes KV block {block}, which it did not hold")
        former = self._writers.get(block, owner)
        still = former != owner and block in believed.held.get(former, [])
        need(not still, f"step {step}: {owner} writes KV block {block}, which {former} wrote and still held")
        self._writers[block] = owner


def _fresh_blocks(plan: StepPlan, block_size: int, num_slots: int, num_groups: int) -> list[int]:
    """Blocks of the step's edits in the first ``num_groups`` groups that are no prefix hits."""
    hits = {admission.slot: admission.num_computed // block_size for admission in plan.admissions}
    edits = zip(plan.block_edit_rows, plan.block_edit_indices, plan.block_edit_ids, strict=True)
    return [
        int(block)
        for row, index, block in edits
        if block and row < num_groups * num_slots and index >= hits.get(int(row) % num_slots, 0)
    ]


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, SimTensor)
    return tensor.data_on_device


def need(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)
