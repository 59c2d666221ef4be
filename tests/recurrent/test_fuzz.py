"""Random requests, arrivals and aborts on engines with hardly any slots, blocks and checkpoints: right tokens, no leaks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headway.core.chunks import ring_places
from headway.core.config import Thresholds
from headway.core.messages import AddRequest
from headway.engine.sizes import Sizes, fit_context
from headway.state.cache_pool import StateStorage, bytes_per_block
from tests.engine.harness import Answer, request, run
from tests.recurrent.test_engine import arguments, engine
from tests.recurrent.tiny_hybrids import VOCAB, pair
from tests.sim.harness import simulated

BLOCK = 8


def scene(rng: random.Random) -> list[AddRequest]:
    stem = [rng.randrange(3, VOCAB) for _ in range(60)]
    found = []
    for number in range(rng.randrange(3, 9)):
        prompt = stem[: rng.choice([0, 33, 40, 60])] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))]
        options: dict[str, Any] = {
            "max_tokens": rng.randrange(10, 45),
            "ignore_eos": rng.random() < 0.8,
            "seed": number,
        }
        found.append(request(str(number), prompt, temperature=rng.choice([0.0, 1.3]), **options))
    return found


def memory(name: str, rows: int, checkpoints: int, blocks: int, drafts: int = 0, replays: int = 0) -> int:
    """Bytes for exactly so many."""
    layout = pair(name).model.spec.cache
    states = StateStorage(
        rows + checkpoints, torch.float32, checkpoints=checkpoints, drafts=drafts, replays=replays
    ).bytes(layout)
    return states + blocks * bytes_per_block(layout, BLOCK, torch.float32)


def play(
    name: str, seed: int, patch: pytest.MonkeyPatch, slots: tuple[int, ...] = (1, 3, 4), *, drafting: bool = False
) -> int:
    """Returns the number of preemptions."""
    rng = random.Random(seed)
    rows, checkpoints, blocks = rng.choice(slots), rng.choice([0, 1, 3]), rng.choice([17, 20])
    patch.setattr("headway.engine.sizes.CHECKPOINTS_PER_SLOT", checkpoints / rows)
    patch.setattr("headway.engine.sizes.CHECKPOINT_SHARE", 1.0)
    asked = scene(rng)
    core = engine(name)
    truth = {key: answer.token_ids for key, answer in run(core, asked).items()}
    core.shutdown()
    changes = arguments(
        name, run_ahead=rng.choice([0, 1, 2, 4]), max_num_seqs=rows, max_num_batched_tokens=rng.choice([8, 24, 64]),
        enforce_eager=rng.random() < 0.5, block_size=BLOCK,
    )  # fmt: skip
    number = places = 0
    if drafting:
        number, write_back = rng.randrange(1, 5), rng.choice([1, 3, 8])
        recurrent = pair(name).model.spec.cache.recurrent
        places = ring_places(write_back, number + 1) if recurrent else 0
        changes["replayssm_buffer_len"] = write_back if recurrent else None
        changes["speculative_config"] = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_min": 1}
        changes["max_num_batched_tokens"] = max(changes["max_num_batched_tokens"], rows * (number + 1))
    changes["kv_cache_memory_bytes"] = memory(name, rows, checkpoints, blocks + drafting, number, places)
    answers = {each.request_id: Answer() for each in asked}
    aborted: set[str] = set()
    with simulated(seed, thresholds=Thresholds(checkpoint_every=16), **changes) as (core, _, _):
        storage = core._runner.executor.body.caches.state_storage
        assert storage is not None and storage.shape[0] == rows + checkpoints
        waiting = list(asked)
        while waiting or core.has_work():
            for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3]))):
                core.add(waiting.pop(0))
            if rng.random() < 0.05:
                victim = str(rng.randrange(len(asked) - len(waiting) or 1))
                if answers[victim].finish_reason is None and victim not in {each.request_id for each in waiting}:
                    core.abort(victim)
                    aborted.add(victim)
            for update in core.step():
                answers[update.request_id].take(update)
        preemptions = core.stats().num_preemptions
    for key, answer in answers.items():
        assert answer.token_ids == truth[key][: len(answer.token_ids) if key in aborted else None], (seed, key)
    return preemptions


def test_blocks_of_models_that_cache_states_alone_take_no_memory() -> None:
    """Exactly the states' bytes serve such a model; nothing is left for blocks, and nothing has to be."""
    sizes = Sizes(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, block_size=BLOCK, max_logprobs=5)
    layout = pair("mamba2").model.spec.cache
    assert bytes_per_block(layout, BLOCK, torch.float32) == 0
    fitted = fit_context(sizes, layout, 0, 0, explicit=True)
    assert fitted.max_model_len == 128 and fitted.num_blocks > 4 * 128 // BLOCK


def test_right_tokens_with_tiny_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play("falcon-h1", 2, monkeypatch, slots=(4,)), "no request is preempted: the pools are too large"


def test_right_tokens_with_drafts_and_tiny_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    play("qwen3-next", 5, monkeypatch, drafting=True)


@pytest.mark.soak
@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize(
    "name", ["falcon-h1", "jamba", "qwen3-next", "lfm2", "mamba2", "nemotron-h", "zamba2", "minimax", "kimi-linear"]
)
def test_right_tokens_with_tiny_pools_for_long(name: str, drafting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000, 1060):
        play(name, seed, monkeypatch, drafting=drafting)
