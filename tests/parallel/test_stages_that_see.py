"""Stages of models with sight: the tower is on the first one, whose embeddings alone read it; what is seen is one rank's."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from headway.core.config import Thresholds
from headway.core.errors import UnsupportedModelError
from headway.core.messages import AddRequest, EngineStats
from headway.engine import boot
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.runner.encoder_passes import PassRunner
from headway.runner.runner import ModelRunner
from tests.engine.harness import Answer
from tests.multimodal.test_engine import cache_rows, info_of, prompts
from tests.multimodal.test_sounds import prompts as recorded_prompts
from tests.multimodal.tiny_sight import FAMILIES, arguments, plain, request
from tests.parallel.families import write
from tests.parallel.test_engine import THREADS, compare
from tests.parallel.waits import answers_and_stats

TWO: dict[str, Any] = {**THREADS, "distributed_timeout_seconds": 20, "pipeline_parallel_size": 2}
DEEP = ("qwen3",)
"""What their towers see is added behind two layers, so the first stage needs two."""
LARGE = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
"""What Gemma 4's larger models have not."""
BLOCK_BYTES = 2 * 8 * 2 * 8 * 4
"""Of 8 tokens in one layer of two heads of 8."""


@cache
def folder_of(name: str, layers: int = 4, **more: Any) -> str:
    """A checkpoint of the family, deeper than usual; ``more``: fields of its text model."""
    config = json.loads((Path(plain(name)) / "config.json").read_text())
    text = config["text_config"] | {"num_hidden_layers": layers}
    if "layer_types" in text:
        text["layer_types"] = (text["layer_types"] * layers)[:layers]
    text |= LARGE if name == "gemma4" else {}
    text |= more
    folder = Path(mkdtemp(prefix=f"headway-stages-{name}-"))
    write(config | {"text_config": text}, folder)
    return str(folder)


def traffic(name: str, info: Any, longer: int = 0) -> list[AddRequest]:
    """More than there are slots, on few prompts, so that prefixes hit; log-probabilities of some prompts."""
    wants: dict[int, dict[str, Any]] = {4: {"prompt_logprobs": 1}}
    return [
        request(
            info, f"{i}", prompts(name)[(i + 2) % 5], max_tokens=6 + i % 4 + longer, logprobs=i % 3, **wants.get(i, {})
        )
        for i in range(7)
    ]


def answers_of(name: str, longer: int = 0, **more: Any) -> tuple[dict[str, Answer], EngineStats]:
    """Of an engine of its own; beside rows that decode it encodes one block of a picture a step."""
    sizes: dict[str, Any] = {
        "run_ahead": 0, "max_num_seqs": 3, "encoder_step_ratio": 1e-9,
        "max_num_batched_tokens": 96 if name == "paligemma" else 28, "kv_cache_memory_bytes": 2**21,
    }  # fmt: skip
    args = arguments(folder_of(name), **sizes | more)
    small = Thresholds(encoder_cache_rows=cache_rows(name), encoder_rows=32)
    return answers_and_stats(args, lambda core: traffic(name, info_of(core), longer), small)


@cache
def one_rank(name: str) -> dict[str, Answer]:
    return answers_of(name, enable_prefix_caching=False)[0]


USUAL = {"gemma3": 2, "qwen3": 4, "qwen2.5": 1, "paligemma": 0, "smolvlm": 0}


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        pytest.param(name, depth, marks=[] if USUAL.get(name) == depth else pytest.mark.soak)
        for name in FAMILIES
        for depth in (0, 1, 2, 4)
    ],
)
def test_two_stages(name: str, depth: int) -> None:
    found, _ = answers_of(name, run_ahead=depth, **TWO)
    compare(found, one_rank(name))


@pytest.mark.parametrize("depth", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_two_stages_hear(depth: int) -> None:
    """Recordings and pictures: both towers are on the first stage."""

    def heard(core: EngineCore) -> list[AddRequest]:
        parts = recorded_prompts()
        return [request(info_of(core), f"{i}", parts[i % 5], max_tokens=5 + i, logprobs=i % 3) for i in range(7)]

    def answers(**more: Any) -> dict[str, Answer]:
        sizes: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 28, "encoder_step_ratio": 1e-9}
        args = arguments(folder_of("gemma4"), **sizes | more)
        return answers_and_stats(args, heard, Thresholds(encoder_cache_rows=40))[0]

    compare(answers(run_ahead=depth, **TWO), answers(run_ahead=0))


@pytest.mark.parametrize(
    ("name", "depth", "seed"),
    [("gemma3", 2, 81), ("qwen3", 1, 82), *(pytest.param(name, 4, 83, marks=pytest.mark.soak) for name in FAMILIES)],
)
def test_on_the_simulated_device(name: str, depth: int, seed: int) -> None:
    """In graphs, with few blocks and few rows for pictures, which are evicted."""
    memory = BLOCK_BYTES * (
        26 if name in ("gemma3", "gemma4") else 2 * 20
    )  # its windows and its other layers share blocks
    found, stats = answers_of(
        name, run_ahead=depth, device=f"sim:{seed}", max_model_len=136, kv_cache_memory_bytes=memory, **TWO
    )
    compare(found, one_rank(name))
    assert stats.num_graph_steps


def test_preemption() -> None:
    """Who is preempted sees its pictures again, on the first stage."""
    few: dict[str, Any] = {"max_model_len": 136, "kv_cache_memory_bytes": 2 * 19 * BLOCK_BYTES}
    found, stats = answers_of("qwen2.5", 20, run_ahead=2, **few, **TWO)
    compare(found, answers_of("qwen2.5", 20)[0])
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5"])
def test_the_tower_is_on_the_first_stage_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs there, and so does the cache of what it gives; the last stage, which plans, has neither."""
    made, encoded = list[ModelRunner](), set[int]()
    ready, run_pass = boot._ready_runner, PassRunner.run

    def noted(*given: Any) -> Any:
        found = ready(*given)
        made.append(found[2])
        return found

    def ran(passes: PassRunner, *given: Any) -> None:
        encoded.add(id(passes))
        run_pass(passes, *given)

    monkeypatch.setattr(boot, "_ready_runner", noted)
    monkeypatch.setattr(PassRunner, "run", ran)
    compare(answers_of(name, **TWO)[0], one_rank(name))
    assert len(made) == 2
    for runner in made:
        body = runner.executor.body
        first = body.model.spec.stage is not None and body.model.spec.stage.is_first
        assert hasattr(body.model, "tower") == first == (body.caches.features is not None)
        assert (runner.executor.passes is not None) == first
        assert not first or encoded == {id(runner.executor.passes)}


def test_drafts_by_ngrams_beside_pictures() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    found, stats = answers_of("qwen2.5", run_ahead=1, speculative_config=drafts, max_num_batched_tokens=40, **TWO)
    compare(found, one_rank("qwen2.5"))
    assert stats.num_draft_tokens > 0


def test_stages_of_parts() -> None:
    found, _ = answers_of("qwen3", run_ahead=2, tensor_parallel_size=2, **TWO)
    compare(found, one_rank("qwen3"))


def test_what_is_added_behind_later_stages_is_refused() -> None:
    """Qwen3-VL's tower gives something for its first two layers."""
    args = arguments(folder_of("qwen3", layers=3), **TWO | {"pipeline_parallel_size": 3})
    with pytest.raises(
        UnsupportedModelError, match="adds what its tower sees behind its first 2 layers, and the first of 3"
    ):
        build_engine(args, progress=False)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_kv_shared_layers": 2}, "layer 2 reads what layer 0 caches, and 2 stages are too many"),
        ({"hidden_size_per_layer_input": 4}, "from embeddings, pictures among them, which later stages do not have"),
    ],
)
def test_what_smaller_models_of_gemma_4_have_is_refused(fields: dict[str, int], why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        build_engine(arguments(folder_of("gemma4", **fields), **TWO), progress=False)
