"""Two cards: tokens of parts, stages and replicas that share experts are one card's, in float32 and with graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams
from tests.gpu.test_mixtures_on_cuda import COMMON, make, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host"),
]
TP: dict[str, Any] = {"tensor_parallel_size": 2}
SPREAD: dict[str, dict[str, Any]] = {
    "parts": TP,
    "whole-experts": TP | {"enable_expert_parallel": True},
    "replicas": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "stages": {"pipeline_parallel_size": 2},
    "halves": TP | {"enable_dbo": True, "dbo_decode_token_threshold": 4, "dbo_prefill_token_threshold": 64},
    "replicas-in-halves": {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_dbo": True,
        "dbo_decode_token_threshold": 4,
    },
}


def tokens(folder: Path, **more: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    llm = LLM(
        str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=32,
        kv_cache_memory_bytes=2**28, **more,
    )  # fmt: skip
    try:
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts(20, 120), params, use_tqdm=False)]
    finally:
        llm.close()


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_mixtures(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    wanted = tokens(tmp_path)
    for kind, more in SPREAD.items():
        found = tokens(tmp_path, **more)
        same = sum(a == b for a, b in zip(found, wanted, strict=True))
        assert same >= len(wanted) - 1, f"{kind}: sums in another order may break a tie, once"


@pytest.mark.parametrize("switch", ["1", "0"])
def test_the_way_of_sums(
    switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through memory where that is not switched off, in graphs of decode rows and of prompts alike."""
    monkeypatch.setenv("HEADWAY_PEER_REDUCE", switch)
    caplog.set_level("INFO", "headway")
    make("qwen3-moe", tmp_path)
    wanted = tokens(tmp_path)
    found = tokens(tmp_path, **TP)
    said = [each.getMessage() for each in caplog.records if each.getMessage().startswith("exchanges")]
    assert len(said) == 1 and ("peer memory" in said[0]) == (switch == "1"), said
    assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= len(wanted) - 1


def test_a_dense_model_at_every_depth(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON | {"head_dim": 64})).save_pretrained(tmp_path)
    wanted = tokens(tmp_path, run_ahead=0)
    for depth in (0, 1, 2, 4):
        for kind in ("parts", "stages", "halves"):
            assert tokens(tmp_path, run_ahead=depth, **SPREAD[kind]) == wanted, (kind, depth)
