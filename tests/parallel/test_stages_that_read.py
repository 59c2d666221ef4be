"""Stages of encoder-decoders: each runs the whole encoder, since cross-attention of all layers reads what it gives, and makes
the keys and values of its own layers alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from headway.core.errors import ConfigError
from headway.core.messages import AddRequest, EngineStats
from headway.engine.boot import build_engine
from headway.models.encoder_decoder import EncoderDecoderModel
from headway.models.interface import EncoderInput
from headway.parallel.stage import Stage
from headway.state.cache_pool import CachePool
from tests.engine.harness import Answer
from tests.engine.tiny_encoder_decoders import START, arguments, reader, recording, request, save, text, whisper
from tests.parallel.test_engine import THREADS, compare
from tests.parallel.waits import answers_and_stats

TWO: dict[str, Any] = {**THREADS, "distributed_timeout_seconds": 20, "pipeline_parallel_size": 2}
READERS = ("whisper", "bart", "mbart", "t5", "flan-t5", "mt5")
BLOCK_BYTES = 2 * 8 * 32 * 4
"""Of 8 tokens in one block of attention; the larger stage has two layers, each of which attends and cross-attends."""


@cache
def folder_of(kind: str) -> str:
    """Of a decoder of three layers: the first stage has two of them."""
    return save(whisper() if kind == "whisper" else reader(kind), Path(mkdtemp(prefix=f"headway-stages-{kind}-")))


def requests(kind: str) -> list[AddRequest]:
    """More than there are slots, several on the same recording or text, whose prompts come in chunks."""
    prompts = [[START], [START, 5, 9], [START, 7], [START, 5, 9, 11, 40, 41, 42, 43, 44, 45], [START, 8]]
    texts = [[5, 6, 7, 8, 9, 10, 11], [40], list(range(20, 50))]
    made = []
    for i in range(8):
        item = recording(i % 3) if kind == "whisper" else text(texts[i % 3])
        features: dict[str, Any] = {
            "logprobs": i % 3,
            "temperature": 0.8 * (i % 2),
            "repetition_penalty": 1.0 + 0.2 * (i == 3),
        }
        made.append(request(f"{i}", item, prompts[i % 5], max_tokens=9 + i, **features))
    return made


def answers_of(kind: str, **more: Any) -> tuple[dict[str, Answer], EngineStats]:
    sizes: dict[str, Any] = {"run_ahead": 0, "max_num_seqs": 3, "max_num_batched_tokens": 6}
    args = arguments(folder_of(kind), **sizes | more)
    return answers_and_stats(args, lambda core: requests(kind))


@cache
def one_rank(kind: str) -> dict[str, Answer]:
    return answers_of(kind)[0]


USUAL = {"whisper": 2, "bart": 1, "t5": 4, "mt5": 0}


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        pytest.param(kind, depth, marks=[] if USUAL.get(kind) == depth else pytest.mark.soak)
        for kind in READERS
        for depth in (0, 1, 2, 4)
    ],
)
def test_two_stages(kind: str, depth: int) -> None:
    found, _ = answers_of(kind, run_ahead=depth, **TWO)
    compare(found, one_rank(kind))


@pytest.mark.parametrize(
    ("kind", "depth", "seed"),
    [
        ("whisper", 2, 91),
        ("t5", 1, 92),
        *(pytest.param(kind, 4, 93, marks=pytest.mark.soak) for kind in ("whisper", "mt5")),
    ],
)
def test_on_the_simulated_device(kind: str, depth: int, seed: int) -> None:
    """In graphs, with few blocks: nothing is read ahead of a stage's own encoder, and preempted requests are encoded again."""
    memory, longest = 13 * 2 * BLOCK_BYTES, {"max_model_len": 48} if kind == "whisper" else {}
    if kind != "whisper":
        memory *= 2
    found, stats = answers_of(
        kind, run_ahead=depth, device=f"sim:{seed}", kv_cache_memory_bytes=memory, **longest, **TWO
    )
    compare(found, one_rank(kind))
    assert stats.num_graph_steps and (stats.num_preemptions or kind != "whisper")


@pytest.mark.parametrize("kind", ["whisper", "t5"])
def test_stages_of_parts(kind: str) -> None:
    found, _ = answers_of(kind, run_ahead=1, tensor_parallel_size=2, **TWO)
    compare(found, one_rank(kind))


def test_a_stage_for_each_layer() -> None:
    found, _ = answers_of("bart", run_ahead=2, **TWO | {"pipeline_parallel_size": 3})
    compare(found, one_rank("bart"))


def test_layers_are_not_cut_in_two() -> None:
    """A layer of the decoder is two blocks here; a fourth stage would have half of one."""
    with pytest.raises(ConfigError, match="more than the model's 3 layers"):
        build_engine(arguments(folder_of("bart"), **TWO | {"pipeline_parallel_size": 4}), progress=False)


def test_each_stage_encodes_for_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No outputs are exchanged, and positions and biases of logits are where they are read."""
    encoded: dict[int, int] = {}
    encode, widths = EncoderDecoderModel.encode, set[int]()
    send = Stage.send

    def noted(
        model: EncoderDecoderModel, inputs: Sequence[EncoderInput], starts: torch.Tensor, caches: CachePool
    ) -> None:
        stage = model.config.stage
        assert stage is not None and [i for i, _ in model._cross] == [i for i in stage.own if i % 2]
        assert model.positions is not None and bool(len(model.positions)) == stage.is_first
        assert (model.logit_bias is not None) == stage.is_last
        encoded[stage.own.start] = encoded.get(stage.own.start, 0) + len(inputs)
        encode(model, inputs, starts, caches)

    def sent(stage: Stage, x: torch.Tensor) -> None:
        widths.add(x.shape[1])
        send(stage, x)

    monkeypatch.setattr(EncoderDecoderModel, "encode", noted)
    monkeypatch.setattr(Stage, "send", sent)
    compare(answers_of("bart", **TWO)[0], one_rank("bart"))
    assert encoded.keys() == {0, 4} and encoded[0] == encoded[4] > 0
    assert widths == {32}
