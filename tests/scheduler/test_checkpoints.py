"""``StateCheckpoints``: which states are kept, hit and given up; and rows that end where one is wanted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from headway.core.config import SchedulerConfig
from headway.core.errors import HeadwayError
from headway.core.plan import Exact
from headway.scheduler.cache.manager import KVManager
from headway.scheduler.cache.state import StateCheckpoints
from headway.scheduler.request import Request
from tests.scheduler.fake_device import make_request

A, B, C, D = (bytes([n]) * 16 for n in range(4))


def checkpoints(count: int = 2) -> StateCheckpoints:
    return StateCheckpoints(count, first_slot=4, block_size=8, every=64)


def test_a_checkpoint_is_hit_from_the_next_step_on() -> None:
    """In the step that writes it the copy runs behind the forward pass, and loads run before that."""
    states = checkpoints()
    slot = states.save(B)
    assert states.hit([A, B, C], 3) == 0
    states.settle()
    assert states.hit([A, B, C], 3) == 2 and states.hit([A, B, C], 1) == 0
    assert states.load(B) == slot


def test_the_least_recently_used_gives_way() -> None:
    states = checkpoints()
    slots = {name: states.save(name) for name in (A, B)}
    states.settle()
    states.load(A)
    assert states.save(C) == slots[B]
    states.settle()
    assert states.hit([B], 1) == 0 and states.hit([A], 1) == states.hit([C], 1) == 1
    states.check()


def test_what_is_there_is_not_saved_again_and_a_step_gives_up_none_of_its_own() -> None:
    states = checkpoints()
    assert states.save(A) is not None and states.save(A) is None
    assert states.save(B) is not None and states.save(C) is None, "both were written by this very step"
    states.settle()
    assert states.save(B) is None
    states.forget()
    assert len(states) == 0 and states.save(D) is not None
    states.check()


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_events(seed: int) -> None:
    """Against a list of what is named, the least recently used first: which prefixes hit, which give way, and none is lost."""
    rng, count = random.Random(seed), 1 + seed
    states, names = checkpoints(count), [bytes([n]) * 16 for n in range(2 * count + 1)]
    slot_of, written = dict[bytes, int](), dict[bytes, int]()
    for _ in range(400):
        name, event = rng.choice(names), rng.choices(("save", "settle", "load", "forget"), (8, 3, 8, 1))[0]
        if event == "save":
            slot = states.save(name)
            if name in slot_of or name in written or len(written) == count:
                assert slot is None
            else:
                assert slot is not None
                if len(slot_of) + len(written) == count:
                    assert slot == slot_of.pop(next(iter(slot_of))), "the one used longest ago gives way"
                assert slot not in [*slot_of.values(), *written.values()]
                written[name] = slot
        elif event == "load" and name in slot_of:
            assert states.load(name) == slot_of[name]
            slot_of[name] = slot_of.pop(name)
        elif event != "load":
            slot_of, written = slot_of | written, {}
            if event == "forget":
                states.forget()
                slot_of = {}
            else:
                states.settle()
        states.check()
        assert [n for n in names if states.hit([n], 1)] == [n for n in names if n in slot_of]


def test_without_any_nothing_is_saved() -> None:
    assert checkpoints(0).save(A) is None


def test_a_lost_checkpoint_is_noticed() -> None:
    states = checkpoints()
    states._free.pop()
    with pytest.raises(HeadwayError, match="lost"):
        states.check()


@pytest.mark.parametrize(
    ("start", "known", "junction", "place"),
    [
        (0, 50, 0, 48),  # the last boundary of the prompt
        (0, 49, 0, 48),
        (0, 48, 0, 40),  # one token is always left to run
        (48, 50, 0, None),
        (0, 50, 40, 40),  # where it leaves a cached prefix
        (40, 50, 40, 48),
        (0, 200, 0, 64),  # every so many tokens
        (64, 200, 0, 128),
        (128, 200, 0, 192),
        (0, 25, 0, None),  # too short
        (0, 50, 16, 48),
    ],
)
def test_places_that_want_a_checkpoint(start: int, known: int, junction: int, place: int | None) -> None:
    assert checkpoints().next_place(Exact(start), Exact(known), Exact(junction)) == place


@pytest.mark.parametrize("start", [0, 8, 64])
def test_a_row_may_end_where_a_checkpoint_is_wanted(start: int) -> None:
    """Then it ends there as it would have, and is saved; one that ends before is not, and a longer one is cut."""
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 512, "max_model_len": 512, "block_size": 8}
    config = SchedulerConfig(**sizes, num_blocks=99, has_states=True, num_checkpoints=9, checkpoint_every=64)
    tokens = np.arange(300, dtype=np.int32)
    place = start // 64 * 64 + 64
    for end in (place - 1, place, place + 1):
        kv, one = KVManager(config), Request(make_request("a", tokens.tolist(), 1), 512, 0)
        found, slot = kv.row_end(one, tokens, Exact(start), Exact(end), Exact(len(tokens)))
        assert (found, slot is not None) == (min(end, place), end >= place)
