"""How ranks that share experts agree on the size of each step, without waiting for each other.

Such ranks serve requests of their own, but each layer sends tokens to experts on all of them, so all run step n together, on
graphs of the same size. What size that is was decided ``depth`` steps before: when a rank begins step n, it publishes what it
wants of step n + depth, and what a step may hold is a function of what all ranks wanted of it. These messages arrive while
the steps between are running. A rank can be ahead of another by ``depth`` steps, no more; then it waits, on the host, and the
wait is counted.

    begin(want)      publish what this rank wants of step n + depth; true when the bucket of step n is known
    bucket           plan within it, launch, go on with ``next``

A rank that wants nothing runs the same step with no live rows. When all ranks wanted nothing of a step, all of them stop in
front of it: they sleep, until one has work and wakes the others. Each time they wake a new epoch begins; messages carry epoch
and step, so one that is late is known as such. There is no clock, socket or tensor in here: ``Peers`` carries the messages,
and whoever waits knows the time. tests/parallel/network.py carries them late and out of order.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from headway.parallel.group import RankError


class Want(NamedTuple):
    """What a rank wants of a step: upper bounds, which the host knows when it schedules.

    Attributes:
        tokens, rows: of its own.
        width: tokens of its decode rows, drafts included.
        only_decode: it has no prompts.
        halves: it could run the step as two micro-batches.
    """

    tokens: int = 0
    rows: int = 0
    width: int = 1
    only_decode: bool = True
    halves: bool = False

    @property
    def is_nothing(self) -> bool:
        return self.rows == 0


IDLE: Final = Want(halves=True)


class Bucket(NamedTuple):
    """What a step may hold on every rank; all run it in this size.

    Attributes:
        tokens, rows: at most.
        width: tokens of a decode row.
        only_decode: no rank may bring a prompt.
        halves: all run it as two micro-batches.
    """

    tokens: int
    rows: int
    width: int
    only_decode: bool
    halves: bool

    @property
    def check(self) -> int:
        """A number by which two ranks see that they mean the same: 31 bits."""
        found = 17
        for value in self:
            found = (found * 1_000_003 + int(value)) & 0x7FFFFFFF
        return found


def agreed(wants: Sequence[Want], sizes: Sequence[int]) -> Bucket:
    """The bucket of what all ranks wanted of a step: the least of ``sizes`` (rising) that holds the most of each.

    Wants beyond the largest size are cut to it: they are wishes, not plans.
    """
    tokens = max(want.tokens for want in wants)
    rows = max(want.rows for want in wants)
    return Bucket(
        _fitting(max(tokens, rows), sizes),
        _fitting(rows, sizes),
        max(want.width for want in wants),
        all(want.only_decode for want in wants),
        all(want.halves for want in wants),
    )


def _fitting(number: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= number), sizes[-1])


class Letter(NamedTuple):
    """One message: 32 bytes.

    Attributes:
        rank: the sender.
        epoch, step: what it is about.
        want: what the sender wants of that step.
        ran_check: ``Bucket.check`` of step ``step - depth``, which the sender is beginning; 0 where it does not know it yet.
        wakes: it is no want: the sender begins this epoch.
    """

    rank: int
    epoch: int
    step: int
    want: Want
    ran_check: int = 0
    wakes: bool = False

    def encode(self) -> bytes:
        """32 bytes."""
        want = self.want
        flags = want.only_decode | want.halves << 1 | self.wakes << 2
        return _LETTER.pack(
            self.rank, want.width, self.epoch, self.step, want.tokens, want.rows, self.ran_check, flags, _VERSION
        )

    @classmethod
    def decode(cls, data: bytes) -> Letter:
        """Raises RankError on anything else."""
        if len(data) != _LETTER.size:
            raise RankError(f"{len(data)} bytes that are not a message of a rank")
        rank, width, epoch, step, tokens, rows, check, flags, version = _LETTER.unpack(data)
        if version != _VERSION:
            raise RankError(f"rank {rank} speaks version {version} of the agreement, this one {_VERSION}")
        want = Want(tokens, rows, width, bool(flags & 1), bool(flags & 2))
        return cls(rank, epoch, step, want, check, bool(flags & 4))


_LETTER: Final = struct.Struct("<HHIIIIIII")
_VERSION: Final = 1


class Peers(Protocol):
    """Carries letters to all other ranks. Never blocks."""

    def send(self, letter: Letter) -> None: ...


@dataclass(slots=True)
class Waits:
    """Why a rank had to wait for others: counted once for each step."""

    by_reason: Counter[str]

    def add(self, reason: str) -> None:
        """One more."""
        self.by_reason[reason] += 1


LAGS, STARTS = "peer_lags", "peer_wakes"
"""Reasons: another rank is ``depth`` steps behind; or has not begun this epoch yet."""


class Agreement:
    """One rank's side.

    Args:
        rank, size: of the ranks that share experts.
        depth: how many steps ahead they agree, at least 1.
        sizes: sizes there are graphs of, rising.

    Attributes:
        epoch, step: what this rank is about to run.
        awake: whether it runs steps.
        waits: how often it had to wait, by reason.
        late: letters that came when nobody needed them any more.
    """

    def __init__(self, rank: int, size: int, peers: Peers, *, depth: int, sizes: Sequence[int]) -> None:
        assert depth >= 1, "who agrees on a step while it begins waits in each"
        self.rank, self.size, self.depth = rank, size, depth
        self._peers, self._sizes = peers, tuple(sizes)
        self.epoch, self.step, self.awake = 0, 0, False
        self.waits, self.late = Waits(Counter()), 0
        self._wants: dict[tuple[int, int], dict[int, Want]] = {}
        self._checks: dict[tuple[int, int], tuple[int, int]] = {}  # who first said how large a step is
        self._bucket: Bucket | None = None
        self._woken = 0  # the latest epoch that somebody has begun
        self._published = False
        self._waited = False

    # -- letters ---------------------------------------------------------------------------------------------------

    def take(self, letter: Letter) -> None:
        """A letter has come, in any order, perhaps twice.

        Raises:
            RankError: it contradicts an earlier one, or what this rank has run.
        """
        if not 0 <= letter.rank < self.size or letter.rank == self.rank:
            raise RankError(f"a letter of rank {letter.rank}, which is none of {self.size}")
        if letter.epoch > self.epoch + 1:
            raise RankError(f"rank {letter.rank} is in epoch {letter.epoch}, this one still in {self.epoch}")
        self._woken = max(self._woken, letter.epoch)
        if letter.wakes:
            return
        if (letter.epoch, letter.step) < (self.epoch, self.step):
            self.late += 1
            return
        known = self._wants.setdefault((letter.epoch, letter.step), {})
        if known.setdefault(letter.rank, letter.want) != letter.want:
            raise RankError(f"rank {letter.rank} wants two things of step {letter.step}")
        if letter.ran_check and letter.step >= self.depth:
            self._compare(letter.epoch, letter.step - self.depth, letter.rank, letter.ran_check)

    def _compare(self, epoch: int, step: int, rank: int, check: int) -> None:
        """What ``rank`` runs as a step must be what all others do."""
        other, theirs = self._checks.setdefault((epoch, step), (rank, check))
        if theirs != check:
            raise RankError(f"rank {rank} runs step {step} of epoch {epoch} in another size than rank {other}")

    # -- steps -----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """This rank has work: all ranks begin a new epoch."""
        if self.awake:
            return
        self._begin_epoch()
        self._peers.send(Letter(self.rank, self.epoch, 0, IDLE, wakes=True))

    def must_wake(self) -> bool:
        """Whether another rank has begun a new epoch, while this one sleeps."""
        return not self.awake and self._woken > self.epoch

    def _begin_epoch(self) -> None:
        self.epoch, self.step, self.awake = self.epoch + 1, 0, True
        self._woken = max(self._woken, self.epoch)
        self._published = self._waited = False
        self._bucket = None

    def follow(self) -> None:
        """Begin the epoch that another rank has begun."""
        if self.must_wake():
            self._begin_epoch()

    def begin(self, want: Want) -> bool:
        """Begin the step: publish ``want`` for the one ``depth`` later, once. Whether the step's bucket is known; if not,
        call it again when letters have come."""
        assert self.awake, "wake first"
        bucket = self.bucket
        if not self._published:
            self._published = True
            target = (self.epoch, self.step + self.depth)
            self._wants.setdefault(target, {})[self.rank] = want
            check = 0 if bucket is None else bucket.check
            self._peers.send(Letter(self.rank, self.epoch, self.step + self.depth, want, check))
        if bucket is None:
            if not self._waited:
                self._waited = True
                self.waits.add(LAGS if self.step >= 2 * self.depth else STARTS)
            return False
        self._compare(self.epoch, self.step, self.rank, bucket.check)
        return True

    @property
    def bucket(self) -> Bucket | None:
        """What this step may hold; None: some rank has not said yet what it wants of it."""
        if self.step < self.depth:  # nobody was asked: the least there is, with room for the first rows of everybody
            return Bucket(self._sizes[0], self._sizes[0], 1, False, False)
        if self._bucket is None:
            known = self._wants.get((self.epoch, self.step), {})
            if len(known) == self.size:
                self._bucket = agreed(list(known.values()), self._sizes)
        return self._bucket

    @property
    def missing(self) -> list[int]:
        """The ranks whose want of this step has not come."""
        if self.step < self.depth:
            return []
        known = self._wants.get((self.epoch, self.step), {})
        return [rank for rank in range(self.size) if rank not in known]

    @property
    def stops(self) -> bool:
        """Whether all ranks stop in front of this step, whose bucket is known: none wanted anything of it."""
        if self.step < self.depth:
            return False
        known = self._wants.get((self.epoch, self.step), {})
        return len(known) == self.size and all(want.is_nothing for want in known.values())

    def next(self) -> None:
        """The step has been launched."""
        self._forget()
        self.step += 1
        self._published = self._waited = False
        self._bucket = None

    def sleep(self) -> None:
        """Stop in front of this step, as all others do. Work that has come since waits for the next epoch: ``wake``."""
        assert self.stops
        self.awake = False
        for key in [key for key in self._wants if key[0] <= self.epoch]:
            del self._wants[key]
        for key in [key for key in self._checks if key[0] <= self.epoch]:
            del self._checks[key]

    def _forget(self) -> None:
        self._wants.pop((self.epoch, self.step), None)
        self._checks.pop((self.epoch, self.step - 2 * self.depth), None)


class Watchdog:
    """Tells when a rank has waited too long for others, and which of them are missing.

    Args:
        seconds: that another rank may be silent.
    """

    def __init__(self, agreement: Agreement, seconds: float) -> None:
        self._agreement, self._seconds = agreement, seconds
        self._since: tuple[tuple[int, int], float] | None = None

    def look(self, now: float) -> None:
        """Called while the rank waits; ``now`` in seconds on any clock.

        Raises:
            RankError: it has waited for one step for too long; names the ranks that are missing.
        """
        agreement = self._agreement
        at = (agreement.epoch, agreement.step)
        if self._since is None or self._since[0] != at or not agreement.missing:
            self._since = at, now
        elif now - self._since[1] > self._seconds:
            names = ", ".join(f"rank {rank}" for rank in agreement.missing)
            raise RankError(
                f"{names} said nothing of step {agreement.step} (epoch {agreement.epoch}) within {self._seconds:g} s"
            )
