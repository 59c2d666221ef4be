"""Whole steps of Qwen3-0.6B's shape against transformers: the same random weights, in bfloat16 here and in float32 there.

The shape is one that kernels have tables of tiles for. Transformers is fed the tokens that the engine chose, so that one tie
which falls the other way does not end the comparison; what is compared is each chosen token's log-probability. A kernel that is
wrong at some number of rows or some length of prompt stands out: rounding gives all of them the same error, about 0.05 where
log-probabilities are about -5.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams

pytestmark = pytest.mark.gpu

CONFIG = Path(__file__).parents[2] / "headway/cli/bench/anchors/models/qwen3_06b/config.json"
CASES = [
    (1, 128), (1, 512), (1, 1000), (1, 2000), (2, 60), (3, 900), (5, 300), (8, 700), (12, 500), (16, 600), (24, 100), (33, 700),
    (64, 300), (100, 200), (200, 150),
]  # fmt: skip
"""(rows, longest prompt). 16 and 33 rows have steps of thousands of prompt tokens, too."""
TOKENS, LOOKED_AT = 24, 12
MEAN_ERROR, WORST_ERROR = 0.09, 0.5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    """The engine, and the same model in transformers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(CONFIG.read_text())
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="eager"
        )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0, 0.2)
            else:  # logits that differ, and residuals that neither grow nor vanish
                weight.normal_(0.0, 0.06 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5)
    model.tie_weights()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(CONFIG.read_text())  # as the public model has it
    llm = LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=2304, max_num_seqs=256, kv_cache_memory_bytes=2**33,
        enable_prefix_caching=False,
    )  # fmt: skip
    yield llm, model.to(torch.float32).eval()
    llm.close()


@pytest.mark.parametrize(("rows", "longest"), CASES)
def test_log_probabilities_are_those_of_transformers(pair: tuple[LLM, Any], rows: int, longest: int) -> None:
    llm, model = pair
    rng = random.Random(rows * longest)
    lengths = [longest if rows == 1 else rng.randrange(longest // 3, longest) for _ in range(rows)]
    prompts = [[rng.randrange(1000, 60_000) for _ in range(length)] for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = llm.generate(prompts, params)
    errors = []
    for prompt, output in list(zip(prompts, outputs, strict=True))[:LOOKED_AT]:
        tokens, found = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        assert len(tokens) == TOKENS and found is not None
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(-1)[torch.arange(TOKENS), torch.tensor(tokens)].tolist()
        errors += [abs(row[token].logprob - value) for row, token, value in zip(found, tokens, expected, strict=True)]
    assert sum(errors) / len(errors) < MEAN_ERROR and max(errors) < WORST_ERROR
