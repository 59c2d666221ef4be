"""What is said of the steps to come, where replicas plan together: never less than what then runs, nor more than is known."""

from __future__ import annotations

import random

import pytest

from headway.scheduler.waiting import WaitingQueue
from tests.scheduler.fake_device import make_request
from tests.scheduler.loop import Loop, make_config


def test_tokens_that_wait() -> None:
    """Of all requests, or the most that is asked for: at the limit, and by one to either side."""
    loop = Loop(make_config(max_num_seqs=3, max_num_batched_tokens=64))
    loop.add(*(make_request(f"r{i}", [5] * length, 2) for i, length in enumerate((3, 7, 4))))
    queue: WaitingQueue = loop.scheduler._life.waiting
    assert [queue.tokens(most) for most in (1, 3, 4, 10, 13, 14, 15, 99)] == [1, 3, 4, 10, 13, 14, 14, 14]
    assert queue.head.request_id == "r0" and len(queue) == 3


def test_an_outlook_of_each_kind() -> None:
    loop = Loop(make_config(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, num_blocks=65))
    outlook = loop.scheduler.outlook
    assert outlook() == (0, 0, False)
    loop.add(make_request("a", [5] * 10, 9, ignore_eos=True))
    assert outlook() == (11, 1, True)
    loop.add(make_request("b", [5] * 20, 9, ignore_eos=True), make_request("c", [5], 9, ignore_eos=True))
    assert outlook() == (16, 2, True), "no more than a step holds, nor rows than there are seats"
    loop.launch()  # all of a, and 6 tokens of b
    assert loop.scheduler._life.running.prefilling is not None
    assert outlook() == (16, 2, True)
    loop.launch()
    assert loop.scheduler._life.running.prefilling is None and len(loop.scheduler._life.waiting) == 1
    assert outlook() == (3, 2, True), "two rows, and the prompt of the one that waits"
    loop.scheduler.abort("c")
    assert outlook() == (2, 2, False)
    loop.scheduler.abort("b")
    assert outlook() == (1, 1, False)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_no_step_is_larger_than_its_outlook(width: int, seed: int) -> None:
    rng = random.Random(seed)
    loop = Loop(make_config(max_num_seqs=3, width=width), depth=1)
    for number in range(60):
        if rng.random() < 0.4:
            loop.add(make_request(f"r{number}", [5] * rng.randint(1, 20), rng.randint(1, 6)))
        tokens, rows, prompts = loop.scheduler.outlook()
        plan = loop.tick()
        if plan is not None:
            assert plan.num_tokens <= tokens and plan.num_rows <= rows
            assert prompts or plan.num_decode_rows == plan.num_rows
    loop.finish()
