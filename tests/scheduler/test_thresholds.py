"""Both sides of what small pools never reach, cache counters against a model of the cache, and who is served next."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from headway.scheduler.cache.manager import KVManager
from tests.scheduler.fake_device import make_request
from tests.scheduler.loop import Loop, make_config

EVER = {"ignore_eos": True}


def admitted(loop: Loop) -> list[str]:
    plan = loop.launch()
    return [] if plan is None else [each.request.request_id for each in plan.admissions]


@pytest.mark.parametrize(("blocks", "fits"), [(5, True), (6, False)])
def test_an_admission_leaves_headroom_while_others_run(blocks: int, fits: bool) -> None:
    """17 blocks, 16 to give, a quarter of 17 to leave: with 7 taken a newcomer may take 5."""
    loop = Loop(make_config(num_blocks=17, headroom_divisor=4, max_num_batched_tokens=64, max_model_len=64))
    loop.add(make_request("first", [1] * 25, 3, **EVER))  # 7 blocks
    assert admitted(loop) == ["first"]
    loop.add(make_request("second", [2] * (4 * blocks), 3, **EVER))
    assert admitted(loop) == (["second"] if fits else [])
    loop.finish()


def test_who_is_alone_need_leave_none() -> None:
    loop = Loop(make_config(num_blocks=17, headroom_divisor=4, max_num_batched_tokens=64, max_model_len=64))
    loop.add(make_request("alone", [1] * 60, 4, **EVER))  # 15 blocks of 16
    assert admitted(loop) == ["alone"]
    loop.finish()


def test_the_queue_keeps_its_order_after_aborts() -> None:
    """Names in no order of their own, so that no other order is right by chance."""
    for gone in ("q", "z", "b", "a", "m"):
        loop = Loop(make_config(max_num_seqs=1))
        names = ["q", "z", "b", "y", "a", "m"]
        loop.add(*(make_request(name, [5], 2, **EVER) for name in names))
        order = admitted(loop)
        loop.scheduler.abort(gone)
        while loop.scheduler.has_unfinished() or loop.in_flight:
            if loop.in_flight:
                loop.collect()
            order += admitted(loop)
            assert len(order) <= len(names)
        assert [name for name in order if name != gone] == [name for name in names if name != gone]


def test_a_mask_larger_than_what_a_step_may_upload_goes_all_the_same() -> None:
    """A mask counts as 64 values and more, an upload of 40 would never hold one: it goes in a step of its own."""
    loop = Loop(make_config(max_upload_ints=40), depth=2)
    for name in ("a", "b", "c"):
        message = make_request(name, [5, 6], 6, **EVER)
        message.host_grammar = "grammar"
        loop.add(message)
    loop.finish(200)
    assert [len(loop.tokens(name)) for name in ("a", "b", "c")] == [6, 6, 6]


@pytest.mark.parametrize("depth", [0, 3])
def test_cache_counters_are_those_of_a_model_of_the_cache(depth: int) -> None:
    """One request after the other, memory to spare. The model is a set of prefixes of whole blocks."""
    rng, size, queries, hits = random.Random(depth), 4, 0, 0
    loop = Loop(make_config(num_blocks=600), depth)
    known: set[tuple[str | None, tuple[int, ...]]] = set()
    for number in range(60):
        stem = [7, 1, 9, 2, 8, 3, 7, 4][: rng.randrange(9)]
        prompt = (stem + [rng.randrange(4, 6) for _ in range(rng.randrange(1, 9))])[:16]
        salt, asks = rng.choice([None, None, "salt"]), rng.random() < 0.25
        name, most = f"r{number}", rng.randrange(1, 6)
        loop.add(make_request(name, prompt, most, cache_salt=salt, prompt_logprobs=0 if asks else None, **EVER))
        loop.finish()
        found = 0
        while not asks and found + size < len(prompt) and (salt, tuple(prompt[: found + size])) in known:
            found += size
        queries += 0 if asks else len(prompt)
        hits += found
        assert loop.updates[name][0].num_cached_tokens == found
        stats = loop.scheduler.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (queries, hits)
        whole = [*prompt, *loop.tokens(name)][:-1]  # the last token's keys were never computed
        known |= {(salt, tuple(whole[:end])) for end in range(size, len(prompt) + 1, size)}
        if depth == 0:
            known |= {(salt, tuple(whole[:end])) for end in range(size, len(whole) + 1, size)}
        else:  # ahead, whether the last generated block is named depends on who knew of the end first
            assert found <= len(prompt)
    assert hits > 100


def test_a_resumed_request_counts_once() -> None:
    loop = Loop(make_config(num_blocks=14, max_num_batched_tokens=12))
    prompts = [[i, 1, 2, 4, 5, 6] for i in range(5)]
    loop.add(*(make_request(f"r{i}", prompt, 20, **EVER) for i, prompt in enumerate(prompts)))
    loop.finish()
    stats = loop.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_queries == 30 and stats.prompt_tokens == 30


@pytest.mark.parametrize(("cleared", "start"), [(0, 10), (8, 8), (9, 7), (256, 0)])
def test_entries_before_a_window_are_cleared_as_far_as_kernels_load(cleared: int, start: int) -> None:
    """Blocks of 4 tokens, of which the first ten lie before the window."""
    manager: Any = SimpleNamespace(block_size=4, cross=None)
    request: Any = SimpleNamespace(blocks=[list(range(1, 13))], first_kept=[10])
    [edit] = KVManager.opening_edits(manager, request, cleared)
    assert (edit[0], edit[1], list(edit[2])) == (0, start, list(range(1 + start, 13)))
