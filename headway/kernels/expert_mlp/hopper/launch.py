"""Launches of ``expert_mlp``'s products in Gluon. With 4-bit weights inputs and outputs are multiples of 64, as groups are."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import num_sms
from headway.kernels.expert_mlp.hopper.triton_few import few_in_words_kernel, few_out_words_kernel
from headway.kernels.expert_mlp.hopper.triton_many import many_out_kernel
from headway.kernels.expert_mlp.hopper.triton_shared import grouped_shared_kernel
from headway.kernels.expert_mlp.tiles import (
    MANY_CHUNK,
    MANY_GROUP,
    MANY_ROWS,
    MANY_STAGES,
    MANY_WIDE,
    SharedTile,
    few_word_tile,
    tile_count,
)

FLAT = NVMMASharedLayout(128, 16, 2)
Matrix = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Weights, scales, biases of all experts."""


def few_words(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, ins: Matrix, outs: Matrix, y: torch.Tensor, inner: int,
    hidden: int, numbers: tuple[float, float], experts: int, into: dict[str, Any], early: dict[str, Any], add: bool,
) -> None:  # fmt: skip
    """Each pair reads its expert for itself. ``numbers``: limit and alpha; ``into``: ACT and GATED; ``add``: to y."""
    pairs, top_k = ids.numel(), ids.shape[1]
    between = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    blocks = inner // 16
    tile = few_word_tile(pairs * blocks, hidden, 1)
    few_in_words_kernel[(pairs, blocks)](
        x, ids, *ins, between, x.stride(0), *numbers, E=experts, INNER=inner, K=hidden, TOP_K=top_k, PARTS=tile.parts,
        UNROLL=tile.unroll, num_warps=tile.parts, **into, **early,
    )  # fmt: skip
    blocks = hidden // 16
    tile = few_word_tile(len(x) * blocks, inner, top_k)
    few_out_words_kernel[(len(x), blocks)](
        between, ids, weights, *outs, y, E=experts, N=hidden, K=inner, TOP_K=top_k, COLS=tile.rows, PARTS=tile.parts,
        UNROLL=tile.unroll, ADD=add, num_warps=tile.parts, **early,
    )  # fmt: skip


def grouped_words(
    tile: SharedTile, source: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, matrix: Matrix,
    target: torch.Tensor, top_k: int, numbers: tuple[float, float], first: bool, into: dict[str, Any], early: dict[str, Any],
) -> None:  # fmt: skip
    """One of the grouped products, see ``grouped_kernel``."""
    outputs, experts = target.shape[1], len(counts)
    tiles = tile_count(len(order), experts, tile.rows)
    arguments = (source, order, counts, *matrix, target, source.stride(0), *numbers)
    constants = {
        "E": experts, "LANES": next_power_of_2(experts), "OUT": outputs, "K": source.shape[1], "TOP_K": top_k,
        "ROWS": tile.rows, "FIRST": first, **into, **early,
    }  # fmt: skip
    width = tile.height // 2 if first and into["GATED"] else tile.height
    grouped_shared_kernel[(cdiv(outputs, width), tiles)](
        *arguments, M=tile.height, STAGES=tile.stages, num_warps=tile.num_warps, **constants
    )


def many_out(
    between: torch.Tensor, order: torch.Tensor, plan: torch.Tensor, matrix: Matrix, found: torch.Tensor, early: dict[str, Any],
) -> None:  # fmt: skip
    """The products out in persistent programs, see ``triton_many``; ``plan``: as the products in have written it."""
    weight, _, bias = matrix
    experts, outputs, inputs = weight.shape
    tiles = cdiv(outputs, MANY_WIDE)
    rows = TensorDescriptor(between, list(between.shape), [inputs, 1], [MANY_ROWS, MANY_CHUNK], FLAT)
    weights = TensorDescriptor(weight, [experts * outputs, inputs], [inputs, 1], [MANY_WIDE, MANY_CHUNK], FLAT)
    many_out_kernel[(min(num_sms(between.device), tiles * (len(plan) - 1)),)](
        rows, order, plan, weights, found if bias is None else bias, found, tiles, OUT=outputs, K=inputs,
        BIASED=bias is not None, STAGES=MANY_STAGES, GROUP=MANY_GROUP, num_warps=4, **early,
    )  # fmt: skip
