"""BGE-M3: vectors of texts, vectors of tokens and weights of tokens of one model, whose heads lie in files of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.core.task import Task
from headway.weights.token_heads import read_token_heads
from tests.engine.tiny_encoders import build, engine, hidden_states, message, save, texts
from tests.engine.tiny_encoders import run as run_on
from tests.sim.harness import simulated

WIDTH = 12
SENTENCE = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]  # fmt: skip


@pytest.fixture(scope="module")
def bge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[str, torch.nn.Linear]]:
    model = build("XLMRobertaModel", pad_token_id=1, type_vocab_size=1)
    folder = Path(save(model, tmp_path_factory.mktemp("bge")))
    (folder / "modules.json").write_text(json.dumps(SENTENCE))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    hidden = model.config.hidden_size
    heads = {"colbert_linear": torch.nn.Linear(hidden, WIDTH), "sparse_linear": torch.nn.Linear(hidden, 1)}
    for name, head in heads.items():
        safetensors.torch.save_file(head.state_dict(), folder / f"{name}.safetensors")
    return model, folder, heads


def test_three_kinds_of_vectors_in_one_step(bge: tuple[Any, Path, dict[str, torch.nn.Linear]]) -> None:
    model, folder, heads = bge
    kinds = (Task.EMBED, Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY)
    batch = texts(9, 30)
    requests = [
        message(str(i), ids, kinds[i % 3], pool_start=min(int(i % 3 == 1), len(ids) - 1), raw=i == 5)
        for i, ids in enumerate(batch)
    ]
    own: dict[str, Any] = {"model": str(folder), "runner": "pooling", "max_model_len": 30}
    with simulated(4, max_num_seqs=3, max_num_batched_tokens=40, run_ahead=2, kv_cache_memory_bytes=None, **own) as (
        core,
        _,
        _,
    ):
        info = core.info.pooling
        assert core.info.tasks == kinds and info is not None and info.token_weights and info.token_embed_start == 1
        assert (info.width_by_token(kinds[1]), info.width_by_token(kinds[2]), info.width) == (WIDTH, 1, 32)
        found = run_on(core, requests)
    with torch.no_grad():
        for i, (ids, request) in enumerate(zip(batch, requests, strict=True)):
            states = hidden_states(model, ids)
            rows = states[request.pool_start :]
            weights = heads["sparse_linear"](rows)
            expected = (
                F.normalize(states[0], dim=-1),
                F.normalize(heads["colbert_linear"](rows), dim=-1),
                weights if request.raw else weights.relu(),
            )[i % 3]
            mine = torch.tensor(found[str(i)]).view(expected.shape)
            torch.testing.assert_close(mine, expected, atol=2e-5, rtol=1e-4)


def test_all_tokens_are_another_wish(bge: tuple[Any, Path, dict[str, torch.nn.Linear]]) -> None:
    core = engine(str(bge[1]), pooler_config={"pooling_type": "all"})
    assert core.info.tasks == (Task.TOKEN_EMBED,) and core.info.pooling is not None
    assert core.info.pooling.width_by_token(Task.TOKEN_EMBED) == 32 and not core.info.pooling.token_weights
    core.shutdown()


def test_pickles_are_named_and_never_read(tmp_path: Path) -> None:
    folder = Path(save(build("XLMRobertaModel", pad_token_id=1, type_vocab_size=1), tmp_path))
    for name in ("colbert_linear", "sparse_linear"):
        (folder / f"{name}.pt").write_bytes(b"\x80\x04 whoever loads this is lost")
    core = engine(str(folder))
    told = core.info.pooling.missing if core.info.pooling is not None else ""
    assert core.info.tasks == (Task.EMBED, Task.TOKEN_EMBED) and "colbert_linear.pt and sparse_linear.pt" in told
    assert f"in {folder}" in told and "['colbert_linear', 'sparse_linear']" in told
    core.shutdown()
    safetensors.torch.save_file(
        {"weight": torch.zeros(1, 32), "bias": torch.zeros(1)}, folder / "sparse_linear.safetensors"
    )
    assert "sparse" not in read_token_heads(folder).pickled and read_token_heads(folder).weights
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    engine(str(folder)).shutdown()  # the heads are no second model
    (folder / "weights.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(WeightsError, match="no pickled weights; convert them once"):
        engine(str(folder))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"weight": torch.zeros(2, 32), "bias": torch.zeros(2)}, "gives 2 numbers a token, and a weight is one"),
        ({"other": torch.zeros(2, 32)}, "holds no matrix called weight"),
        ({"weight": torch.zeros(1, 31), "bias": torch.zeros(1)}, r"shape \[1, 31\]; config.json implies \[1, 32\]"),
    ],
)
def test_heads_that_do_not_fit(tmp_path: Path, tensors: dict[str, torch.Tensor], says: str) -> None:
    folder = Path(save(build("XLMRobertaModel", pad_token_id=1, type_vocab_size=1), tmp_path))
    safetensors.torch.save_file(tensors, folder / "sparse_linear.safetensors")
    with pytest.raises(WeightsError, match=says):
        engine(str(folder))


def test_heads_beside_a_classifier(tmp_path: Path) -> None:
    folder = Path(save(build("XLMRobertaForSequenceClassification", pad_token_id=1, type_vocab_size=1), tmp_path))
    head = {"weight": torch.zeros(1, 32), "bias": torch.zeros(1)}
    safetensors.torch.save_file(head, folder / "sparse_linear.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"sparse_linear.safetensors: only encoders"):
        engine(str(folder))
