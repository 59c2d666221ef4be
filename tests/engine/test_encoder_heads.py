"""Models that pool, by what stands behind the encoder: Jina's own files, SPLADE, rerankers, reward models, late interaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway.core.errors import ModelError, UnsupportedModelError
from headway.core.task import Task
from tests.engine.tiny_encoders import build, engine, hidden_states, logits, pooled, save, texts


def jina_bert(tensors: dict[str, torch.Tensor], tokens: list[int], layers: int, heads: int) -> torch.Tensor:
    """Jina v2's forward pass (transformers has none): ALiBi both ways, GEGLU, norms behind the sums."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    x = tensors["embeddings.word_embeddings.weight"][tokens] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    place = torch.arange(len(tokens))
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])
    bias = -slopes[:, None, None] * (place[None, :] - place[:, None]).abs()
    for i in range(layers):
        name = f"encoder.layer.{i}"
        q, k, v = (
            product(x, f"{name}.attention.self.{part}").unflatten(1, (heads, -1)).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        attended = (torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + bias, -1) @ v).transpose(0, 1).flatten(1)
        x = norm(x + product(attended, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
        gated, plain = product(x, f"{name}.mlp.gated_layers").chunk(2, -1)
        x = norm(x + product(F.gelu(gated) * plain, f"{name}.mlp.wo"), f"{name}.mlp.layernorm")
    return x


def test_jina_v2(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    generator, hidden, inner, layers, heads = torch.Generator().manual_seed(3), 32, 48, 2, 4

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {"embeddings.word_embeddings.weight": random(97, hidden)}
    tensors["embeddings.token_type_embeddings.weight"] = random(2, hidden)
    sizes = {"attention.self.query": (hidden, hidden), "attention.self.key": (hidden, hidden),
             "attention.self.value": (hidden, hidden), "attention.output.dense": (hidden, hidden),
             "mlp.wo": (hidden, inner), "mlp.gated_layers": (2 * inner, hidden)}  # fmt: skip
    norms = ["embeddings.LayerNorm"]
    for i in range(layers):
        for part, shape in sizes.items():
            tensors[f"encoder.layer.{i}.{part}.weight"] = random(*shape)
            if part != "mlp.gated_layers":
                tensors[f"encoder.layer.{i}.{part}.bias"] = random(shape[0])
        norms += [f"encoder.layer.{i}.attention.output.LayerNorm", f"encoder.layer.{i}.mlp.layernorm"]
    for name in norms:
        tensors |= {f"{name}.weight": 1 + random(hidden), f"{name}.bias": random(hidden)}
    save_file({f"bert.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = {
        "architectures": ["JinaBertForMaskedLM"], "vocab_size": 97, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 64,
        "position_embedding_type": "alibi", "feed_forward_type": "geglu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    core, batch = engine(str(tmp_path)), texts(6, 60)
    for tokens, found in zip(batch, pooled(core, batch, Task.EMBED, raw=True), strict=True):
        expected = jina_bert(tensors, tokens, layers, heads).mean(0)
        torch.testing.assert_close(torch.tensor(found), expected, atol=2e-5, rtol=1e-4)
    core.shutdown()


def sentence_modules(folder: Path, **modules: dict[str, Any]) -> None:
    """modules.json behind a transformer, each with its config.json."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, (kind, config) in enumerate(modules.items(), 1):
        listed.append({"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.{kind}"})
        (folder / f"{i}_{kind}").mkdir()
        (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))


@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForMaskedLM", "RobertaForMaskedLM"])
def test_splade(name: str, tmp_path: Path) -> None:
    """The greatest of log(1 + relu(logit)) over a text's tokens, for each entry of the vocabulary."""
    sizes = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4} if "Distil" in name else {}
    model = build(name, **sizes)
    folder = save(model, tmp_path)
    sentence_modules(tmp_path, SpladePooling={"pooling_strategy": "max"})
    core, batch = engine(folder), texts(5, 40)
    info = core.info.pooling
    assert info is not None and info.sparse and info.width == 97 and core.info.tasks == (Task.EMBED,)
    for tokens, found in zip(batch, pooled(core, batch, Task.EMBED), strict=True):
        expected = torch.log1p(F.relu(logits(model, tokens))).amax(0)
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=1e-4)
    core.shutdown()


@pytest.mark.parametrize("tied", [False, True])
def test_rerankers_that_answer(tied: bool, tmp_path: Path) -> None:
    """A decoder's logits of two tokens behind the pair, named by hand, by tokens, or by sentence-transformers' LogitScore."""
    shape = {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": tied}
    model = build("Qwen3ForCausalLM", **shape)
    folder, batch = save(model, tmp_path), texts(5, 40)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": 11, "yes": 31}}}))
    ways: list[dict[str, Any]] = [
        {"hf_overrides": {"classifier_from_token": ["no", "yes"]}, "runner": "pooling"},
        {"hf_overrides": {"classifier_from_token": [11, 31]}, "convert": "classify"},
        {},
    ]
    for way in ways:
        if not way:
            sentence_modules(tmp_path, LogitScore={"true_token_id": 31, "false_token_id": 11})
        core = engine(folder, **way)
        assert core.info.tasks == (Task.CLASSIFY, Task.SCORE) and core.info.pooling is not None
        assert core.info.pooling.score_by == "pair" and "{document}" in core.info.pooling.score_template
        for tokens, found in zip(batch, pooled(core, batch, Task.SCORE), strict=True):
            last = logits(model, tokens)[-1]
            torch.testing.assert_close(
                torch.tensor(found), torch.sigmoid(last[31:32] - last[11:12]), atol=1e-5, rtol=1e-4
            )
        core.shutdown()


def test_reward_models_and_late_interaction(tmp_path: Path) -> None:
    """A score for each token behind two layers; a projected vector for each token."""
    from safetensors.torch import load_file, save_file

    model = build("Qwen2ForCausalLM", num_key_value_heads=2)
    folder, batch = save(model, tmp_path), texts(4, 30)
    tensors = {name: each for name, each in load_file(tmp_path / "model.safetensors").items() if "lm_head" not in name}
    scores = {"score.0.weight": torch.randn(32, 32), "score.0.bias": torch.randn(32),
              "score.2.weight": torch.randn(1, 32), "score.2.bias": torch.randn(1)}  # fmt: skip
    save_file(tensors | scores, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"architectures": ["Qwen2ForRewardModel"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    core = engine(folder, max_num_batched_tokens=16)
    for tokens, found in zip(batch, pooled(core, batch, Task.TOKEN_CLASSIFY), strict=True):
        x = F.relu(F.linear(hidden_states(model, tokens), scores["score.0.weight"], scores["score.0.bias"]))
        expected = F.linear(x, scores["score.2.weight"], scores["score.2.bias"])[:, 0]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=1e-4)
    core.shutdown()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {
        "in_features": 32,
        "out_features": 6,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    sentence_modules(tmp_path, Dense=sizes, Normalize={})
    weight = torch.randn(6, 32)
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    core = engine(folder, max_num_batched_tokens=16)
    info = core.info.pooling
    assert info is not None and (core.info.tasks, info.score_by) == ((Task.TOKEN_EMBED,), "tokens")
    for tokens, found in zip(batch, pooled(core, batch, Task.TOKEN_EMBED, pool_start=0), strict=True):
        expected = F.normalize(F.linear(hidden_states(model, tokens), weight), dim=-1)
        torch.testing.assert_close(torch.tensor(found).view(-1, 6), expected, atol=1e-4, rtol=1e-4)
    core.shutdown()


def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(build("BertModel"), tmp_path)
    sentence_modules(tmp_path, CNN={})
    with pytest.raises(UnsupportedModelError, match=r"'CNN'.*Transformer, Pooling, Dense"):
        engine(folder)
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "path": "../x", "type": "a.Pooling"}]))
    with pytest.raises(ModelError, match="outside the model's folder"):
        engine(folder)
