"""Launches of ``expert_mlp`` on CUDA: which kernels, with which tiles, in which grids."""

from __future__ import annotations

from typing import Any

import torch

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import shared_limit
from headway.kernels.expert_mlp.tiles import (
    MANY_ROWS,
    few_tile,
    group_tile,
    group_word_tile,
    is_few,
    out_is_many,
    sort_parts,
    tile_count,
)
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


def out_in_large_tiles(x: torch.Tensor, pairs: int, outs: Matrix) -> bool:
    """Whether ``hopper``'s products out serve."""
    weight, scales, _ = outs
    if scales is not None or x.itemsize != 2 or not out_is_many(pairs, len(weight), weight.shape[2]):
        return False
    return runs_gluon(x.device)


def sort_pairs(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs by expert, and how many each has."""
    pairs, device = ids.numel(), ids.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    parts = sort_parts(pairs)
    sort_kernel[(experts,)](
        ids, order, counts, pairs, PARTS=parts, num_warps=min(16, max(4, parts // 4)), **launch_early(device)
    )
    return order, counts


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
    order, counts = sort_pairs(ids, experts)
    between = torch.empty((pairs, inner), dtype=x.dtype, device=device)
    found = torch.empty((pairs, hidden), dtype=x.dtype, device=device)
    plan = None
    if out_in_large_tiles(x, pairs, outs):
        plan = torch.empty((1 + tile_count(pairs, experts, MANY_ROWS), 4), dtype=torch.int32, device=device)
    for first, source, target, matrix in ((True, x, between, ins), (False, between, found, outs)):
        if in_words(x, ins[1], sizes["WEIGH"]):
            from headway.kernels.expert_mlp.hopper.launch import grouped_words

            words = group_word_tile(pairs, experts)
            grouped_words(words, source, order, counts, matrix, target, sizes["TOP_K"], numbers, first, into, early)
        elif first or plan is None:
            grouped_plain(source, order, counts, weights, matrix, target, plan, numbers, first, sizes, into, early)
        else:
            from headway.kernels.expert_mlp.hopper.launch import many_out

            many_out(source, order, plan, matrix, target, early)
    block = min(1024, next_power_of_2(hidden))
    combine_kernel[(cdiv(hidden, block), len(x))](
        found, ids, weights, y, E=experts, N=hidden, TOP_K=sizes["TOP_K"], BLOCK=block, WEIGH=sizes["WEIGH"], num_warps=4,
        **early,
    )  # fmt: skip


def grouped_plain(
    source: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, matrix: Matrix,
    target: torch.Tensor, plan: torch.Tensor | None, numbers: tuple[float, float], first: bool, sizes: dict[str, Any],
    into: dict[str, Any], early: dict[str, Any],
) -> None:  # fmt: skip
    """One of the grouped products in plain Triton, which writes down its tiles if there is a ``plan``."""
    pairs, experts, outputs, inputs = len(order), sizes["E"], target.shape[1], source.shape[1]
    tile = group_tile(
        pairs, experts, outputs, inputs, item=source.itemsize, paired=first and into["GATED"], fp4=bool(sizes["FP4"]),
        room=shared_limit(source.device),
    )  # fmt: skip
    assert plan is None or tile.rows == MANY_ROWS
    grouped_kernel[(cdiv(outputs, tile.block_n), tile_count(pairs, experts, tile.rows))](
        source, order, counts, weights, *matrix, target, plan, source.stride(0), *numbers, tile.group,
        LANES=next_power_of_2(experts), OUT=outputs, K=inputs, ROWS=tile.rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        FIRST=first, TOGETHER=tile.together, num_warps=tile.num_warps, num_stages=tile.num_stages, **sizes, **into, **early,
    )  # fmt: skip
