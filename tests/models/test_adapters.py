"""Jina v3's adapters by task, in its makers' files: each row gets what the model with its adapter merged gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from headway.core.errors import UnsupportedModelError
from headway.core.task import Task
from headway.models.registry import read_config
from tests.engine.tiny_encoders import build, engine, hidden_states, message, run, save, texts
from tests.sim.harness import simulated

TASKS = ["retrieval.query", "retrieval.passage", "separation"]
RANK, ALPHA = 2, 3.0
ADAPTED = ("mixer.Wqkv", "mixer.out_proj", "mlp.fc1", "mlp.fc2", "word_embeddings", "token_type_embeddings")
WHOLE: dict[str, Any] = {"pooling_type": "all", "normalize": False}


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """A folder as the makers write it, and the plain model followed by those with one adapter merged."""
    model = build("JinaEmbeddingsV3Model", pad_token_id=1)
    folder = Path(save(model, tmp_path_factory.mktemp("jina")))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    torch.manual_seed(5)
    written, merged = {}, [dict(weights) for _ in TASKS]
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith(ADAPTED) or layer == name:
            written[f"roberta.{name}"] = tensor
            continue
        is_table = layer.endswith("embeddings")
        low, high = (RANK, tensor.shape[1]) if not is_table else (tensor.shape[0], RANK)
        down = torch.randn(len(TASKS), low, high) * 0.3
        up = torch.randn(len(TASKS), *((tensor.shape[0], RANK) if not is_table else (RANK, tensor.shape[1]))) * 0.3
        place = f"roberta.{layer}.parametrizations.weight"
        written |= {f"{place}.original": tensor, f"{place}.0.lora_A": down, f"{place}.0.lora_B": up}
        for task, one in enumerate(merged):
            product = down[task] @ up[task] if is_table else up[task] @ down[task]
            one[name] = tensor + product * ALPHA / RANK
    models = [model]
    for task, one in enumerate(merged):
        other = tmp_path_factory.mktemp(f"merged-{task}")
        (other / "config.json").write_text((folder / "config.json").read_text())
        safetensors.torch.save_file(one, other / "model.safetensors", {"format": "pt"})
        models.append(type(model).from_pretrained(other).eval())
    safetensors.torch.save_file(written, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters", {})
    config |= {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
        "rotary_emb_base": rope.get("rope_theta", 20000.0), "lora_adaptations": TASKS, "lora_rank": RANK,
        "lora_alpha": ALPHA, "task_instructions": {"retrieval.query": "w1 w2 ", "separation": ""},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), models


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_of_different_tasks_in_one_step(jina: tuple[str, list[Any]], depth: int) -> None:
    """Each depth on the simulated device; texts of all tasks and of none beside each other, in slots of former texts."""
    folder, models = jina
    batch = texts(10, 40)
    requests = [message(str(i), ids, Task.TOKEN_EMBED, adapter=i % 4) for i, ids in enumerate(batch)]
    own: dict[str, Any] = {"model": folder, "runner": "pooling", "pooler_config": WHOLE, "max_model_len": 40}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "run_ahead": depth, "kv_cache_memory_bytes": None}
    with simulated(3, **sizes, **own) as (core, _, _):
        assert core.info.pooling is not None and core.info.pooling.adapters == tuple(TASKS)
        assert core.info.pooling.prompts == {"retrieval.query": "w1 w2 ", "separation": ""}
        found = run(core, requests)
    for i, ids in enumerate(batch):
        expected = hidden_states(models[i % 4], ids)
        torch.testing.assert_close(torch.tensor(found[str(i)]).view(expected.shape), expected, atol=3e-5, rtol=1e-4)
    assert len({hidden_states(model, batch[0])[0, 0].item() for model in models}) == 4, "the adapters do something"


def test_adapters_that_a_model_has_not_are_refused(tmp_path: Path) -> None:
    core = engine(save(build("JinaEmbeddingsV3Model", pad_token_id=1), tmp_path))
    assert core.info.pooling is not None and core.info.pooling.adapters == ()
    core.add(message("a", [5, 6], Task.EMBED, adapter=1))
    [update] = core.step()
    assert "no adapters" in (update.error or "") and update.error_parameter == "task"
    core.shutdown()


def test_lists_of_adapters_that_make_no_sense_are_refused(jina: tuple[str, list[Any]]) -> None:
    config = json.loads((Path(jina[0]) / "config.json").read_text())
    for broken in (["a", "a"], "a", [1]):
        with pytest.raises(UnsupportedModelError, match="lora_adaptations"):
            read_config({**config, "lora_adaptations": broken})
    with pytest.raises(UnsupportedModelError, match="truncate_dim"):
        read_config({**config, "truncate_dim": 64})
