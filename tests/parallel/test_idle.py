"""Ranks that have nothing to do sleep. A loop that turns instead gives the same answers, and takes a core."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import pytest

from headway.core.seat import Seat
from headway.parallel.box import LetterBox
from headway.parallel.dp import IDLE, Letter
from headway.parallel.keys import OwnKeys, wait_for


def test_between_two_looks_for_a_word_others_have_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word comes while this one sleeps."""
    keys, slept = OwnKeys(), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            keys.set("word", b"said")

    monkeypatch.setattr(time, "sleep", sleep)
    assert wait_for(keys, "word", 2.0) == b"said" and slept == [0.002] * 3


def test_a_replica_with_nothing_to_do_sleeps_until_a_letter_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that returned at once would give the same tokens, and take a core. The letter is sent once the box listens."""
    first, second = (LetterBox(Seat(rank, 2, str(tmp_path))) for rank in range(2))
    letter, listen = Letter(0, 1, 7, IDLE), select.select

    def listens(*sources: Any) -> Any:
        first.send(letter)
        return listen(*sources)

    monkeypatch.setattr(select, "select", listens)
    second.wait(60.0)
    assert second.receive() == [letter]
    first.close()
    second.close()
