"""Rows of drafts on a card: many outcomes a step, accepted at a chosen rate, twice the same.

Kernels of one outcome start early; one that reads a slot before the outcome before it is written takes stale rows, which only
shows where drafts are accepted, and only on a card.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams

pytestmark = pytest.mark.gpu

MODELS = Path(__file__).parents[2] / "headway/cli/bench/anchors/models"
TOKENS = 96


def generate(
    shape: str, rows: int, speculative: dict[str, Any] | None = None, temperature: float = 0.0, **arguments: Any
) -> list[list[int]]:
    """Tokens of ``rows`` random prompts, by an engine of its own; ``speculative``: None for the shape's own."""
    said = MODELS / shape / "engine.json"
    arguments = (json.loads(said.read_text()) if said.exists() else {}) | {"max_num_seqs": 64} | arguments
    if speculative is not None:
        arguments["speculative_config"] = speculative
    config: dict[str, Any] = arguments.get("speculative_config", {})
    if "model" in config:
        config["model"] = str(MODELS / config["model"])
    rng = random.Random(rows)
    prompts = [[rng.randrange(10_000) for _ in range(128)] for _ in range(rows)]
    kinds: list[dict[str, Any]] = (
        [{}, {"disable_spec_decode": True}, {"top_k": 20}, {"top_p": 0.9}] if temperature else [{}]
    )
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
            **kinds[i % len(kinds)],
        )
        for i in range(rows)
    ]
    with LLM(
        str(MODELS / shape), load_format="dummy", dtype="float32", skip_tokenizer_init=True, max_model_len=512,
        kv_cache_memory_bytes=8 << 30, enable_prefix_caching=False, **arguments,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * rows
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("shape", ["qwen3_06b_ngram", "qwen3_06b_eagle3", "gdn_08b_ngram", "mamba2_780m_ngram"])
def test_accepted_drafts_are_the_same_at_every_depth(shape: str, rows: int) -> None:
    expected = generate(shape, rows, run_ahead=0)
    assert generate(shape, rows, run_ahead=2) == expected


@pytest.mark.parametrize("rows", [3, 48])
@pytest.mark.parametrize("shape", ["gdn_08b", "mamba2_780m"])
def test_rings_of_inputs_change_no_tokens(shape: str, rows: int) -> None:
    """States that are made again from a ring are those that are written at every step, but for the order of sums."""
    plain, ring = generate(shape, rows), generate(f"{shape}_ring", rows)
    same = sum(mine == theirs for mine, theirs in zip(ring, plain, strict=True))
    assert same >= 0.9 * rows, f"{same} of {rows} rows have the same tokens"


@pytest.mark.parametrize("shape", ["gdn_08b", "mamba2_780m"])
def test_drafts_on_states_give_the_tokens_of_plain_decoding(shape: str) -> None:
    """Real verification: prompts that repeat themselves, so that some drafts are right."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    plain, drafted = generate(shape, 16), generate(shape, 16, config)
    same = sum(mine == theirs for mine, theirs in zip(drafted, plain, strict=True))
    assert same >= 14, f"{same} of 16 rows have the same tokens"


OTHERS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_spec_factor": 4.0},
    "probabilistic": {
        "method": "draft_model",
        "model": "qwen3_06b_ngram",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    },
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_ways_to_draft_are_the_same_at_every_depth(kind: str, temperature: float) -> None:
    """``suffix`` also gives the tokens of plain decoding; rows that opt out stand beside the others."""
    found = [
        generate("qwen3_06b_ngram", 16, dict(OTHERS[kind]), temperature, max_num_batched_tokens=4096, run_ahead=depth)
        for depth in (0, 2)
    ]
    assert found[0] == found[1]
