"""Where the wide products are used, and their tile. Imports no Triton.

``TABLE`` holds what ``bench/ops/wide_linear.py`` measured on one H200 in bfloat16: where one kernel beat cuBLAS and the kernel
behind it, over seconds, with the clock that the card's power allows. All of it was measured with 8192 tokens, a full step; with
fewer, and other shapes, these are left to ``F.linear``. Nothing is tuned while serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Kind = Literal["wide_gate_up", "wide_qkv", "wide_add"]
"""The op's name."""

BLOCK_M, WIDE, BLOCK_K = 128, 256, 64
"""Tokens and weight rows of a tile, and inputs of a chunk of it."""
STAGES = 4
"""Chunks that there is shared memory for."""
GROUP = 16
"""Rows of tiles that go through the weights together."""
HEAD_SIZE = 128
"""Of ``wide_qkv``: a tile is two heads wide."""

TABLE: Mapping[tuple[Kind, int, int], int] = MappingProxyType(
    {
        # Qwen3-0.6B
        ("wide_gate_up", 6144, 1024): 8192,
        ("wide_qkv", 4096, 1024): 8192,
        ("wide_add", 1024, 2048): 8192,
        ("wide_add", 1024, 3072): 8192,
        # Llama-3.1-8B; its down projection, K = 14336, lost
        ("wide_gate_up", 28672, 4096): 8192,
        ("wide_qkv", 6144, 4096): 8192,
        ("wide_add", 4096, 4096): 8192,
    }
)
"""(op, N, K) -> the least number of tokens; what is absent lost, or nobody measured it."""


def least_tokens(kind: Kind, outputs: int, inputs: int) -> int | None:
    """From how many tokens on ``kind`` is used for a 16-bit weight [N, K]; None: never."""
    return TABLE.get((kind, outputs, inputs))
