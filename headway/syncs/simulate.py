"""A program for device="cuda" on a machine without CUDA: it runs on the CPU, and the waits that a card would make are found.

What it shows is which calls *would* wait, by the rules of ``sim/rules.py``, not how long. It cannot serve what needs a real
device: C++ and CUDA extensions, and of Triton's kernels those that Triton's interpreter cannot run. Those raise ProbeError or
their own errors. torch.compile runs eagerly; a CUDA graph runs its body again.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
import torch.overrides

from headway.syncs.errors import ProbeError
from headway.syncs.probes import Counted, Sink
from headway.syncs.sim import autocast, backend
from headway.syncs.sim.calls import Functions
from headway.syncs.sim.cuda import fake_cuda
from headway.syncs.sim.flags import report
from headway.syncs.sim.tensor import Dispatch, SimTensor, execute

__all__ = ["SimTensor", "SimulationProbe"]


class SimulationProbe:
    """Pretends CUDA on every thread that attaches. The same interface as the live probe."""

    name = "simulation"
    watches = "host reads, data-dependent sizes, blocking and pageable copies, synchronize and query calls; no times"

    def __init__(self) -> None:
        self._thread = _Stacks()
        self._fakes = contextlib.ExitStack()
        self._shared = Counted(self._up, self._down)

    def attach(self, sink: Sink) -> None:
        """Enter the pretence on this thread. The sink is always the judge, which sees this thread's regions.

        Raises:
            ProbeError: this machine has CUDA, where the real probe tells more; or this torch cannot host the backend.
        """
        del sink
        if not self._thread.stacks and torch.version.cuda is not None and torch._C._cuda_getDeviceCount() > 0:  # noqa: SLF001
            raise ProbeError("this machine has a GPU: the simulation would tell less than the live probe")
        backend.register(execute)
        autocast.register()
        self._shared.__enter__()
        stack = contextlib.ExitStack()
        if not self._thread.stacks:
            stack.enter_context(Dispatch())  # type: ignore[no-untyped-call]
            stack.enter_context(Functions())
            # Autograd's own threads would know nothing of the pretence: gradients are made on the thread that asks.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._thread.stacks.append(stack)

    def detach(self) -> None:
        """Leave it again."""
        with contextlib.suppress(RuntimeError):  # the program took our mode off the stack: check() has said so
            self._thread.stacks.pop().close()
        self._shared.__exit__()

    def check(self) -> None:
        """Whether the pretence still stands on this thread.

        Raises:
            ProbeError: the program took a mode away, or asked for what the simulation does not serve.
        """
        modes = [type(mode) for mode in torch.overrides._get_current_function_mode_stack()]  # noqa: SLF001
        if Functions not in modes:
            raise ProbeError("the program took the pretence off this thread: calls after that were not seen")
        unserved, backend.STATE.unserved = backend.STATE.unserved, []
        if unserved:
            raise ProbeError(f"the program met an error of the simulation and went on: {unserved[0]}")

    def _up(self) -> None:
        backend.STATE.unserved.clear()  # what an earlier run left, if it ended before its check
        self._fakes.enter_context(fake_cuda(report))

    def _down(self) -> None:
        self._fakes.close()


class _Stacks(threading.local):
    def __init__(self) -> None:
        self.stacks: list[contextlib.ExitStack[Any]] = []
