"""Whole steps of models with latent attention on a GPU: graphs against the synchronous engine, and log-probabilities against
transformers, the same random weights in bfloat16 here and in float32 there. No step waits for the device.

Where an indexer chooses 256 of 3,000 keys, rounding chooses some others: no fixed limit is right for short prompts and for long
ones. So the engine may be as far from float32 as transformers is itself in bfloat16, and half of that more, at the same tokens.
On a CPU with 1,400 tokens it is .174 where transformers is .192, and .021 beside .025 with 40.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams
from tests.gpu.guard import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

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
TOKENS = 64
CASES = [(1, 40), (1, 3000), (4, 700), (16, 300), (40, 60), (100, 20)]
"""(rows, longest prompt)."""
LOOKED_AT = 6
LOOKED_FOR = list(range(3, 2000, 67))
"""Of the tokens that the engine chooses its own errors would be the larger half."""
OWN_ERRORS = 1.5
"""Of transformers' own mean error."""


def make(family: str, folder: Path) -> None:
    """A checkpoint in bfloat16."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    with torch.device("cuda"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            else:
                weight.normal_(0.0, 0.06 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)


def loaded(family: str, folder: Path, dtype: torch.dtype) -> Any:
    """The checkpoint by transformers. Read anew: ``model.to(bfloat16)`` rounds the frequencies of rotations, too, which turns
    positions in the thousands by radians."""
    kind = getattr(pytest.importorskip("transformers"), f"{family}ForCausalLM")
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to("cuda").eval()
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    return model


def log_probabilities(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), len(LOOKED_FOR)], of ``LOOKED_FOR`` where ``tokens`` follow ``prompt``."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens], device="cuda"), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1).cpu()[:, LOOKED_FOR]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(family, tmp_path)
    exact, rounded = (loaded(family, tmp_path, dtype) for dtype in (torch.float32, torch.bfloat16))
    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprob_token_ids=LOOKED_FOR, detokenize=False
    )
    with LLM(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=128, max_num_batched_tokens=1024,
        kv_cache_memory_bytes=2**32,
    ) as llm:  # fmt: skip
        rng = random.Random(1)
        for rows, longest in CASES:
            prompts = [
                [rng.randrange(3, 2000) for _ in range(rng.randrange(longest // 2, longest))] for _ in range(rows)
            ]
            with no_waits(monkeypatch):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            ours, theirs = [], []
            for prompt, output in list(zip(prompts, outputs, strict=True))[:LOOKED_AT]:
                tokens, steps = list(output.outputs[0].token_ids), output.outputs[0].logprobs or []
                found = torch.tensor([[step[token].logprob for token in LOOKED_FOR] for step in steps])
                wanted = log_probabilities(exact, prompt, tokens)
                ours.append((found - wanted).abs())
                theirs.append((log_probabilities(rounded, prompt, tokens) - wanted).abs())
            mine, own = float(torch.cat(ours).mean()), float(torch.cat(theirs).mean())
            assert mine < OWN_ERRORS * own, (rows, longest, mine, own)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_running_ahead_changes_no_token(
    family: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            with no_waits(monkeypatch):
                found.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
            assert llm.stats().num_graph_steps > 0
    assert found[0] == found[1]
