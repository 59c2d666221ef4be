"""Whole steps of models with latent attention on a GPU: graphs against the synchronous engine, and log-probabilities against
transformers, the same random weights in bfloat16 here and in float32 there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 8192, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "eos_token_id": 1, "first_k_dense_replace": 4,
}  # fmt: skip
INDEX = {
    "q_lora_rank": 256,
    "mlp_layer_types": ["dense"] * 4,
    "index_topk": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2": {"q_lora_rank": None},
    "DeepseekV3": {"q_lora_rank": 256, "num_attention_heads": 64, "num_key_value_heads": 64},
    "DeepseekV32": INDEX,
}
TOKENS = 16
CASES = [(1, 40), (1, 3000), (4, 700), (16, 300), (40, 60), (100, 20)]
"""(rows, longest prompt)."""
MEAN_ERROR, WORST_ERROR = 0.12, 0.6  # rounding can change which experts are chosen, where two are nearly alike


def make(family: str, folder: Path) -> Any:
    """A checkpoint, and its model in float32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    config._attn_implementation = "eager"
    with torch.device("cuda"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            else:
                weight.normal_(0.0, 0.06 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model.to(torch.float32).eval()


def errors(model: Any, prompt: list[int], output: Any) -> list[float]:
    """Of each chosen token's log-probability."""
    tokens = list(output.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens], device="cuda"), use_cache=False).logits[0].float()
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    ours = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
    return [abs(float(expected[i, token]) - value) for i, (token, value) in enumerate(zip(tokens, ours, strict=True))]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    with LLM(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=128, max_num_batched_tokens=1024,
        kv_cache_memory_bytes=2**32,
    ) as llm:  # fmt: skip
        rng = random.Random(1)
        for rows, longest in CASES:
            prompts = [
                [rng.randrange(3, 2000) for _ in range(rng.randrange(longest // 2, longest))] for _ in range(rows)
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            looked_at = range(min(rows, 6))
            found = [each for i in looked_at for each in errors(model, prompts[i], outputs[i].outputs[0])]
            assert sum(found) / len(found) < MEAN_ERROR and max(found) < WORST_ERROR, (rows, longest)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_running_ahead_changes_no_token(family: str, cache: str, tmp_path: Path) -> None:
    make(family, tmp_path)
    rng = random.Random(2)
    stem = [rng.randrange(3, 2000) for _ in range(600)]
    prompts = [stem[: rng.choice([0, 200, 600])] + [rng.randrange(3, 2000) for _ in range(30)] for _ in range(24)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    found = []
    for depth in (0, 2):
        with LLM(
            str(tmp_path), skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=24, run_ahead=depth,
            max_num_batched_tokens=512, kv_cache_memory_bytes=2**32, kv_cache_dtype=cache, enable_prefix_caching=False,
        ) as llm:  # fmt: skip
            found.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]
