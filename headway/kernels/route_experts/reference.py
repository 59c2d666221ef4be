"""What ``route_experts`` means, in torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from headway.kernels.rms_norm.reference import rms_norm


def route_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    live: torch.Tensor,
    top_k: int,
    scoring: str,
    renormalise: bool,
    scale: float,
    groups: int,
    kept_groups: int,
    group_best: int,
    margin: float,
    always: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.linear(x.float(), router.float(), None if bias is None else bias.float())
    scores = logits.softmax(1) if scoring == "softmax" else logits.sigmoid()
    ranked = scores if groups > 1 else logits
    if correction is not None:
        ranked = scores + correction
    ranked = ranked.masked_fill(ranked.isnan(), -torch.inf)
    if groups > 1:
        by_group = ranked.unflatten(1, (groups, -1))
        best = by_group.sort(2, descending=True).values[:, :, :group_best].sum(2)
        kept = first_places(best, kept_groups)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        # Far below what a corrected score can be, but above what no expert at all has.
        ranked = torch.where(allowed[:, :, None], by_group.clamp(min=-3e38), -torch.inf).flatten(1)
    ids = first_places(ranked, top_k)
    weights = near_weights(ranked, ids, margin) if scoring == "sparsemixer" else scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    more = torch.arange(len(router), len(router) + always, device=ids.device).expand(len(ids), -1)
    ids = torch.cat((ids, more), dim=1)
    weights = torch.cat((weights * scale, torch.ones_like(more, dtype=weights.dtype)), dim=1)
    dead = (live < 0)[:, None]
    return ids.int().masked_fill(dead, -1), weights.masked_fill(dead, 0.0)


def norm_route_experts(
    x: torch.Tensor, norm: torch.Tensor, eps: float, *rule: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the package; ``rule``: the router and all that follows."""
    normed = rms_norm(x, norm, eps)
    return *route_experts(normed, *rule), normed


def near_weights(logits: torch.Tensor, ids: torch.Tensor, margin: float) -> torch.Tensor:
    """f32 [T, K] of "sparsemixer", for ids [T, K] of logits [T, E], falling."""
    weights, left = [], logits
    for chosen in ids.split(1, dim=1):
        largest = logits.gather(1, chosen)
        far = (largest - left) > margin * torch.maximum(left.abs(), largest)
        weights.append(1.0 / (left - largest).exp().masked_fill(far | (left == -torch.inf), 0.0).sum(1))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.stack(weights, dim=1)


def first_places(ranked: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [T, count]: of each row of ranked [T, N] where the largest are, falling; of equal ones the first comes first."""
    return ranked.sort(dim=1, descending=True, stable=True).indices[:, :count]
