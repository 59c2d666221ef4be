"""``Accord``: an engine's side of the steps that replicas run together, because they share the experts of a mixture.

``parallel.dp`` decides; this gives it what the scheduler wants and letters to send, and says what the loop may do now:

    limit = accord.begin(wanted)      None: this step's size is not known yet, or nobody wants a step
    ...launch a plan within the limit, or an empty step...
    accord.launched()

An engine without work of its own runs the others' steps, empty. Nothing here waits but ``wait``, which the loop calls when it
has nothing else to do.
"""

from __future__ import annotations

from time import monotonic, perf_counter
from typing import Final

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.plan import StepLimit
from headway.core.seat import Seat
from headway.device.waits import WaitCounter
from headway.engine.world import World
from headway.parallel.box import LetterBox
from headway.parallel.dp import Agreement, Want, Watchdog

LEAST_TOKENS: Final = 8
"""Of a step, and of the first ones after a pause, which nobody was asked about."""
AUTO_DEPTH: Final = 4
"""How many steps ahead replicas agree where the run-ahead is not fixed: as many as there can be in flight."""
WAIT_SECONDS: Final = 0.05
"""How long to listen for letters before the door is looked after again."""


class Accord:
    """One replica's side.

    Args:
        seat: which replica this is.
    """

    def __init__(self, seat: Seat, args: EngineArgs) -> None:
        self._seat = seat
        self._depth = AUTO_DEPTH if args.run_ahead == "auto" else max(int(args.run_ahead), 1)
        self._seconds = float(args.distributed_timeout_seconds)
        self.box = LetterBox(seat)
        self._waited = 0.0
        self._agreement: Agreement
        self._watchdog: Watchdog

    def begin_with(self, max_tokens: int, max_rows: int, world: World) -> None:
        """Called once, when the engine's sizes are known; all replicas must have the same. Blocks until they are here.

        Raises:
            ConfigError: they have others.
        """
        size = max_tokens << 20 | max_rows
        if world.least_of_leaders(size) != -world.least_of_leaders(-size):
            raise ConfigError(
                f"replicas that share experts need steps of one size, and this one's have {max_tokens} tokens and {max_rows} "
                "rows; set max_num_batched_tokens and max_num_seqs"
            )
        # Steps of decode rows alone have at most ``max_rows``, and there are graphs of no more.
        sizes = {min(LEAST_TOKENS, max_rows), max_rows, max_tokens}
        sizes |= {1 << n for n in range(LEAST_TOKENS.bit_length() - 1, max_tokens.bit_length()) if 1 << n <= max_tokens}
        seat = self._seat
        self._agreement = Agreement(seat.rank, seat.size, self.box, depth=self._depth, sizes=sorted(sizes))
        self._watchdog = Watchdog(self._agreement, self._seconds)

    def is_needed(self) -> bool:
        """Whether the replicas run steps, or one of them has begun to."""
        self._take()
        return self._agreement.awake or self._agreement.must_wake()

    def begin(self, wanted: Want) -> StepLimit | None:
        """Begin the next step.

        Args:
            wanted: bounds on what this replica would put into it.

        Raises:
            RankError: another replica contradicts itself, or has been silent for too long.
        """
        agreement = self._agreement
        self._take()
        if not agreement.awake:
            if agreement.must_wake():
                agreement.follow()
            elif wanted.is_nothing:
                return None
            else:
                agreement.wake()
        if not agreement.begin(wanted):
            self._watchdog.look(monotonic())
            return None
        self._watchdog.look(monotonic())
        if agreement.stops:
            agreement.sleep()
            return None
        bucket = agreement.bucket
        assert bucket is not None
        return StepLimit(bucket.tokens, bucket.only_decode)

    def launched(self) -> None:
        """The step is on its way."""
        self._agreement.next()

    def wait(self) -> None:
        """Until a letter comes, or a moment; counted where the step cannot begin without it."""
        start = perf_counter()
        self.box.flush()
        self.box.wait(WAIT_SECONDS)
        if self._agreement.awake:
            self._waited += perf_counter() - start

    def waits(self) -> dict[str, WaitCounter]:
        """How often steps had to wait for other replicas, by reason. The seconds are those of all reasons."""
        counts = self._agreement.waits.by_reason
        return {reason: WaitCounter(number, self._waited / len(counts)) for reason, number in counts.items()}

    def close(self) -> None:
        """This replica leaves."""
        self.box.close()

    def _take(self) -> None:
        self.box.flush()
        for letter in self.box.receive():
            self._agreement.take(letter)
