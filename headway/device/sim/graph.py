"""Captured graphs: the queued work is kept and replayed on the same memory."""

from __future__ import annotations

from collections.abc import Callable

from headway.device.sim.errors import here
from headway.device.sim.memory import Memory, access
from headway.device.sim.timeline import Capture, SimEvent, SimStream, Task, Timeline


class SimGraph:
    """Recorded work. See ``device.base.Graph``.

    Everything allocated while it was recorded belongs to it and is poisoned at the start of each replay, as other graphs
    of the same memory pool may have used it meanwhile.
    """

    def __init__(
        self, timeline: Timeline, items: list[tuple[SimStream, Task | SimEvent, bool]], memories: list[Memory]
    ) -> None:
        self._timeline, self.items, self.memories = timeline, items, memories

    def replay(self) -> None:
        """Queue everything again: what was captured on the main stream on the current one."""
        timeline, place = self._timeline, here()

        def poison() -> None:
            for memory in self.memories:
                memory.poison(timeline.poison_int)

        whole = [access(memory, memory.flat, True) for memory in self.memories]
        timeline.enqueue(Task("graph launch", poison, whole, place))
        events: dict[SimEvent, SimEvent] = {}
        for captured, item, waits in self.items:
            stream = timeline.current if captured is timeline.main else captured
            if isinstance(item, Task):
                timeline.enqueue(Task(item.name, item.run, item.accesses, item.place), stream)
            elif waits:
                stream.wait_event(events[item])
            else:
                events[item] = SimEvent(timeline)
                events[item].record(stream)
        timeline.progress()


def capture(timeline: Timeline, body: Callable[[], object], first: SimGraph | None = None) -> SimGraph:
    """Record what ``body`` queues, without running it, behind the work of ``first``."""
    timeline.refuse_in_capture("a graph capture")
    made = timeline.capturing = Capture(timeline)
    try:
        with timeline.main.active():
            body()
        made.check_joined()
    finally:
        timeline.capturing = None
    items, memories = made.items, made.memories
    if first is not None:
        items, memories = [*first.items, *items], [*first.memories, *memories]
    return SimGraph(timeline, items, memories)
