"""Experts of mixtures in GGUF files, stacked and quantised: transformers is given the values that the blocks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize

from headway.models.decoder import DecoderModel
from headway.models.load import load_model
from headway.models.quantized_weights import BlockUse
from headway.weights import open_checkpoint
from tests.kernels.gguf_blocks import encoded
from tests.models.harness import DEVICE, Machine
from tests.models.test_decoder import TOLERANCE
from tests.models.test_mixtures import gguf_arrays
from tests.models.tiny import Tiny, hf_model
from tests.weights.tiny_gguf import write_gguf

HIDDEN, INNER, EXPERTS = 256, 256, 3
"""Whole blocks of the largest types."""
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "head_dim": 64, "num_hidden_layers": 2}
OF_EXPERTS = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
MIXTURES: dict[str, tuple[Tiny, dict[str, Any]]] = {
    "qwen3moe": (
        Tiny("Qwen3Moe", SIZES | OF_EXPERTS | {"norm_topk_prob": True}),
        {"expert_feed_forward_length": INNER},
    ),
    "qwen2moe": (
        Tiny("Qwen2Moe", SIZES | OF_EXPERTS | {"shared_expert_intermediate_size": 32}),
        {"expert_feed_forward_length": INNER, "expert_shared_feed_forward_length": 32},
    ),
    "olmoe": (
        Tiny("Olmoe", SIZES | {"num_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": INNER}),
        {"feed_forward_length": INNER},
    ),
    "llama": (
        Tiny("Mixtral", SIZES | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": INNER}),
        {"feed_forward_length": INNER},
    ),
}


def stored(kind: Q, matrices: torch.Tensor, seed: int) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """[E, N, K] -> what a file has for it, and the values that this means. Q4_K is drawn: the package has no encoder."""
    if kind is Q.F16:
        return matrices.half().numpy(), matrices.half().float()
    experts, rows, columns = matrices.shape
    if kind is Q.Q4_K:
        blocks = encoded(kind.value, experts * rows, columns, seed=seed).numpy()
    else:
        blocks = quantize(matrices.reshape(-1, columns).numpy(), kind)
    values = torch.from_numpy(np.ascontiguousarray(dequantize(blocks, kind)))
    return blocks.reshape(experts, rows, -1), values.view_as(matrices)


@pytest.mark.parametrize("kind", [Q.F16, Q.Q8_0, Q.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", MIXTURES)
@torch.no_grad()
def test_experts_in_blocks(arch: str, kind: Q, tmp_path: Path) -> None:
    tiny, keys = MIXTURES[arch]
    oracle = hf_model(tiny)
    blocks: dict[str, Any] = {}
    for layer, block in enumerate(oracle.model.layers):
        experts = block.mlp.experts
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        found = {"gate": gate, "up": up, "down": experts.down_proj.data}
        for seed, (name, matrices) in enumerate(found.items()):
            raw, values = stored(kind, matrices, 10 * layer + seed)
            blocks[f"blk.{layer}.ffn_{name}_exps.weight"] = raw
            matrices.copy_(values)
    arrays = gguf_arrays(oracle)
    in_blocks = {} if kind is Q.F16 else {name: (raw, kind) for name, raw in blocks.items()}
    arrays |= blocks if kind is Q.F16 else {}
    config = oracle.config
    keys = {
        "embedding_length": HIDDEN, "feed_forward_length": config.intermediate_size, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 64, "expert_count": EXPERTS,
        "expert_used_count": 2, "rope.freq_base": float(config.rope_parameters["rope_theta"]), **keys,
    }  # fmt: skip
    path = write_gguf(
        tmp_path / "model.gguf", {name: each for name, each in arrays.items() if name not in in_blocks}, arch=arch,
        raw=in_blocks, extra={f"{arch}.{key}": value for key, value in keys.items()},
    )  # fmt: skip
    tokens = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    wanted = oracle(torch.tensor([tokens])).logits[0]
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.quantized == ({} if kind is Q.F16 else {kind.name: 6})
    for use in BlockUse:
        model = load_model(
            checkpoint, dtype=torch.float32, device=DEVICE, max_model_len=32, progress=False, seed=0, blocks=use
        )
        assert isinstance(model, DecoderModel)
        torch.testing.assert_close(Machine(model).in_chunks(tokens, [9, 11]), wanted, **TOLERANCE)
