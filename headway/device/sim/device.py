"""``SimDevice``: the simulated device as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from headway.device.base import Event, Graph, Stream
from headway.device.sim import graph
from headway.device.sim.errors import here
from headway.device.sim.invariants import step_invariants
from headway.device.sim.memory import POISON_INTS
from headway.device.sim.ops import Observer, Operations, SimMode
from headway.device.sim.timeline import SimEvent, Timeline

MEMORY_BYTES = 2 * 2**30
"""What the device claims to have."""


class SimDevice:
    """An asynchronous device made of CPU tensors. See ``device.base.Device`` and the package.

    One device is in use per thread: the latest entered, with ``with`` or ``enter``. Inside a stream's ``active()``, and
    everywhere after ``arm()``, whatever blocks the host raises HostSyncError; reading a device value raises always.

    Args:
        seed: chooses streams' speeds, interleavings and poison.
        speeds: of the main and the copy stream, 0 (runs only what somebody waits for) to 1 (runs at once).
        observers: by operation name, see ``ops.Observer``; added to the engine's invariants.
    """

    pins_memory = True
    asynchronous = True
    captures_graphs = True
    compiles_kernels = False

    def __init__(
        self,
        seed: int = 0,
        *,
        speeds: tuple[float, float] | None = None,
        observers: Iterable[tuple[str, Observer]] = (),
    ) -> None:
        self.seed = seed
        self.torch_device = torch.device("meta")
        self.timeline = Timeline(seed, speeds)
        self.timeline.poison_int = self.timeline.rng.choice(POISON_INTS)
        self.main: Stream = self.timeline.main
        self.copies: Stream = self.timeline.copies
        self.clock: Stream | None = self.timeline.clock
        self.notes = [f"simulated device, seed {seed}: for tests, no computation here is fast"]
        table: dict[str, list[Observer]] = {}
        for name, observer in [*step_invariants(), *observers]:
            table.setdefault(name, []).append(observer)
        self.operations = Operations(self.timeline, table)
        self._previous: Operations | None = None
        self._modes = ExitStack()

    # -- the interface of a device ---------------------------------------------------------------------------------

    def new_event(self, timing: bool = False) -> Event:
        """An event of this device; its time is the number of operations executed so far."""
        return SimEvent(self.timeline, timing)

    def new_stream(self) -> Stream:
        """One as fast as the seed says."""
        return self.timeline.new_stream()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The current stream is the device's, and the dispatcher a thread's."""
        mode = SimMode(self.operations)
        with mode, mode.guard:
            yield

    def host_ints(self, num_ints: int) -> torch.Tensor:
        """A buffer whose copies are watched."""
        return self.operations.pinned(num_ints)

    def capture(self, body: Callable[[], object], *, first: Graph | None = None, reused: bool = False) -> Graph:
        """Record the work that ``body`` queues."""
        assert first is None or isinstance(first, graph.SimGraph)
        return graph.capture(self.timeline, body, first)

    def memory_bytes(self) -> tuple[int, int]:
        """A small card, always empty."""
        return MEMORY_BYTES, MEMORY_BYTES

    def peak_bytes(self) -> int:
        """Not measured."""
        return 0

    def reset_peak(self) -> None:
        """Nothing is measured."""

    def wait_idle(self) -> None:
        """Run everything. Refused where blocking is."""
        if self.timeline.strict:
            self.timeline.refuse(f"wait_idle() blocks the host at {here()}")
        self.timeline.host_waits += 1
        self.timeline.run_all()

    # -- the interface of a test -----------------------------------------------------------------------------------

    def arm(self) -> None:
        """Start-up is over: from now on only the readback may wait."""
        self.timeline.armed = True

    def disarm(self) -> None:
        """Shutdown: blocking is allowed again."""
        self.timeline.armed = False

    def check(self) -> None:
        """Raise the first error there was, also when the engine caught it; look for rewritten buffers."""
        if self.timeline.violations:
            raise self.timeline.violations[0]
        self.operations.check_buffers()

    def enter(self) -> None:
        """Tensors made for the meta device in this thread live here from now on."""
        current = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, SimMode)), None)
        if current is None:
            self._modes.enter_context(self.operations.mode)
            self._modes.enter_context(self.operations.mode.guard)
            return
        self._previous = current.operations
        current.hand_over(self.operations)

    def close(self) -> None:
        """Undo ``enter``; the device is not used any more."""
        self.timeline.closed = True
        self._modes.close()
        if self._previous is not None:
            current = next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, SimMode))
            current.hand_over(self._previous)
            self._previous = None

    def __enter__(self) -> SimDevice:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self.check()
