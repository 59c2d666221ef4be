"""Which prefixes are found, which never, and which block is recycled first."""

from __future__ import annotations

import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.scheduler.cache.pool import BlockPool
from headway.scheduler.cache.prefix import PrefixIndex
from tests.scheduler.fake_device import make_request, predict
from tests.scheduler.loop import Loop, make_config

PROMPT = [1, 2, 4, 5, 6, 7, 8, 9]


def cached_tokens(loop: Loop, name: str, prompt: list[int], **params: object) -> int:
    loop.add(make_request(name, prompt, 2, ignore_eos=True, **params))
    loop.finish()
    return loop.updates[name][0].num_cached_tokens


def test_full_blocks_are_hit_and_one_token_always_runs() -> None:
    loop = Loop(make_config())
    assert cached_tokens(loop, "a", PROMPT) == 0
    assert cached_tokens(loop, "b", PROMPT) == 4  # not 8: the last token must run
    assert cached_tokens(loop, "c", [*PROMPT, 1]) == 8
    assert cached_tokens(loop, "d", [*PROMPT[:4], 0, *PROMPT[5:], 1]) == 4
    assert cached_tokens(loop, "e", [0, *PROMPT]) == 0
    stats = loop.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8 + 8 + 9 + 9 + 9, 16)


def test_two_requests_of_one_step_share_what_it_computes() -> None:
    loop = Loop(make_config(max_num_batched_tokens=32))
    loop.add(make_request("a", [*PROMPT, 1], 2), make_request("b", [*PROMPT, 2], 2))
    plan = loop.launch()
    assert plan is not None and plan.query_lens.tolist() == [9, 1]
    loop.finish()
    assert loop.tokens("b") == predict(make_request("b", [*PROMPT, 2], 2))[0]


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    loop = Loop(make_config())
    first = make_request("a", PROMPT, 10, ignore_eos=True)
    loop.add(first)
    loop.finish()
    # 18 tokens, 17 of them with KV: four blocks. At depth 0 the last row's block is named before it drains.
    assert cached_tokens(loop, "b", [*PROMPT, *predict(first)[0]]) == 16


@pytest.mark.parametrize("depth", range(5))
def test_generated_blocks_are_named_by_their_tokens_at_any_depth(depth: int) -> None:
    loop = Loop(make_config(block_size=2), depth)
    least = {"ignore_eos": True, "min_tokens": 9}
    stop = predict(make_request("a", [1, 2, 4], 10, **least))[0][-1]
    loop.add(make_request("a", [1, 2, 4], 20, stop_token_ids=[stop], **least))
    loop.finish()
    said = loop.tokens("a")
    assert len(said) == 10 and cached_tokens(loop, "b", [1, 2, 4, *said, 5]) == 12


def test_salts_separate_families() -> None:
    loop = Loop(make_config())
    assert cached_tokens(loop, "a", [*PROMPT, 1], cache_salt="x") == 0
    assert cached_tokens(loop, "b", [*PROMPT, 1], cache_salt="y") == 0
    assert cached_tokens(loop, "c", [*PROMPT, 1]) == 0
    assert cached_tokens(loop, "d", [*PROMPT, 1], cache_salt="") == 0
    assert cached_tokens(loop, "e", [*PROMPT, 1], cache_salt="x") == 8


def test_prompt_logprobs_skip_the_lookup_and_come_whole() -> None:
    loop = Loop(make_config(max_num_batched_tokens=3))
    assert cached_tokens(loop, "a", PROMPT) == 0
    assert cached_tokens(loop, "b", PROMPT, prompt_logprobs=0) == 0
    rows = loop.updates["b"][0].new_prompt_logprobs
    assert rows is not None and [r.token_ids for r in rows] == [[t] for t in PROMPT[1:]]
    assert loop.updates["b"][1].new_prompt_logprobs is None


def test_prompt_logprobs_survive_a_preemption_inside_the_prompt() -> None:
    loop = Loop(make_config(max_model_len=20, num_blocks=6, max_num_batched_tokens=5))
    prompt = [i % 7 for i in range(16)]
    loop.add(make_request("a", [1, 2, 4, 5], 16, ignore_eos=True))
    loop.add(make_request("b", prompt, 2, ignore_eos=True, prompt_logprobs=0))
    while not loop.scheduler.stats().num_preemptions:
        loop.tick()
    assert loop.scheduler._life.waiting.head.prompt_rows  # some had come
    loop.finish()
    rows = loop.updates["b"][0].new_prompt_logprobs
    assert rows is not None and [r.token_ids[0] for r in rows] == prompt[1:]


def test_a_half_filled_block_is_not_offered() -> None:
    loop = Loop(make_config(max_num_batched_tokens=6))
    loop.add(make_request("a", [*PROMPT, 1], 2))
    loop.launch()
    loop.scheduler.abort("a")
    loop.launch()
    assert cached_tokens(loop, "b", [*PROMPT, 1]) == 4


def test_switched_off_means_off() -> None:
    loop = Loop(make_config(enable_prefix_caching=False))
    assert [cached_tokens(loop, n, PROMPT) for n in "ab"] == [0, 0]
    assert loop.scheduler._life.kv.num_cached == 0 and loop.scheduler.stats().prefix_cache_queries == 0


def test_the_least_recently_used_prefix_is_recycled_first_from_its_end() -> None:
    index = PrefixIndex(2)
    pool = BlockPool(6, index)
    digests: list[bytes] = []
    index.extend(digests, None, np.arange(8, dtype=np.int32), 4)
    held = pool.take(4)
    index.register(digests, held, 0, 4)
    pool.release(reversed(held))
    assert pool.take(1)[0] not in held  # blank blocks go first
    pool.share(held[3])
    pool.release([held[3]])  # used again: now the most recent
    assert pool.take(4) == [held[2], held[1], held[0], held[3]]
    assert pool.num_free == 0 and len(index) == 0


def test_digests_are_keyed_per_index() -> None:
    tokens = np.arange(4, dtype=np.int32)
    one: list[bytes] = []
    two: list[bytes] = []
    PrefixIndex(4).extend(one, None, tokens, 1)
    PrefixIndex(4).extend(two, None, tokens, 1)
    assert one != two


def test_the_pool_notices_lost_blocks() -> None:
    pool = BlockPool(4, PrefixIndex(2))
    [block] = pool.take(1)
    pool.check([block])
    with pytest.raises(HeadwayError, match="do not match"):
        pool.check([])


def test_the_end_of_a_chain_is_recycled_before_its_head() -> None:
    """A released request's last block goes first, so that what its beginning shares with others lives longer."""
    loop = Loop(make_config(max_model_len=20, num_blocks=6))
    assert cached_tokens(loop, "a", [*PROMPT, 1]) == 0  # two named blocks, and one without a name
    loop.add(make_request("b", [9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4], 4, ignore_eos=True))  # needs four of five
    loop.finish()
    assert cached_tokens(loop, "c", [*PROMPT, 1]) == 4, "the chain's first block was kept"
