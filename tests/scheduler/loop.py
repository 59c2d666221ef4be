"""The host loop in miniature: run ahead by ``depth`` steps, collect what every request got."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headway.core.config import SchedulerConfig
from headway.core.messages import AddRequest, RequestUpdate
from headway.core.plan import StepPlan, StepResult
from headway.scheduler import Scheduler
from tests.scheduler.fake_device import FakeDevice


def make_config(**changes: object) -> SchedulerConfig:
    base: dict[str, object] = {
        "max_num_seqs": 4,
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
    in_flight: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    updates: dict[str, list[RequestUpdate]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.device = FakeDevice(self.config)

    def add(self, *messages: AddRequest) -> None:
        for message in messages:
            self.scheduler.add(message)
            self.updates[message.request_id] = []

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def collect(self) -> list[RequestUpdate]:
        got = self.scheduler.apply(*self.in_flight.popleft())
        for update in got:
            self.updates[update.request_id].append(update)
        return got

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
