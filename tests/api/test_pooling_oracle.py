"""Texts to vectors and scores with real (tiny, random) models, beside transformers with its own tokenisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headway import LLM, PoolingParams
from tests.api.pooling_core import WORDS, word_tokenizer
from tests.engine.tiny_encoders import build, save

TEXTS = ["w1 w2 w3", "w4", " ".join(f"w{i % 90}" for i in range(70)), "w9 w8", "w5 w5 w5 w6"]
SIZES = {"vocab_size": len(WORDS), "max_position_embeddings": 64}
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4}


def tokenizer_in(folder: Path) -> Any:
    """transformers' form of the tokenizer of words, saved beside the model."""
    backend = word_tokenizer().backend
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    made.save_pretrained(folder)
    return made


def logits(model: Any, tokenizer: Any, *texts: str) -> torch.Tensor:
    inputs = tokenizer(*texts, truncation=True, max_length=64, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits[0]


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_cross_encoder_with_types_of_tokens(tmp_path: Path, run_ahead: int) -> None:
    model = build("BertForSequenceClassification", num_labels=1, **SIZES)
    tokenizer = tokenizer_in(tmp_path)
    with LLM(save(model, tmp_path), run_ahead=run_ahead, **CPU) as llm:
        found = llm.score("w7 w8", TEXTS, truncate_prompt_tokens=-1, as_numpy=True)
        expected = [torch.sigmoid(logits(model, tokenizer, "w7 w8", text)).item() for text in TEXTS]
        assert found == pytest.approx(expected, abs=1e-4) and np.ptp(found) > 1e-3
        params = PoolingParams(use_activation=False, truncate_prompt_tokens=-1)
        raw = llm.score(TEXTS[::-1], TEXTS, pooling_params=params)
        expected = [logits(model, tokenizer, a, b).item() for a, b in zip(TEXTS[::-1], TEXTS, strict=True)]
        assert [each.outputs.score for each in raw] == pytest.approx(expected, abs=1e-4)
        swapped = [logits(model, tokenizer, b, a).item() for a, b in zip(TEXTS[::-1], TEXTS, strict=True)]
        assert expected[0] != pytest.approx(swapped[0], abs=1e-3), "types of tokens make a difference"


def test_a_classifier_and_its_labels(tmp_path: Path) -> None:
    labels = {0: "bad", 1: "fair", 2: "good"}
    model = build("BertForSequenceClassification", num_labels=3, id2label=labels, **SIZES)
    tokenizer = tokenizer_in(tmp_path)
    with LLM(save(model, tmp_path), **CPU) as llm:
        assert llm.model_info.pooling is not None and llm.model_info.pooling.labels == ("bad", "fair", "good")
        params = PoolingParams(truncate_prompt_tokens=-1)
        found = llm.classify(TEXTS, pooling_params=params, as_numpy=True)
        expected = torch.stack([logits(model, tokenizer, text).softmax(-1) for text in TEXTS])
        assert found == pytest.approx(expected.numpy(), abs=1e-4)
        params = PoolingParams(truncate_prompt_tokens=-1, use_activation=False)
        found = llm.classify(TEXTS, pooling_params=params, as_numpy=True)
        assert found == pytest.approx(torch.stack([logits(model, tokenizer, t) for t in TEXTS]).numpy(), abs=1e-4)


@pytest.mark.parametrize("include", [True, False])
def test_a_folder_of_sentence_transformers_with_prompts(tmp_path: Path, include: bool) -> None:
    model = build("BertModel", **SIZES)
    tokenizer = tokenizer_in(tmp_path)
    folder = save(model, tmp_path)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "include_prompt": include}
    for name, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": 40}),
        ("config_sentence_transformers.json", {"prompts": {"query": "w50 w51 ", "document": ""}}),
    ):
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
    with LLM(folder, **CPU) as llm:
        params = PoolingParams(prompt_name="query", truncate_prompt_tokens=-1)
        found = llm.embed(TEXTS, pooling_params=params, as_numpy=True)
        for text, vector in zip(TEXTS, found, strict=True):
            inputs = tokenizer("w50 w51 " + text, truncation=True, max_length=40, return_tensors="pt")
            with torch.no_grad():
                states = model(**inputs).last_hidden_state[0]
            expected = states[0 if include else 3 :].mean(0).numpy()
            assert vector == pytest.approx(expected, abs=1e-4), "as sentence-transformers, which adds no Normalize here"
        unit = found / np.linalg.norm(found, axis=1, keepdims=True)
        made = llm.embed(TEXTS, pooling_params=PoolingParams(
            prompt_name="query", truncate_prompt_tokens=-1, normalize=True, dimensions=32), as_numpy=True)  # fmt: skip
        assert made == pytest.approx(unit, abs=1e-5)
        documents = llm.embed(TEXTS[:2], pooling_params=PoolingParams(prompt_name="document"), as_numpy=True)
        documents /= np.linalg.norm(documents, axis=1, keepdims=True)
        assert llm.score(TEXTS[0], TEXTS[:2], as_numpy=True) == pytest.approx(documents @ unit[0], abs=1e-5)


def test_a_decoder_made_an_embedder(tmp_path: Path) -> None:
    """Texts that share beginnings, longer than a step."""
    model = build("LlamaForCausalLM", num_key_value_heads=2, **SIZES)
    tokenizer = tokenizer_in(tmp_path)
    batch = [*TEXTS, "w1 w2 w3 w4", TEXTS[2] + " w1"]
    with LLM(save(model, tmp_path), runner="pooling", max_num_batched_tokens=24, block_size=8, **CPU) as llm:
        found = llm.embed(batch, pooling_params=PoolingParams(truncate_prompt_tokens=-1), as_numpy=True)
    for text, vector in zip(batch, found, strict=True):
        inputs = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
        with torch.no_grad():
            state = model.model(input_ids=inputs["input_ids"]).last_hidden_state[0, -1]
        assert vector == pytest.approx(torch.nn.functional.normalize(state, dim=-1).numpy(), abs=1e-4)
