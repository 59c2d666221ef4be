"""Passes of items through an encoder, cut over steps: rows that decode wait for some blocks of it, not for all.

One pass is under way at a time, so that one item's activations lie on the device. Passes end in the order in which they were
asked for. A step without rows that decode holds up nobody: what is asked for in it is done whole.
"""

from __future__ import annotations

from dataclasses import replace

from headway.core.config import SchedulerConfig
from headway.core.encode import ALL_BLOCKS, EncodeJob


class Passes:
    """What is to be encoded, and what the step that is planned does of it.

    Attributes:
        jobs: of this step.
        rows_left: outputs whose input the step may still send.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._costs, self._most_work = config.encoder_blocks, config.encoder_work
        self._sound_costs = config.sound_blocks
        self._can_cut = bool(self._costs) and self._most_work > 0
        self._most_rows = config.max_encoder_rows
        self.jobs: list[EncodeJob] = []
        self._is_cut, self.rows_left, self._work_left = False, 0, 0
        self._open: dict[object, EncodeJob] = {}  # what is left of each

    def begin(self, beside_decode: bool) -> None:
        """A new step; ``beside_decode``: some of its rows decode, and shall not wait long."""
        self._is_cut = beside_decode and self._can_cut
        self.rows_left = self._most_rows // 4 if beside_decode and not self._can_cut else self._most_rows
        self._work_left = self._most_work
        self.jobs = []

    def __contains__(self, name: object) -> bool:
        """Whether the item's outputs are still to come."""
        return name in self._open

    def ask(self, job: EncodeJob) -> None:
        """The item of ``job`` is to be encoded from its first block on, also where it is under way."""
        self._open[job.name] = replace(job, first=0, end=ALL_BLOCKS, is_last=True)

    def drop(self, name: object) -> None:
        """Nobody reads the item: what was done of it is lost. Unknown names are ignored."""
        self._open.pop(name, None)

    def run(self) -> None:
        """Of what was asked for as much as the step may carry, at least a block; where nothing is cut, all."""
        for name, job in list(self._open.items()):
            is_new = not job.first
            if self._is_cut and is_new and self.jobs and job.item.rows > self.rows_left:
                return
            end = self._reach(job) if self._is_cut else ALL_BLOCKS
            if end == job.first:
                return
            self.rows_left -= job.item.rows if is_new else 0
            self.jobs.append(replace(job, end=end, is_last=end == ALL_BLOCKS))
            if end != ALL_BLOCKS:
                self._open[name] = replace(job, first=end)
                return
            del self._open[name]

    def _reach(self, job: EncodeJob) -> int:
        """The end of the job's blocks that fit into the step; ``ALL_BLOCKS``: its last is among them."""
        costs = self._sound_costs if job.item.kind == "audio" else self._costs
        for number in range(job.first, len(costs)):
            cost = costs[number].of(job.item)
            if cost > self._work_left and (self.jobs or number > job.first):
                return number
            self._work_left -= cost
        return ALL_BLOCKS
