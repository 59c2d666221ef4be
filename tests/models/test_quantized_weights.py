"""Models whose weights stay in GGUF blocks: every layer has its own, logits are those of dequantised weights, memory falls."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from headway.kernels.cpu import ops
from headway.kernels.quant_linear import QuantizedLinear
from headway.kernels.quant_linear.formats import BLOCK_TYPES
from headway.models.decoder import DecoderModel
from headway.models.layers.linear import Linear
from headway.models.load import load_model
from headway.models.quantized_weights import BlockUse
from headway.weights import open_checkpoint
from tests.kernels.gguf_blocks import KINDS, NAMES, encoded
from tests.models.harness import Machine, Row
from tests.weights.tiny_gguf import write_gguf

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C compiler here")
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 256, 512, 4, 2, 99, 2
CPU = torch.device("cpu")
PROMPT = [5, 17, 3, 88, 41, 2, 60, 33, 7, 19]
Q4_0, Q5_0, Q8_0, Q4_K, Q6_K = 2, 6, 8, 12, 14
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def gguf(path: Path, kinds: dict[str, int], *, other: int, arch: str = "llama", tied: bool = True) -> Path:
    """A tiny model; ``kinds`` by GGUF name (without ``blk.N`` and ``weight``), ``other`` for all other matrices."""
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {"output_norm.weight": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)}
    raw: dict[str, Any] = {}
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), **({} if tied else {"output.weight": (VOCAB, HIDDEN)})}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in MATRICES.items()}
        for name in ("attn_norm", "ffn_norm"):
            arrays[f"blk.{layer}.{name}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32) * 0.1
        if arch == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                arrays[f"blk.{layer}.{name}.bias"] = rng.standard_normal(MATRICES[name][0]).astype(np.float32)
    for i, (name, shape) in enumerate(shapes.items()):
        kind = kinds.get(name.removesuffix(".weight").split(".")[-1], other)
        if kind == 0:
            arrays[name] = rng.standard_normal(shape).astype(np.float32)
        else:
            raw[name] = (encoded(kind, *shape, seed=i).numpy(), Q(kind))
    keys = {"embedding_length": HIDDEN, "feed_forward_length": INNER, "attention.head_count": HEADS}
    keys |= {"attention.head_count_kv": KV_HEADS, "block_count": LAYERS}
    return write_gguf(path / "m.gguf", arrays, arch=arch, raw=raw, extra={f"{arch}.{k}": v for k, v in keys.items()})


def load(file: Path, *, keep: bool, dtype: torch.dtype = torch.float32, exact: bool = False) -> DecoderModel:
    use = BlockUse.EXACT if exact else BlockUse.ROUNDED if keep else BlockUse.DEQUANTIZED
    model = load_model(
        open_checkpoint(str(file)), dtype=dtype, device=CPU, max_model_len=32, progress=False, seed=0, blocks=use
    )
    assert isinstance(model, DecoderModel)
    return model


def logits(model: DecoderModel) -> torch.Tensor:
    """Of a prompt and of four decoded tokens after it."""
    machine = Machine(model)
    found = machine.step([Row(1, PROMPT)])
    return torch.cat(
        found + [machine.step([Row(1, [token], len(PROMPT) + i)])[0] for i, token in enumerate([9, 4, 77, 1])]
    )


def linears(model: DecoderModel) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def assert_near(model: DecoderModel, exact: DecoderModel) -> None:
    """8 bits of activations move logits by some percent, bfloat16 by more; a row or a scale in the wrong place by all of it."""
    found, expected = logits(model), logits(exact)
    error = float((found - expected).norm() / expected.norm())
    assert error < (0.05 if model.dtype is torch.float32 else 0.1), error


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_every_type_serves_a_whole_model(tmp_path: Path, kind: int) -> None:
    file = gguf(tmp_path, {}, other=kind)
    model = load(file, keep=True)
    assert all(isinstance(linear.packed, QuantizedLinear) for linear in linears(model))
    assert model.head is not None
    assert model.embedding.blocks is model.head.packed, "the tied table is held once"
    plain = load(file, keep=False)
    assert_near(model, plain)
    exact = load(file, keep=True, exact=True)
    assert all(isinstance(linear.packed, QuantizedLinear) for linear in linears(exact))
    assert torch.equal(logits(exact), logits(plain)), "float32 gives the bits of dequantised weights"


MIXED = {
    "attn_q": Q4_K,
    "attn_k": Q5_0,
    "attn_v": Q6_K,
    "ffn_gate": Q4_0,
    "ffn_up": Q8_0,
    "token_embd": Q5_0,
    "output": Q6_K,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_fused_matrices_of_mixed_types(tmp_path: Path, arch: str, tied: bool, dtype: torch.dtype) -> None:
    file = gguf(tmp_path, MIXED, other=Q4_K, arch=arch, tied=tied)
    model = load(file, keep=True, dtype=dtype)
    qkv = next(linear for linear in linears(model) if len(linear.parts) == 3).packed
    assert isinstance(qkv, QuantizedLinear)
    assert qkv.types == (Q4_K, Q5_0, Q6_K) and qkv.outputs == (HIDDEN, HIDDEN // 2, HIDDEN // 2)
    assert model.head is not None
    assert (model.embedding.blocks is model.head.packed) == tied
    plain = load(file, keep=False)
    assert_near(model, plain)
    if dtype is torch.float32:
        assert torch.equal(logits(load(file, keep=True, exact=True)), logits(plain))


def test_what_is_not_multiplied_from_blocks_is_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain part makes its fused matrix plain; so do types without kernels. The others keep their blocks."""
    file = gguf(tmp_path, {"attn_v": 0, "ffn_down": Q6_K}, other=Q8_0)
    fewer = {kind: found for kind, found in BLOCK_TYPES.items() if kind != Q6_K}
    monkeypatch.setattr("headway.models.load.BLOCK_TYPES", fewer)
    with caplog.at_level(logging.INFO, "headway"):
        model = load(file, keep=True)
    kept = [isinstance(linear.packed, QuantizedLinear) for linear in linears(model)]
    assert kept == [False, True, True, False] * LAYERS + [True]
    assert "matrices kept in GGUF blocks: 7 Q8_0 (" in caplog.text
    assert "dequantised: 2 Q6_K, 4 Q8_0" in caplog.text
    assert_near(model, load(file, keep=False))


def test_memory_falls_to_that_of_the_blocks(tmp_path: Path) -> None:
    file = gguf(tmp_path, {}, other=Q4_0)

    def held(model: DecoderModel) -> int:
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
        return sum(tensors.values())

    kept, plain = held(load(file, keep=True)), held(load(file, keep=False))
    assert kept < plain / 32 * 5, "4.5 bits instead of 32, and panels of 16 rows where 99 are held"


def test_the_file_may_go_once_the_model_is_loaded(tmp_path: Path) -> None:
    file = gguf(tmp_path, {}, other=Q4_K)
    model = load(file, keep=True)
    before = logits(model)
    with file.open("r+b") as opened:  # in place: a mapping would see it
        opened.write(b"\xff" * file.stat().st_size)
    assert torch.equal(logits(model), before)
