"""Stages of models that pool: the last one takes the vectors, which are those of one rank; nothing is handed back."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from headway.core.config import EngineArgs
from headway.core.errors import UnsupportedModelError
from headway.core.messages import AddRequest, EngineStats
from headway.core.plan import Floats
from headway.core.task import Task
from headway.engine.boot import build_engine
from headway.models.decoder import DecoderModel
from headway.parallel.stage import Stage
from tests.engine.tiny_encoders import build, message, run, save
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.parallel.test_engine import THREADS
from tests.parallel.waits import watched

TWO: dict[str, Any] = {**THREADS, "distributed_timeout_seconds": 20, "pipeline_parallel_size": 2}
THREE = {**TWO, "pipeline_parallel_size": 3}
LONGEST = 48
KINDS: dict[str, tuple[str, dict[str, Any], tuple[Task, ...]]] = {
    "mean": ("LlamaForCausalLM", {"pooler_config": {"pooling_type": "mean"}}, (Task.EMBED, Task.TOKEN_EMBED)),
    "cls+max": ("LlamaForCausalLM", {"pooler_config": {"pooling_type": "cls+max"}}, (Task.EMBED,)),
    "last": ("LlamaForCausalLM", {"pooler_config": {"pooling_type": "last"}}, (Task.EMBED,)),
    "labels": ("Qwen3ForSequenceClassification", {}, (Task.CLASSIFY,)),
    "tags": ("Qwen2ForTokenClassification", {}, (Task.TOKEN_CLASSIFY,)),
}
"""Architecture, how it pools, and what is asked of it."""


@cache
def folder_of(kind: str) -> str:
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 0, "num_labels": 3}
    return save(build(KINDS[kind][0], **sizes), Path(mkdtemp(prefix="headway-stages-")))


def requests(kind: str) -> list[AddRequest]:
    """Texts of several chunks, some of which begin alike, with tokens that do not count."""
    tasks = KINDS[kind][2]
    made = []
    for nth, length in enumerate((1, 7, LONGEST, 20, LONGEST, 30, 3)):
        tokens = [*([9] * min(16, length)), *(5 + (7 * nth + i) % 90 for i in range(length))][:length]
        task = tasks[nth % len(tasks)]
        made.append(message(f"{nth}", tokens, task, raw=nth == 3, pool_start=min(nth, length - 1)))
    return made


def vectors_of(kind: str, **more: Any) -> tuple[dict[str, Floats], EngineStats]:
    """Of an engine of its own, whose steps take fewer tokens than the longest text has."""
    sizes: dict[str, Any] = {
        "model": folder_of(kind), "runner": "pooling", "dtype": "float32", "device": "cpu", "max_model_len": LONGEST,
        "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8, "run_ahead": 0,
    }  # fmt: skip
    args = EngineArgs(**sizes | KINDS[kind][1] | more)
    with watched() as waits:
        core = build_engine(args, progress=False)
        try:
            found, stats = run(core, requests(kind)), core.stats()
        finally:
            core.shutdown()
        waits.check(args.num_ranks)
    return found, stats


@cache
def one_rank(kind: str) -> dict[str, Floats]:
    return vectors_of(kind)[0]


def compare(found: dict[str, Floats], wanted: dict[str, Floats]) -> None:
    assert found.keys() == wanted.keys()
    for key, vector in found.items():
        np.testing.assert_allclose(vector, wanted[key], atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "depth"), [("mean", 0), ("cls+max", 4), ("last", 1), ("labels", 2), ("tags", 0), ("tags", 2)]
)
def test_two_stages(kind: str, depth: int) -> None:
    found, _ = vectors_of(kind, run_ahead=depth, **TWO)
    compare(found, one_rank(kind))


@pytest.mark.parametrize(
    ("kind", "depth", "seed"), [("mean", 2, 61), ("last", 4, 62), ("labels", 1, 63), ("tags", 0, 64)]
)
def test_on_the_simulated_device(kind: str, depth: int, seed: int) -> None:
    """In graphs, on two stages that run late, each on a device of its own."""
    found, stats = vectors_of(kind, run_ahead=depth, device=f"sim:{seed}", **TWO)
    compare(found, one_rank(kind))
    assert stats.num_graph_steps


def test_three_stages_with_little_room() -> None:
    """The pool holds hardly more than one text."""
    memory = KV_BLOCK_BYTES // 2 * (LONGEST // 8 + 3)
    found, _ = vectors_of("mean", run_ahead=2, device="sim:65", kv_cache_memory_bytes=memory, **THREE)
    compare(found, one_rank("mean"))


def test_stages_of_parts() -> None:
    found, _ = vectors_of("labels", run_ahead=1, tensor_parallel_size=2, **TWO)
    compare(found, one_rank("labels"))


def test_no_stage_waits_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """None are drawn: the last stage hands nothing back, and the head is there alone."""
    heads: list[bool] = []
    finalize = DecoderModel.finalize

    def made(model: DecoderModel) -> None:
        heads.append(model.outputs is not None and any(True for _ in model.outputs.parameters()))
        finalize(model)

    def told(stage: Stage, tokens: object) -> None:
        raise AssertionError("there are no tokens")

    monkeypatch.setattr(DecoderModel, "finalize", made)
    monkeypatch.setattr(Stage, "tell", told)
    monkeypatch.setattr(Stage, "listen", told)
    found, _ = vectors_of("labels", **TWO)
    compare(found, one_rank("labels"))
    assert sorted(heads) == [False, True]


def test_encoders_are_refused() -> None:
    """They take texts whole and are small: replicas are the way to more of them."""
    folder = save(build("BertModel"), Path(mkdtemp(prefix="headway-stages-")))
    with pytest.raises(
        UnsupportedModelError, match="is an encoder, which is whole on each rank; leave out pipeline_parallel_size"
    ):
        build_engine(EngineArgs(model=folder, device="cpu", **TWO), progress=False)
