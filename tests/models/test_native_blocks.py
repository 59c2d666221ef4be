"""Decoder blocks that run as one native call: which do, and that nobody can tell from the results."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.kernels.cpu import layers, ops
from headway.models.config import map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.native_blocks import NativeBlocks
from tests.models.harness import Machine, Row
from tests.models.test_quantized_weights import MIXED, Q4_K, gguf, load
from tests.models.tiny import TINY, hf_model, ours, pair

pytestmark = pytest.mark.skipif(not ops.available() or torch.cuda.is_available(), reason="native kernels of a CPU")
WHOLE = [
    "llama", "llama-biases", "llama-one-kv-head", "llama-yarn-mscale", "mistral-window", "qwen2", "qwen2-layer-types", "qwen3",
]  # fmt: skip
OTHERS = ["gemma2", "olmo2", "granite", "phi", "gpt2", "cohere2"]
"""Norms behind products, or kept in float32, multipliers, other activations, layer norms, parallel blocks."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks of each native call."""
    counts: list[int] = []
    call = layers.BlockRun.__call__

    def counted(run: layers.BlockRun, count: int, *given: Any) -> torch.Tensor:
        counts.append(count)
        return call(run, count, *given)

    monkeypatch.setattr(layers.BlockRun, "__call__", counted)
    return counts


def one_by_one(model: DecoderModel) -> DecoderModel:
    """The model operation by operation."""
    plain = copy.copy(model)
    vars(plain)["_native"] = NativeBlocks([], 0, model.dtype)
    return plain


def passes(model: DecoderModel, machine: Machine) -> list[torch.Tensor]:
    """Logits of prompts, of a step of everything, with zombies and padding, and of decode rows; then all that is cached."""
    machine.model = model
    found = machine.step([Row(3, range(4, 14)), Row(0, range(30, 50))])
    found += machine.step(
        [Row(3, [17], 10), Row(0, [5], 20, alive=False), Row(4, range(9)), Row(2, [7, 7, 7], 4, alive=False)],
        pad_rows=2,
        pad_tokens=3,
    )
    found.append(machine.last_step([Row(3, [8], 11), Row(1, range(60, 66))]))
    found += machine.step([Row(3, [9], 12), Row(0, [2], 20), Row(4, [61], 9)])
    return [*found, *machine.cached]


def assert_same(model: DecoderModel) -> None:
    plain = passes(one_by_one(model), Machine(model))
    for a, b in zip(passes(model, Machine(model)), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", WHOLE)
def test_bits_are_those_of_the_operations(name: str, dtype: torch.dtype, ran: list[int]) -> None:
    model = pair(name).model if dtype is torch.float32 else ours(hf_model(TINY[name]), dtype=dtype)
    assert_same(model)
    blocks = len(model.config.blocks)
    assert ran == [blocks, blocks, blocks - 1, blocks], "the last block runs for the last tokens alone, apart"


RULES: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": True}, "window and sinks": {"window": 5, "sinks": True}, "chunk": {"chunk": 6},
    "slopes": {"slopes": (0.5, 0.25, 0.125, 1.0)}, "soft cap": {"soft_cap": 0.4}, "scale": {"scale": 0.7},
}  # fmt: skip
"""Changes of attention."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_attention(rule: str, dtype: torch.dtype, ran: list[int]) -> None:
    """Each changes what is computed, and has the operations' bits."""
    given = pair("llama").model.config
    assert given.blocks[0].attention.num_heads == 4
    config = map_blocks(given, lambda _, block: replace(block, mixer=replace(block.attention, **RULES[rule])))
    plain, ruled = (drawn(each, dtype) for each in (given, config))
    assert_same(ruled)
    assert len(ran) == 4 and set(ran) <= {len(config.blocks), len(config.blocks) - 1}
    one, other = (passes(each, Machine(each)) for each in (plain, ruled))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def drawn(config: DecoderConfig, dtype: torch.dtype) -> DecoderModel:
    """A model of ``config`` with random parameters that bfloat16 holds, so that float32 products keep them in 16 bits."""
    model = DecoderModel(config, dtype=dtype, device=torch.device("cpu"), max_model_len=64)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.3).bfloat16())
    model.finalize()
    return model


def test_tokens_that_see_later_ones_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures' spans, which the native call does not know."""
    model, given = pair("llama").model, []
    call = NativeBlocks.__call__

    def noted(run: NativeBlocks, *arguments: Any) -> Any:
        given.append((run, *arguments))
        return call(run, *arguments)

    monkeypatch.setattr(NativeBlocks, "__call__", noted)
    Machine(model).step([Row(1, range(5, 9))])
    run, stream, batch, *more = given[0]
    assert run._count(stream, batch, *more) > 0
    assert run._count(stream, replace(batch, ends=torch.zeros(4, dtype=torch.int32)), *more) == 0


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks_run_one_by_one(name: str, ran: list[int]) -> None:
    passes(pair(name).model, Machine(pair(name).model))
    assert not ran


def test_blocks_before_the_first_of_another_kind(ran: list[int]) -> None:
    model = copy.copy(pair("qwen2-layer-types").model)
    blocks = list(model._layers)
    blocks[1] = copy.copy(blocks[1])
    blocks[1].spec = copy.copy(blocks[1].spec)
    object.__setattr__(blocks[1].spec, "parallel", True)  # as NativeBlocks sees it; what runs is as it was
    vars(model)["_native"] = NativeBlocks(blocks, 0, model.dtype)
    assert_same(model)
    assert set(ran) == {1}


def test_each_pool_has_its_own_caches(ran: list[int]) -> None:
    model = pair("llama").model
    machines = [Machine(model, seed=seed) for seed in (1, 2)]
    first = [machine.step([Row(2, range(5, 15))])[0] for machine in machines]
    again = [machine.step([Row(2, [3], 10)])[0] for machine in machines]
    alone = Machine(one_by_one(model), seed=2)
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[1], alone.step([Row(2, range(5, 15))])[0])
    assert torch.equal(again[0], again[1])
    assert torch.equal(again[1], alone.step([Row(2, [3], 10)])[0])
    for own, wanted in zip(machines[1].cached, alone.cached, strict=True):
        assert torch.equal(own, wanted), "keys and values are in the pool of their own step"
    assert len(ran) == 4


@pytest.mark.parametrize(
    ("dtype", "exact"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["f32", "f32 exact", "bf16"],
)  # fmt: skip
def test_gguf_blocks_too(exact: bool, dtype: torch.dtype, tmp_path: Path, ran: list[int]) -> None:
    """Products of several types, with biases."""
    assert_same(load(gguf(tmp_path, MIXED, other=Q4_K, arch="qwen2"), keep=True, dtype=dtype, exact=exact))
    assert ran == [2, 2, 1, 2]


def test_memory_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        @staticmethod
        def headway_decoder_blocks(*_: Any) -> int:
            return -1

    model = pair("llama").model
    machine = Machine(model)
    machine.step([Row(1, [3, 4])])
    monkeypatch.setattr(layers, "native", Failing)
    with pytest.raises(MemoryError, match="decoder blocks"):
        machine.step([Row(1, [5], 2)])
