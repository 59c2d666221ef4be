"""Triton kernels of ``route_experts``: the router's product, then one program for each token's choice.

Of one token or a few a program has some experts' whole rows, which it loads before it waits for the token, and norms that by
itself. Of some more the product is cut along C, so that its bytes come from many processors at once; the choice adds the
parts, in order. A choice is ``top_k`` times the largest of what is left, at the lowest place of equal ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.rms_norm.triton import rms_norm
from headway.kernels.route_experts import FEW_TOKENS
from headway.kernels.skinny_linear.triton import normed
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

WIDEST = 16384
"""Inputs that such a program may have."""
LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-3.0e38)  # scores are kept above
NO_SCORE = tl.constexpr(-3.2e38)  # of NaN
NO_GROUP = tl.constexpr(-3.3e38)  # of groups that are not kept


@triton.jit
def router_few_kernel(
    x_ptr,  # [T, C]
    norm_ptr,  # [C] or null
    router_ptr,  # [E, C]
    logits_ptr,  # f32 [T, E]
    normed_ptr,  # [T, C] or null
    x_stride,
    eps,
    C: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,  # C, or the power of two above
    BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    token = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, WIDTH)
    keep = col < C
    weight = tl.load(
        router_ptr + expert[:, None] * C + col[None, :], mask=(expert < E)[:, None] & keep[None, :], other=0.0
    )
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + col, mask=keep, other=0.0)
    wait_for_inputs(EARLY)
    x = tl.load(x_ptr + token * x_stride + col, mask=keep, other=0.0)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        x = normed(x, tl.rsqrt(tl.sum(wide * wide, axis=0) / C + eps), norm)
        tl.store(normed_ptr + token * C + col, x, mask=keep & (tl.program_id(0) == 0))
    logits = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + token * E + expert, logits, mask=expert < E)


@triton.jit(do_not_specialize=["num_tokens"])
def router_kernel(
    x_ptr,  # [T, C]
    router_ptr,  # [E, C]
    parts_ptr,  # f32 [SPLITS, T, E]
    x_stride,
    num_tokens,
    C: tl.constexpr,
    E: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    split = tl.program_id(2)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    lane = tl.arange(0, BLOCK_C)
    keep_token, keep_expert = (token < num_tokens)[:, None], (expert < E)[:, None]
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_stride
    router_at = router_ptr + expert[:, None] * C
    per_split: tl.constexpr = (C + SPLITS * BLOCK_C - 1) // (SPLITS * BLOCK_C) * BLOCK_C
    first = split * per_split
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    wait_for_inputs(EARLY)
    for start in range(0, per_split, BLOCK_C):
        col = (first + start + lane)[None, :]
        x = tl.load(x_at + col, mask=keep_token & (col < C), other=0.0)
        weight = tl.load(router_at + col, mask=keep_expert & (col < C), other=0.0)
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    at = (split.to(tl.int64) * num_tokens + token)[:, None] * E + expert[None, :]
    tl.store(parts_ptr + at, acc, mask=keep_token & (expert < E)[None, :])


@triton.jit
def ordered(x):
    """int32 that are ordered as the floats x, of which none is NaN. A warp has one instruction for the largest of its integers,
    and five shuffles for that of its floats."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_tokens"])
def choose_kernel(
    parts_ptr,  # f32 [SPLITS, T, E]
    bias_ptr,  # [E] or null
    correction_ptr,  # f32 [E] or null
    live_ptr,  # [T]
    ids_ptr,  # [T, TOP_K + ALWAYS]
    weights_ptr,  # f32 [T, TOP_K + ALWAYS]
    num_tokens,
    scale,
    margin,
    E: tl.constexpr,
    WIDTH: tl.constexpr,  # lanes of a group, a power of two
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,  # groups, a power of two
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    ALWAYS: tl.constexpr,
    PLACES: tl.constexpr,  # top_k and always, a power of two
    SPLITS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEAR: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    token = tl.program_id(0)
    size: tl.constexpr = E // GROUPS
    lane = tl.arange(0, LANES * WIDTH)
    group, inside = lane // WIDTH, lane % WIDTH
    real = (group < GROUPS) & (inside < size)
    expert = group * size + inside
    extra = tl.zeros([LANES * WIDTH], tl.float32)
    if bias_ptr is not None:
        extra = tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    live = tl.load(live_ptr + token) >= 0
    logit = tl.zeros([LANES * WIDTH], tl.float32)
    for split in tl.static_range(SPLITS):
        at = (tl.full([], split, tl.int64) * num_tokens + token) * E
        logit += tl.load(parts_ptr + at + expert, mask=real, other=0.0)
    logit += extra
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp2(-logit * LOG2E))
    else:
        largest = tl.max(tl.where(real, logit, float("-inf")), axis=0)
        score = tl.where(real, tl.exp2((logit - largest) * LOG2E), 0.0)
        score = score / tl.sum(score, axis=0)
    ranked = logit
    if correction_ptr is not None:
        ranked = score + tl.load(correction_ptr + expert, mask=real, other=0.0)
    elif GROUPS > 1:
        ranked = score
    ranked = tl.where(ranked == ranked, tl.maximum(tl.minimum(ranked, -LOWEST), LOWEST), NO_SCORE)
    ranked = tl.where(real, ranked, float("-inf"))
    if GROUPS > 1:
        by_group = tl.reshape(ranked, [LANES, WIDTH])
        place = tl.arange(0, WIDTH)[None, :]
        number = tl.arange(0, LANES)
        best = tl.zeros([LANES], tl.float32)
        left = by_group
        for _ in tl.static_range(BEST):
            best += tl.max(left, axis=1)
            left = tl.where(place == tl.argmax(left, axis=1)[:, None], float("-inf"), left)
        best = tl.where(number < GROUPS, tl.where(best == best, best, NO_SCORE), float("-inf"))
        kept = tl.zeros([LANES], tl.int32)
        for _ in tl.static_range(KEPT):
            chosen = tl.argmax(best, axis=0)
            kept = tl.where(number == chosen, 1, kept)
            best = tl.where(number == chosen, float("-inf"), best)
        held = tl.broadcast_to(kept[:, None], [LANES, WIDTH])
        by_group = tl.where((held == 0) & (by_group > float("-inf")), NO_GROUP, by_group)
        ranked = tl.reshape(by_group, [LANES * WIDTH])
    place = tl.arange(0, PLACES)
    ids, weights = tl.full([PLACES], -1, tl.int32), tl.zeros([PLACES], tl.float32)
    for k in tl.static_range(TOP_K):
        keys = ordered(ranked)
        chosen = tl.min(tl.where(keys == tl.max(keys, axis=0), lane, LANES * WIDTH), axis=0)
        mine = lane == chosen
        ids = tl.where(place == k, chosen // WIDTH * size + chosen % WIDTH, ids)
        if NEAR:
            most = tl.max(ranked, axis=0)
            near = (ranked > float("-inf")) & (most - ranked <= margin * tl.maximum(tl.abs(ranked), most))
            score = 1.0 / tl.sum(tl.where(near, tl.exp2((ranked - most) * LOG2E), 0.0), axis=0) + tl.zeros_like(ranked)
        bits = tl.max(tl.where(mine, score.to(tl.int32, bitcast=True), LEAST), axis=0)
        weights = tl.where(place == k, bits.to(tl.float32, bitcast=True), weights)
        ranked = tl.where(mine, float("-inf"), ranked)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = tl.where(place < TOP_K, weights * scale, 1.0)
    ids = tl.where(place < TOP_K, ids, E + place - TOP_K)
    at = token.to(tl.int64) * (TOP_K + ALWAYS) + place
    tl.store(ids_ptr + at, tl.where(live, ids, -1), mask=place < TOP_K + ALWAYS)
    tl.store(weights_ptr + at, tl.where(live, weights, 0.0), mask=place < TOP_K + ALWAYS)


def route_experts(x: torch.Tensor, router: torch.Tensor, *rule: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``rule``: see ``choose``."""
    parts = few_logits(x, None, 0.0, router)[0] if is_few(x) else router_parts(x, router)
    return choose(parts, *rule)


def norm_route_experts(
    x: torch.Tensor, norm: torch.Tensor, eps: float, router: torch.Tensor, *rule: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``rule``: see ``choose``."""
    if is_few(x):
        parts, given = few_logits(x, norm, eps, router)
    else:
        given = rms_norm(x, norm, eps)
        parts = router_parts(given, router)
    return *choose(parts, *rule), given


def is_few(x: torch.Tensor) -> bool:
    """Whether programs have whole inputs."""
    return x.shape[0] <= FEW_TOKENS and x.shape[1] <= WIDEST


def few_logits(
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, router: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """f32 [1, T, E], and what they are of: [T, C], with ``norm`` x's norm."""
    (tokens, inputs), experts = x.shape, router.shape[0]
    logits = torch.empty((1, tokens, experts), dtype=torch.float32, device=x.device)
    given = x if norm is None else torch.empty((tokens, inputs), dtype=x.dtype, device=x.device)
    if tokens:
        width = next_power_of_2(inputs)
        block = 2 if width * x.element_size() <= 8192 else 1
        router_few_kernel[(cdiv(experts, block), tokens)](
            x, norm, router, logits, None if norm is None else given, x.stride(0), eps, C=inputs, E=experts, WIDTH=width,
            BLOCK_E=block, num_warps=4 if width <= 4096 else 8, **launch_early(x.device),
        )  # fmt: skip
    return logits, given


def router_parts(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """f32 [splits, T, E]: parts of the router's product."""
    tokens, (experts, inputs) = x.shape[0], router.shape
    few = tokens <= 64
    block_t, block_e, block_c = (16, 16, 256) if few else (64, 64, 64)
    if x.dtype == torch.float32:
        block_c = 64  # twice the bytes, and no tensor cores
    splits = min(4, cdiv(inputs, block_c)) if few else 1
    parts = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    router_kernel[(cdiv(tokens, block_t), cdiv(experts, block_e), splits)](
        x, router, parts, x.stride(0), tokens, C=inputs, E=experts, SPLITS=splits, BLOCK_T=block_t, BLOCK_E=block_e,
        BLOCK_C=block_c, num_warps=4, num_stages=3, **launch_early(x.device),
    )  # fmt: skip
    return parts


def choose(
    parts: torch.Tensor, bias: torch.Tensor | None, correction: torch.Tensor | None, live: torch.Tensor, top_k: int,
    scoring: str, renormalise: bool, scale: float, groups: int, kept_groups: int, group_best: int, margin: float, always: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """ids and weights, of logits in parts."""
    splits, tokens, experts = parts.shape
    ids = torch.empty((tokens, top_k + always), dtype=torch.int32, device=parts.device)
    weights = torch.empty((tokens, top_k + always), dtype=torch.float32, device=parts.device)
    if tokens:
        width = next_power_of_2(experts // groups)
        choose_kernel[(tokens,)](
            parts, bias, correction, live, ids, weights, tokens, scale, margin, E=experts, WIDTH=width, GROUPS=groups,
            LANES=next_power_of_2(groups), KEPT=kept_groups, BEST=group_best, TOP_K=top_k, ALWAYS=always,
            PLACES=next_power_of_2(top_k + always),
            SPLITS=splits, SIGMOID=scoring == "sigmoid", NEAR=scoring == "sparsemixer", RENORMALISE=renormalise, num_warps=1,
            **launch_early(parts.device),
        )  # fmt: skip
    return ids, weights
