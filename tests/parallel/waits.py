"""Whether ranks count all their waits, as seen by who they wait for: simulated devices, and letters that have not come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from headway.core.config import USUAL_THRESHOLDS, EngineArgs, Thresholds
from headway.core.messages import AddRequest, EngineStats
from headway.device.sim import SimDevice
from headway.engine import boot
from headway.engine.accord import Accord
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.parallel.dp import LAGS, STARTS
from headway.runner.executor import BACK_PRESSURE, UNPINNED_COPY
from headway.runner.runner import ModelRunner
from tests.engine.harness import Answer, run


class Waits:
    """Of all ranks that were built within ``watched``.

    Attributes:
        seen: of the host for any simulated device.
    """

    def __init__(self) -> None:
        self._runners: list[tuple[ModelRunner, int]] = []
        self._accords: dict[int, tuple[Accord, set[tuple[int, int]]]] = {}
        self.seen = 0

    def note(self, runner: ModelRunner) -> None:
        """A rank is ready: from now on nothing but the readback may wait for its device."""
        begun = 0
        if isinstance(runner.device, SimDevice):
            runner.device.arm()
            begun = runner.device.timeline.host_waits
        self._runners.append((runner, begun))

    def listens(self, accord: Accord) -> None:
        """A replica waits for letters, in front of a step."""
        agreement = accord._agreement
        if agreement.awake:
            steps = self._accords.setdefault(id(accord), (accord, set()))[1]
            steps.add((agreement.epoch, agreement.step))

    def check(self, ranks: int) -> None:
        """Of so many ranks each has counted its waits, under a reason, and there were no others."""
        assert len(self._runners) == ranks
        for runner, begun in self._runners:
            counted = {reason: counter.waits for reason, counter in runner.waits().items()}
            assert counted.keys() == {BACK_PRESSURE, UNPINNED_COPY}
            device = runner.device
            seen = device.timeline.host_waits - begun if isinstance(device, SimDevice) else 0
            assert sum(counted.values()) == seen, f"{counted} were counted, and there were {seen}"
            assert not counted[UNPINNED_COPY], "copies of the simulated device never wait"
            self.seen += seen
        for accord, steps in self._accords.values():
            reasons = {reason: counter.waits for reason, counter in accord.waits().items()}
            assert reasons.keys() <= {LAGS, STARTS}
            assert sum(reasons.values()) >= len(steps), f"{reasons} for {len(steps)} steps that were waited for"


@contextmanager
def watched() -> Iterator[Waits]:
    """Ranks that are threads of this process, from their start on."""
    waits, ready, wait = Waits(), boot._ready_runner, Accord.wait

    def noted(*given: Any) -> Any:
        found = ready(*given)
        waits.note(found[2])
        return found

    def listen(accord: Accord) -> None:
        waits.listens(accord)
        wait(accord)

    with ExitStack() as stack:
        stack.enter_context(patch.object(boot, "_ready_runner", noted))
        stack.enter_context(patch.object(Accord, "wait", listen))
        yield waits


def answers_and_stats(
    args: EngineArgs,
    requests: Callable[[EngineCore], list[AddRequest]],
    thresholds: Thresholds = USUAL_THRESHOLDS,
) -> tuple[dict[str, Answer], EngineStats]:
    """Of an engine of its own, all of whose ranks count their waits."""
    with watched() as waits:
        core = build_engine(args, progress=False, thresholds=thresholds)
        try:
            found = run(core, requests(core))
            core.check_integrity()
            stats = core.stats()
        finally:
            core.shutdown()
        waits.check(args.num_ranks)
    return found, stats
