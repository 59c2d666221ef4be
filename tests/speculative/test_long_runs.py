"""Long runs of engines that draft: texts beyond 32,768 tokens, and a thousand random requests with everything mixed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import Answer, request
from tests.engine.test_depths import FEATURES
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES, save_tiny_llama
from tests.sim.harness import arguments, ask_oracle, expected
from tests.sim.rounding import settle
from tests.speculative import tiny_dflash, tiny_eagle
from tests.speculative.repetitive import LOOPS, repetitive
from tests.speculative.test_draft_model import stranger
from tests.speculative.test_eagle import DraftOracle, compare_drafts
from tests.speculative.test_probabilistic_heads import drafter

pytestmark = pytest.mark.soak
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 3.0},
    "draft_model": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
    "dflash": {"method": "dflash"},
}


def engine(method: str, number: int, adaptive: bool, **sizes: Any) -> EngineCore:
    config = METHODS[method] | {"num_speculative_tokens": number, "adaptive": adaptive}
    if method not in ("ngram", "suffix"):
        config["model"] = stranger() if method == "draft_model" else drafter(method)
    core = build_engine(arguments({"device": "cpu", "speculative_config": config} | sizes), progress=False)
    core.learn(VOCABULARY)
    return core


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_past_32768_tokens(tmp_path: Path, method: str) -> None:
    """A text that goes on beyond 2^15 tokens, drafts and all, is that of an engine without drafts."""
    save_tiny_llama(tmp_path, max_position_embeddings=40_000)
    prompt = [(7 * i + i // 50) % 97 for i in range(32_700)]
    asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 200, "allowed_token_ids": [2, 8, 40]}
    sizes = {"device": "cpu", "model": str(tmp_path), "max_model_len": 33_000, "max_num_seqs": 2} | {
        "max_num_batched_tokens": 2048, "run_ahead": 2, "kv_cache_memory_bytes": 4400 * KV_BLOCK_BYTES
    }  # fmt: skip
    found = []
    for speculative in (None, METHODS[method] | {"num_speculative_tokens": 4, "adaptive": False}):
        core = build_engine(arguments(sizes | {"speculative_config": speculative}), progress=False)
        core.add(request("long", prompt, **asked))
        answer = Answer()
        while core.has_work():
            for update in core.step():
                answer.take(update)
        stats = core.stats()
        core.check_integrity()
        core.shutdown()
        found.append(answer.token_ids)
    assert found[0] == found[1] and len(found[0]) == 200
    assert stats.num_accepted_tokens > 20, "drafts are right beyond 32,768 tokens, too"


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_a_head_past_32768_tokens(tmp_path: Path, method: str) -> None:
    """What a head or a drafter of blocks says there is what it says of the whole text."""
    save_tiny_llama(tmp_path, max_position_embeddings=40_000)
    prompt = [(7 * i + i // 50) % 97 for i in range(32_762)]
    config = {"method": method, "model": drafter(method), "num_speculative_tokens": 2, "adaptive": False}
    sizes = {"device": "cpu", "model": str(tmp_path), "max_model_len": 33_000, "max_num_seqs": 2} | {
        "max_num_batched_tokens": 2048, "run_ahead": 0, "kv_cache_memory_bytes": 4400 * 2 * KV_BLOCK_BYTES
    }  # fmt: skip
    core, compared = build_engine(arguments(sizes | {"speculative_config": config}), progress=False), 0
    core.add(request("long", prompt, temperature=0.0, ignore_eos=True, max_tokens=20))
    answer = Answer()
    while core.has_work():
        for update in core.step():
            answer.take(update)
        if len(prompt) + len(answer.token_ids) > 2**15 and compared < 2:
            compared += compare_drafts(core, oracle_of(method, tmp_path), 2)
    core.shutdown()
    assert compared == 2


def oracle_of(method: str, target: Path) -> DraftOracle:
    if method == "eagle3":
        return tiny_eagle.Oracle(target, Path(drafter(method)))
    return tiny_dflash.Oracle(target, Path(drafter(method)), tiny_dflash.KINDS[method])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_thousand_requests(method: str, adaptive: bool) -> None:
    """Every feature, opting out among them, arriving and aborted at random, in a pool that preempts."""
    rng = random.Random(method)
    names = [*FEATURES, *LOOPS]
    batch = repetitive([rng.choice(names) for _ in range(1000)], seed=17)
    truth = expected(batch)
    block = KV_BLOCK_BYTES * (1 if method in ("ngram", "suffix") else 2)
    core = engine(method, 4, adaptive, run_ahead=2, kv_cache_memory_bytes=22 * block, max_num_batched_tokens=72)
    answers = {each.request_id: Answer() for each in batch}
    waiting, aborted = list(batch), set()
    while waiting or core.has_work():
        for _ in range(min(rng.choice([0, 0, 1, 5]), len(waiting))):
            core.add(waiting.pop())
        if rng.random() < 0.02:
            name = rng.choice(batch).request_id
            if answers[name].finish_reason is None:
                core.abort(name)
                aborted.add(name)
        for update in core.step():
            answers[update.request_id].take(update)
    for each in batch:
        if each.request_id not in aborted:
            settle(answers[each.request_id], truth[each.request_id], each, ask_oracle)
    assert core.stats().num_preemptions > 10 and core.stats().num_accepted_tokens > (20 if method == "eagle3" else 100)
    core.check_integrity()
    core.shutdown()
