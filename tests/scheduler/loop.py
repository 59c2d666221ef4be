"""The host loop in miniature: run ahead by ``depth`` steps, collect what every request got."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from headway.core.config import SchedulerConfig
from headway.core.messages import AddRequest, RequestUpdate, StepUpdates
from headway.core.plan import StepPlan, StepResult
from headway.scheduler import Scheduler
from tests.scheduler.fake_device import FakeDevice


def make_config(**changes: object) -> SchedulerConfig:
    base: dict[str, object] = {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 16,
        "max_model_len": 32,
        "block_size": 4,
        "num_blocks": 33,
    }
    return SchedulerConfig(**{**base, **changes})  # type: ignore[arg-type]


@dataclass
class Loop:
    config: SchedulerConfig
    depth: int = 0
    acceptance: float = 0.5
    in_flight: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    updates: dict[str, list[RequestUpdate]] = field(default_factory=dict)
    owed: list[str] = field(default_factory=list)
    """Requests that lag and whose mask has not come."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.device = FakeDevice(self.config, self.acceptance)
        self.lags: dict[str, bool] = {}

    def add(self, *messages: AddRequest) -> None:
        for message in messages:
            self.scheduler.add(message)
            self.lags[message.request_id] = message.host_grammar is not None
            self.updates[message.request_id] = []
            if message.host_grammar is not None:
                self.owed.append(message.request_id)

    def pay(self, count: int) -> None:
        """The matchers of ``count`` requests answer. A mask here is the number of tokens that were generated before it."""
        for _ in range(min(count, len(self.owed))):
            name = self.owed.pop(0)
            self.scheduler.provide_mask(name, np.array([len(self.tokens(name))], np.int32))

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_masks(plan)
            self.device.width = self.scheduler.width
            self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def collect(self) -> StepUpdates:
        got = self.scheduler.apply(*self.in_flight.popleft())
        for update in got:
            self.updates[update.request_id].append(update)
            lags = self.lags.get(update.request_id, False)
            if lags and update.new_token_ids and update.finish_reason is None:
                self.owed.append(update.request_id)
        return got

    def check_masks(self, plan: StepPlan) -> None:
        """Every row that lags and draws has the mask after its last token, and no other row has one."""
        masks = {slot: int(mask[0]) for slot, mask in plan.masks}
        assert len(masks) == len(plan.masks)
        for slot, owner, samples in zip(plan.slots.tolist(), plan.owners, plan.samples.tolist(), strict=True):
            name = owner.request_id  # type: ignore[attr-defined]
            if self.lags.get(name, False) and samples:
                assert masks.pop(slot) == len(self.tokens(name))
        assert not masks

    def tick(self) -> StepPlan | None:
        """One turn: schedule, then read back when nothing could run or more than ``depth`` steps are in flight."""
        plan = self.launch()
        while self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.collect()
            if plan is None:
                break
        return plan

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            self.pay(len(self.owed))
            if not self.scheduler.has_unfinished() and not self.in_flight:
                break
            self.tick()
            self.scheduler.check_integrity()
        assert not self.scheduler.has_unfinished() and self.scheduler.num_in_flight == 0, "no end in sight"
        life = self.scheduler._life
        assert life.table.num_free == self.config.max_num_seqs
        assert life.kv.pool.num_free == self.config.num_blocks - 1
        self.scheduler.check_integrity()

    def tokens(self, name: str) -> list[int]:
        return [t for u in self.updates[name] for t in u.new_token_ids]

    def reason(self, name: str) -> str | None:
        return self.updates[name][-1].finish_reason if self.updates[name] else None
