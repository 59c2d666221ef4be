"""Launches of ``expert_mlp`` on CUDA: which kernels, with which tiles, in which grids."""

from __future__ import annotations

from typing import Any

import torch

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import shared_limit
from headway.kernels.expert_mlp.tiles import few_tile, group_tile, group_word_tile, is_few, tile_count
from headway.kernels.expert_mlp.triton_few import few_in_kernel, few_out_kernel
from headway.kernels.expert_mlp.triton_grouped import combine_kernel, grouped_kernel, sort_kernel
from headway.kernels.hopper import runs_gluon
from headway.kernels.triton_early import launch_early

Matrix = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Weights, scales, biases of all experts."""


def expert_mlp(x: torch.Tensor, *others: Any) -> torch.Tensor:
    y = torch.empty_like(x)
    _run(y, False, x, *others)
    return y


def add_experts(*given: Any) -> None:
    *experts, residual = given
    x, ids, _, gate_up = experts[:4]
    if is_few(len(x), ids.shape[1], len(gate_up)) and residual.is_contiguous():
        _run(residual, True, *experts)
    else:
        residual += expert_mlp(*experts)


def _run(
    y: torch.Tensor,
    add: bool,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    gate_up_scales: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    down_scales: torch.Tensor | None,
    act: str,
    gated: bool,
    limit: float,
    alpha: float,
    weigh_inputs: bool,
) -> None:
    """``add``: y holds what is added to, which few tokens alone can."""
    ins, outs, numbers = (gate_up, gate_up_scales, gate_up_bias), (down, down_scales, down_bias), (limit, alpha)
    (tokens, hidden), (experts, outputs, _) = x.shape, ins[0].shape
    if not tokens:
        return
    sizes = {"E": experts, "TOP_K": ids.shape[1], "WEIGH": weigh_inputs, "FP4": ins[1] is not None}
    into = {"ACT": act, "GATED": gated}
    inner = outputs // 2 if gated else outputs
    if is_few(tokens, ids.shape[1], experts):
        _few(x, ids, weights, ins, outs, y, inner, hidden, numbers, sizes, into, add)
    else:
        _grouped(x, ids, weights, ins, outs, y, inner, hidden, numbers, sizes, into)


def in_words(x: torch.Tensor, scales: torch.Tensor | None, weigh_inputs: bool) -> bool:
    """Whether ``hopper``'s products of 4-bit weights serve."""
    return scales is not None and x.dtype == torch.bfloat16 and not weigh_inputs and runs_gluon(x.device)


def _few(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, ins: Matrix, outs: Matrix, y: torch.Tensor, inner: int,
    hidden: int, numbers: tuple[float, float], sizes: dict[str, Any], into: dict[str, Any], add: bool,
) -> None:  # fmt: skip
    pairs, early = ids.numel(), launch_early(x.device)
    if in_words(x, ins[1], sizes["WEIGH"]):
        from headway.kernels.expert_mlp.hopper.launch import few_words

        few_words(x, ids, weights, ins, outs, y, inner, hidden, numbers, sizes["E"], into, early, add)
        return
    between = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    fp4 = bool(sizes["FP4"])
    tile = few_tile(pairs, inner, hidden, fp4=fp4)
    few_in_kernel[(pairs, cdiv(inner, tile.block_n))](
        x, ids, weights, *ins, between, x.stride(0), *numbers, INNER=inner, K=hidden, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, num_warps=tile.num_warps, **sizes, **into, **early,
    )  # fmt: skip
    tile = few_tile(len(x), hidden, inner, fp4=fp4)
    few_out_kernel[(len(x), cdiv(hidden, tile.block_n))](
        between, ids, weights, *outs, y, N=hidden, K=inner, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        ADD=add, num_warps=tile.num_warps, **sizes, **early,
    )  # fmt: skip


def _grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, ins: Matrix, outs: Matrix, y: torch.Tensor, inner: int,
    hidden: int, numbers: tuple[float, float], sizes: dict[str, Any], into: dict[str, Any],
) -> None:  # fmt: skip
    pairs, experts, device, early = ids.numel(), sizes["E"], x.device, launch_early(x.device)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    block = min(2048, max(128, next_power_of_2(pairs)))
    sort_kernel[(experts,)](ids, order, counts, pairs, BLOCK=block, num_warps=8 if block > 1024 else 4, **early)
    between = torch.empty((pairs, inner), dtype=x.dtype, device=device)
    found = torch.empty((pairs, hidden), dtype=x.dtype, device=device)
    lanes, room, fp4 = next_power_of_2(experts), shared_limit(device), bool(sizes["FP4"])
    for first, source, target, matrix, shape in (
        (True, x, between, ins, (inner, hidden)),
        (False, between, found, outs, (hidden, inner)),
    ):
        paired = first and into["GATED"]
        if in_words(x, ins[1], sizes["WEIGH"]):
            from headway.kernels.expert_mlp.hopper.launch import grouped_words

            words = group_word_tile(pairs, experts)
            grouped_words(words, source, order, counts, matrix, target, sizes["TOP_K"], numbers, first, into, early)
            continue
        tile = group_tile(pairs, experts, *shape, item=x.itemsize, paired=paired, fp4=fp4, room=room)
        grouped_kernel[(cdiv(shape[0], tile.block_n), tile_count(pairs, experts, tile.rows))](
            source, order, counts, weights, *matrix, target, source.stride(0), *numbers, LANES=lanes, OUT=shape[0], K=shape[1],
            ROWS=tile.rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, FIRST=first, TOGETHER=tile.together,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **sizes, **into, **early,
        )  # fmt: skip
    block = min(1024, next_power_of_2(hidden))
    combine_kernel[(cdiv(hidden, block), len(x))](
        found, ids, weights, y, E=experts, N=hidden, TOP_K=sizes["TOP_K"], BLOCK=block, WEIGH=sizes["WEIGH"], num_warps=4,
        **early,
    )  # fmt: skip
