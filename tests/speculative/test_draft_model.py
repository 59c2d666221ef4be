"""A draft model with a cache of its own: the tokens of plain decoding, and its guesses are what it would say itself."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import request, run
from tests.engine.test_depths import FEATURES, requests_for
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import CONFIG, KV_BLOCK_BYTES, save_tiny_llama
from tests.sim.harness import arguments, ask_oracle, expected, model_folder, simulated
from tests.sim.rounding import settle

BLOCK = 2 * KV_BLOCK_BYTES
"""Bytes of a block, the drafter's layers included."""
SMALL = {"kv_cache_memory_bytes": 22 * BLOCK, "max_num_batched_tokens": 72}


@cache
def stranger() -> str:
    """The same architecture with another context: equal weights, but for the norm of the first layer's input."""
    folder = Path(mkdtemp(prefix="headway-draft-"))
    save_tiny_llama(folder, rms_norm_eps=0.5)
    return str(folder)


def drafting(number: int, model: str | None = None) -> dict[str, Any]:
    config = {"method": "draft_model", "model": model or model_folder(), "num_speculative_tokens": number}
    return {"speculative_config": config | {"adaptive": False}}


def on_cpu(**sizes: Any) -> EngineCore:
    core = build_engine(arguments({"device": "cpu", "max_num_batched_tokens": 72} | sizes), progress=False)
    core.learn(VOCABULARY)
    return core


def check(core: EngineCore, batch: list[AddRequest]) -> None:
    answers, truth = run(core, batch), expected(batch)
    for each in batch:
        settle(answers[each.request_id], truth[each.request_id], each, ask_oracle)


@pytest.mark.parametrize(("number", "depth"), [(1, 2), (3, 0), (4, 4), (8, 1)])
def test_every_feature_on_the_cpu(number: int, depth: int) -> None:
    batch = requests_for(list(FEATURES.values()), seed=30 + number)
    core = on_cpu(run_ahead=depth, **drafting(number, stranger()), **SMALL)
    check(core, batch)
    assert core.stats().num_preemptions > 0
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("number", "depth", "graphs"), [(3, 2, True), (2, 4, False)])
def test_on_the_simulated_device(number: int, depth: int, graphs: bool) -> None:
    names = ("greedy", "temperature", "schema", "host_grammar", "presence", "prompt_logprobs", "ignore_eos")
    batch = requests_for([FEATURES[name] for name in names], seed=40 + number)
    sizes = {"max_num_seqs": 4, "enforce_eager": not graphs, "max_num_batched_tokens": 24}
    with simulated(number, run_ahead=depth, **drafting(number), **(SMALL | sizes)) as (core, _, _):
        check(core, batch)
        assert (core.stats().num_graph_steps > 0) == graphs


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.2}, {"top_p": 0.8, "top_k": 30}])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_model_that_guesses_for_itself_is_always_right(depth: int, params: dict[str, Any]) -> None:
    """Chunks, prefix hits and preemptions included: every draft is accepted, because its cache and its draws are right."""
    prompt = [(7 * i) % 97 for i in range(40)]
    batch = [
        request(f"r{i}", prompt[: 30 + i], seed=i, ignore_eos=True, max_tokens=41, **params) for i in range(5)
    ]  # fmt: skip
    sizes = {"kv_cache_memory_bytes": 20 * BLOCK, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    core = on_cpu(run_ahead=depth, **drafting(3), **sizes)
    check(core, batch)
    first = core.stats()
    assert first.num_preemptions > 0 and first.prefix_cache_hits > 0
    check(core, batch)  # full hits
    stats = core.stats()
    assert stats.prefix_cache_hits > first.prefix_cache_hits
    # Rows stop at max_tokens inside a run, and only there.
    ends = sum(1 for _ in range(2) for _ in batch)
    assert stats.num_drafts * 3 - stats.num_accepted_tokens <= 3 * (ends + stats.num_preemptions)
    core.shutdown()


def test_vocabularies_must_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 61}))
    with pytest.raises(ConfigError, match="vocabulary of 61 tokens"):
        on_cpu(load_format="dummy", **drafting(2, str(tmp_path)))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "draft_model"}, "needs model"),
        ({"method": "draft_model", "model": "x", "prompt_lookup_max": 3}, "belong to method='ngram'"),
        ({"method": "ngram", "model": "x"}, "has no model"),
    ],
)
def test_what_does_not_belong_together_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        arguments({"speculative_config": given | {"num_speculative_tokens": 2}})
