"""Captured graphs: the queued work is kept and replayed on the same memory."""

from __future__ import annotations

from collections.abc import Callable

from headway.device.sim.errors import here
from headway.device.sim.memory import Memory, access
from headway.device.sim.timeline import Task, Timeline


class SimGraph:
    """A recorded sequence of tasks. See ``device.base.Graph``.

    Everything allocated while it was recorded belongs to it and is poisoned at the start of each replay, as other graphs
    of the same memory pool may have used it meanwhile.
    """

    def __init__(self, timeline: Timeline, tasks: list[Task], memories: list[Memory]) -> None:
        self._timeline, self.tasks, self.memories = timeline, tasks, memories

    def replay(self) -> None:
        """Queue every task again on the current stream."""
        timeline, place = self._timeline, here()

        def poison() -> None:
            for memory in self.memories:
                memory.poison(timeline.poison_int)

        whole = [access(memory, memory.flat, True) for memory in self.memories]
        timeline.enqueue(Task("graph launch", poison, whole, place))
        for task in self.tasks:
            timeline.enqueue(Task(task.name, task.run, task.accesses, task.place))
        timeline.progress()


def capture(timeline: Timeline, body: Callable[[], object], first: SimGraph | None = None) -> SimGraph:
    """Record what ``body`` queues, without running it, behind the work of ``first``."""
    timeline.refuse_in_capture("a graph capture")
    tasks: list[Task] = []
    timeline.capturing, timeline.captured_memory = tasks, []
    try:
        with timeline.main.active():
            body()
    finally:
        timeline.capturing = None
    memories = timeline.captured_memory
    if first is not None:
        tasks, memories = [*first.tasks, *tasks], [*first.memories, *memories]
    return SimGraph(timeline, tasks, memories)
