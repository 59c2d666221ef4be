"""Ranks that agree over a network which a seed makes slow and disorderly: time is simulated, nothing sleeps."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from headway.parallel.dp import IDLE, Agreement, Bucket, Letter, Want, Watchdog

SIZES = (4, 8, 16, 32)
PATIENCE = 1e6


@dataclass
class Scenario:
    """What a seed draws."""

    seed: int
    size: int = 0
    depth: int = 0
    delay: float = 0.0
    arrivals: int = 0
    killed: int | None = None

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.size = self.size or rng.choice((2, 2, 3, 4, 8))
        self.depth = self.depth or rng.choice((1, 1, 2, 3, 4))
        self.delay = self.delay or rng.choice((0.01, 0.5, 2.0, 20.0))
        self.arrivals = self.arrivals or rng.randint(1, 12)


@dataclass
class Rank:
    """An engine that schedules, launches and applies, in a few lines: jobs are steps that a row still needs."""

    agreement: Agreement
    watchdog: Watchdog
    jobs: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    ran: list[tuple[int, int, Bucket]] = field(default_factory=list)
    in_flight: int = 0
    scheduled: bool = False
    dead: bool = False
    finished: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.jobs or self.prompts)

    def want(self) -> Want:
        rows = len(self.jobs) + len(self.prompts)
        return Want(rows + 2 * len(self.prompts), rows, 1, not self.prompts, True) if rows else IDLE


class Network:
    """Runs a scenario to its end. ``sim.deadlocked`` tells whether somebody was left waiting.

    Args:
        agree: makes a rank's agreement: tests plant faults with it.
    """

    def __init__(self, scenario: Scenario, agree: Callable[..., Agreement] = Agreement) -> None:
        self.scenario, self.rng = scenario, random.Random(scenario.seed + 1)
        self.now, self._events, self._order = 0.0, list[tuple[float, int, Callable[[], None]]](), itertools.count()
        self.launched: dict[tuple[int, int], dict[int, Bucket]] = defaultdict(dict)
        self.ranks: list[Rank] = []
        for number in range(scenario.size):
            post = _Post(self, number)
            agreement = agree(number, scenario.size, post, depth=scenario.depth, sizes=SIZES)
            self.ranks.append(Rank(agreement, Watchdog(agreement, PATIENCE)))
        self.slow = [self.rng.choice((1.0, 1.0, 1.0, 5.0, 50.0)) for _ in self.ranks]
        for _ in range(scenario.arrivals):
            at, rank = self.rng.random() * 60.0, self.rng.randrange(scenario.size)
            self.at(at, partial(self._arrive, rank))
        if scenario.killed is not None:
            self.at(self.rng.random() * 30.0, lambda: self._kill(scenario.killed or 0))

    # -- events ----------------------------------------------------------------------------------------------------

    def at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), do))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.at(self.now + seconds, do)

    def run(self, most: int = 200_000) -> None:
        for _ in range(most):
            if not self._events:
                return
            self.now, _, do = heapq.heappop(self._events)
            do()
        raise AssertionError("the ranks turn for ever")

    def deliver(self, to: int, letter: Letter) -> None:
        rank = self.ranks[to]
        if not rank.dead:
            rank.agreement.take(Letter.decode(letter.encode()))
            self._poke(to)

    def _arrive(self, number: int) -> None:
        rank = self.ranks[number]
        rank.prompts += [self.rng.randint(1, 9) for _ in range(self.rng.randint(1, 3))]
        self._poke(number)

    def _kill(self, number: int) -> None:
        self.ranks[number].dead = True
        # The others wait; their watchdogs look now and then.
        for nth in range(len(self.ranks)):
            for later in (1.0, PATIENCE * 2 + 2):
                self.after(later, partial(self._look, nth))

    def _look(self, number: int) -> None:
        rank = self.ranks[number]
        if not rank.dead and rank.agreement.awake:
            rank.watchdog.look(self.now)

    def _poke(self, number: int) -> None:
        """The rank's loop gets to run some time later, once however often it is poked."""
        rank = self.ranks[number]
        if not rank.scheduled and not rank.dead:
            rank.scheduled = True
            self.after(self.rng.random() * 0.2 * self.slow[number], lambda: self._turn(number))

    # -- a rank's loop ---------------------------------------------------------------------------------------------

    def _turn(self, number: int) -> None:
        rank = self.ranks[number]
        rank.scheduled = False
        if rank.dead:
            return
        agreement = rank.agreement
        if not agreement.awake:
            if agreement.must_wake():
                agreement.follow()
            elif rank.has_work:
                agreement.wake()
            else:
                return
        if rank.in_flight > agreement.depth:
            return  # its oldest result will poke it
        if not agreement.begin(rank.want()):
            return  # a letter will
        if agreement.stops:
            agreement.sleep()
            self._poke(number)
            return
        bucket = agreement.bucket
        assert bucket is not None
        self._launch(number, bucket)
        agreement.next()
        self._poke(number)

    def _launch(self, number: int, bucket: Bucket) -> None:
        rank, key = self.ranks[number], (self.ranks[number].agreement.epoch, self.ranks[number].agreement.step)
        while rank.prompts and not bucket.only_decode and len(rank.jobs) < bucket.rows:
            rank.jobs.append(rank.prompts.pop(0))
        rows = rank.jobs[: bucket.rows]
        assert len(rows) <= bucket.tokens
        rank.jobs = [left - 1 for left in rows if left > 1] + rank.jobs[bucket.rows :]
        rank.finished += sum(left == 1 for left in rows)
        rank.ran.append((*key, bucket))
        rank.in_flight += 1
        there = self.launched[key]
        there[number] = bucket
        assert len(set(there.values())) == 1, f"step {key} runs in two sizes: {there}"
        if len(there) == len(self.ranks):  # the device's collectives go through when the last rank has come
            self.after(self.rng.random() * 0.5, lambda: self._done(key))

    def _done(self, key: tuple[int, int]) -> None:
        for number, rank in enumerate(self.ranks):
            rank.in_flight -= 1
            self._poke(number)

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def deadlocked(self) -> list[int]:
        """Ranks that were left with work, or in a step that others did not run."""
        return [n for n, rank in enumerate(self.ranks) if rank.has_work or rank.in_flight or rank.agreement.awake]


class _Post:
    def __init__(self, network: Network, sender: int) -> None:
        self._network, self._sender = network, sender

    def send(self, letter: Letter) -> None:
        network = self._network
        for to in range(network.scenario.size):
            if to != self._sender:
                for _ in range(1 + (network.rng.random() < 0.05)):  # some come twice
                    delay = network.rng.random() * network.scenario.delay
                    network.after(delay, partial(network.deliver, to, letter))
