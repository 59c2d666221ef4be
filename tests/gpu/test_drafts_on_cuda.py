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
    if speculative is None:
        speculative = json.loads((MODELS / shape / "engine.json").read_text())["speculative_config"]
    if "model" in speculative:
        speculative["model"] = str(MODELS / speculative["model"])
    rng = random.Random(rows)
    prompts = [[rng.randrange(10_000) for _ in range(128)] for _ in range(rows)]
    kinds = [{}, {"disable_spec_decode": True}, {"top_k": 20}, {"top_p": 0.9}] if temperature else [{}]
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
        max_num_seqs=64, kv_cache_memory_bytes=8 << 30, enable_prefix_caching=False, speculative_config=speculative,
        **arguments,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * rows
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("shape", ["qwen3_06b_ngram", "qwen3_06b_eagle3"])
def test_accepted_drafts_are_the_same_at_every_depth(shape: str, rows: int) -> None:
    expected = generate(shape, rows, run_ahead=0)
    assert generate(shape, rows, run_ahead=2) == expected


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
