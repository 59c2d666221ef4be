"""What an engine is given of its memory: never more than there is, never less than would fit, for every budget; and sizes that
are told are those of what is allocated."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.cache import CacheGroup, CacheKind, CacheLayout, CacheSpec, Part, keys_and_values
from headway.core.config import EngineArgs, SchedulerConfig
from headway.core.errors import ConfigError, OutOfMemoryError
from headway.engine.pooling import pooling_info
from headway.engine.sizes import CHECKPOINT_SHARE, Sizes, fit_context, with_states
from headway.pooling.spec import PoolingSpec
from headway.state.cache_pool import CachePool, StateStorage
from headway.weights.sentence import SentenceFiles

CPU = torch.device("cpu")
SIZES = Sizes(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=32, block_size=8, max_logprobs=0)
LAYOUTS = {
    "all tokens": CacheLayout.of([keys_and_values(1, 4)] * 2, 96),
    "windows": CacheLayout.of([keys_and_values(1, 4, window=8 * (i % 2)) for i in range(4)], 96),
}


def fits(sizes: Sizes, layout: CacheLayout, context: int, blocks: int) -> bool:
    """Whether a scheduler takes a pool of so many blocks, the one that holds nothing included."""
    try:
        SchedulerConfig(
            max_num_seqs=sizes.max_num_seqs, max_num_batched_tokens=sizes.max_num_batched_tokens, max_model_len=context,
            block_size=sizes.block_size, num_blocks=blocks, width=sizes.width, lookahead=sizes.lookahead,
            groups=layout.groups,
        )  # fmt: skip
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("ahead", [(1, 0), (3, 0), (3, 2)], ids=["plain", "drafts", "a drafter's keys"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_budget_gives_the_longest_context_that_it_holds(name: str, ahead: tuple[int, int]) -> None:
    """A budget of n blocks, for every n; and one byte less is a block less."""
    layout, sizes = LAYOUTS[name], replace(SIZES, width=ahead[0], lookahead=ahead[1])
    seen = set()
    for blocks in range(1, 60):
        best = max((context for context in range(97) if context and fits(sizes, layout, context, blocks)), default=0)
        for explicit in (False, True):
            if best < sizes.block_size or (explicit and best < 96):
                with pytest.raises(OutOfMemoryError, match=f"enough for max_model_len={best};"):
                    fit_context(sizes, layout, 100, 100 * blocks, explicit=explicit)
                continue
            found = fit_context(sizes, layout, 100, 100 * blocks, explicit=explicit)
            assert found.max_model_len == best and found.num_blocks <= blocks
            assert fits(sizes, layout, found.max_model_len, found.num_blocks)
            more = fit_context(sizes, layout, 100, 100 * blocks + 99, explicit=explicit)
            assert more == found
            seen.add(best)
    assert len(seen) > 5 and 96 in seen


STATE = CacheSpec(
    CacheKind.STATE, (Part("conv", (3, 5)), Part("ssm", (2, 3, 4), "float32", inputs=7), Part("other", (3,), "float16"))
)
STATES = CacheLayout.of([keys_and_values(1, 4), None], 96, [STATE, None])


@pytest.mark.parametrize("checkpoints", [0, 3])
@pytest.mark.parametrize(("drafts", "replays"), [(0, 0), (2, 0), (2, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_take_the_bytes_that_they_are_said_to(
    checkpoints: int, drafts: int, replays: int, dtype: torch.dtype
) -> None:
    storage = StateStorage(4 + checkpoints, dtype, checkpoints=checkpoints, drafts=drafts, replays=replays)
    pool = CachePool(STATES, num_blocks=2, block_size=8, dtype=dtype, device=CPU, states=storage)
    assert pool.state_storage is not None
    rings = sum(ring.nbytes for layer in storage.rings(STATES, CPU) for ring in layer)
    assert storage.bytes(STATES) == pool.state_storage.nbytes + rings
    assert rings == 4 * storage.ring_bytes(STATES), "checkpoints have none"
    assert len(pool.state_storage) == 4 + checkpoints


def test_checkpoints_take_their_share_of_what_requests_leave() -> None:
    storage = StateStorage(4, torch.float32, drafts=2, replays=6)
    each = 4 * storage.words(STATES)
    request, args = each + storage.ring_bytes(STATES), EngineArgs(model="nowhere")
    sizes, seen = replace(SIZES, max_num_seqs=4), set()
    for budget in range(0, 12 * request, request // 7):
        if budget < 4 * request:
            with pytest.raises(OutOfMemoryError, match=f"enough for max_num_seqs={budget // request};"):
                with_states(args, STATES, storage, sizes, budget)
            continue
        found, taken = with_states(args, STATES, storage, sizes, budget)
        number, left = found.num_checkpoints, budget - 4 * request
        assert taken == 4 * request + number * each <= budget
        assert number * each <= CHECKPOINT_SHARE * left
        assert number == 8 or (number + 1) * each > CHECKPOINT_SHARE * left
        seen.add(number)
        off, less = with_states(replace(args, enable_prefix_caching=False), STATES, storage, sizes, budget)
        assert (off.num_checkpoints, less) == (0, 4 * request)
    assert len(seen) > 2


def test_groups_hold_no_more_than_a_request_has() -> None:
    group = CacheGroup(CacheKind.WINDOW, 16)
    assert [group.peak_blocks(n, 8, 8) for n in (1, 8, 9, 32, 33, 1000)] == [1, 1, 2, 4, 4, 4]


@pytest.mark.parametrize(("own", "told"), [(None, 64), (1, 1), (63, 63), (64, 64), (65, 64), (512, 64)])
def test_texts_are_no_longer_than_the_engine_and_than_the_model_wants(own: int | None, told: int) -> None:
    spec: Any = SimpleNamespace(
        pooling=PoolingSpec(kind="embed", methods=("mean",)), architecture="BertModel", num_token_types=1, adapters=()
    )
    model: Any = SimpleNamespace(spec=spec, head_width=8)
    checkpoint: Any = SimpleNamespace(
        sentence=SentenceFiles(max_length=own), config={}, token_heads=SimpleNamespace(pickled=())
    )
    info = pooling_info(EngineArgs(model="nowhere"), model, checkpoint, 64)
    assert info is not None and info.max_length == told
