"""Random weights in every type of GGUF block."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from headway.kernels.quant_linear.formats import BLOCK_TYPES

KINDS = tuple(BLOCK_TYPES)
NAMES = [kind.name for kind in BLOCK_TYPES.values()]
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types that the gguf package can make from weights; others are random bytes with scales that give weights of order one."""

# Where float16 numbers lie in a block: the first ones for some types, the last for others.
_SCALES = {
    "Q2_K": (80, 2),
    "Q3_K": (108, 1),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208, 1),
    "IQ4_NL": (0, 1),
    "IQ4_XS": (0, 1),
}
_TYPICAL = {"Q2_K": 0.05, "Q3_K": 0.02, "Q4_K": 0.004, "Q5_K": 0.002, "Q6_K": 0.0008, "IQ4_NL": 0.015, "IQ4_XS": 0.001}


def encoded(kind: int, outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """uint8 [outputs, bytes of a row]; weights are of order one."""
    rng = np.random.default_rng(seed)
    name = Q(kind).name
    if name in QUANTIZED:
        made = quantize(rng.standard_normal((outputs, inputs)).astype(np.float32), Q(kind)).view(np.uint8)
        return torch.from_numpy(made).reshape(outputs, -1)
    block, num_bytes = GGML_QUANT_SIZES[Q(kind)]
    blocks = rng.integers(0, 256, (outputs, inputs // block, num_bytes), dtype=np.uint8)
    at, count = _SCALES[name]
    scales = (_TYPICAL[name] * (0.5 + rng.random((outputs, inputs // block, count)))).astype(np.float16)
    scales *= rng.choice([-1, 1], scales.shape).astype(np.float16)
    blocks[..., at : at + 2 * count] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(outputs, -1))


def decoded(kind: int, rows: torch.Tensor) -> torch.Tensor:
    """float32 [outputs, inputs], by the gguf package."""
    return torch.from_numpy(np.ascontiguousarray(dequantize(rows.numpy(), Q(kind))))
