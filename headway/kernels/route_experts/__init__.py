"""Routing of a mixture of experts: which experts a token goes to, and what their results weigh.

route_experts(x, router, bias, correction, live, top_k, scoring, renormalise, scale, groups, kept_groups, group_best,
              margin, always) -> ids, weights
    x           [T, C] activations; the last dimension is contiguous
    router      [E, C] in x's dtype          bias  [E] in x's dtype, or None
    correction  f32 [E]: added to scores where experts are chosen, not where they are weighed; None: nothing
    live        int32 [T]: >= 0 for tokens of rows that live, negative on padding and zombie rows
    scoring     "softmax" of the logits over all experts, or "sigmoid" of each; or "sparsemixer" (Liu et al. 2024,
                arXiv:2409.12136): an expert's score is a softmax over those that rank behind it, or equal, and whose logits l
                are near its own m: m - l <= margin * max(|l|, m). It knows no correction and no groups
    groups      experts lie in so many groups, one behind the other, of which ``kept_groups`` may be chosen from: those whose
                ``group_best`` highest scores, corrected, have the highest sum; 1: any expert may be chosen
    always      so many experts behind the router's, from E on, that every live token goes to besides, with the weight 1
    ids         int32 [T, top_k + always], falling by corrected score, then from E on; -1 for tokens that are not live
    weights     f32 [T, top_k + always]: the scores, with ``renormalise`` divided by their sum + 1e-20, times scale; 0 where ids
                is -1

norm_route_experts(x, norm, eps, router, ...) -> ids, weights, normed
    normed      [T, C], rms_norm(x, norm, eps); the rest is route_experts(normed, router, ...)
    norm        [C] in x's dtype

Experts are ranked by score, corrected; where there is neither a correction nor a group by logit, which is the same but where
scores are rounded to one. Of equal ones the lower number is chosen first, and so of groups. NaN ranks behind all numbers;
whatever comes, ids are distinct numbers in [0, E + always). Products and scores are in f32, whatever x is: rounded logits would
tie. Softmax over the chosen experts alone is "softmax" with ``renormalise``.
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op
from headway.kernels.route_experts import reference

FEW_TOKENS = 4
"""Tokens up to which a program of the router's product has whole inputs of one of them, so that it can norm them itself."""


def _meta(
    x: torch.Tensor, router: torch.Tensor, bias: object, correction: object, live: object, top_k: int, *others: object
) -> tuple[torch.Tensor, torch.Tensor]:
    always = others[-1]
    assert isinstance(always, int)
    shape = x.shape[0], top_k + always
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


def _norm_meta(x: torch.Tensor, norm: object, eps: object, *others: object) -> tuple[torch.Tensor, ...]:
    router, *rest = others
    assert isinstance(router, torch.Tensor)
    return *_meta(x, router, *rest), torch.empty_like(x)  # type: ignore[arg-type]


_RULE = (
    "Tensor router, Tensor? bias, Tensor? correction, Tensor live, int top_k, str scoring, bool renormalise, float scale, "
    "int groups, int kept_groups, int group_best, float margin, int always"
)
route_experts = Op(
    f"route_experts(Tensor x, {_RULE}) -> (Tensor, Tensor)",
    reference=reference.route_experts,
    meta=_meta,
    triton="headway.kernels.route_experts.triton:route_experts",
)
norm_route_experts = Op(
    f"norm_route_experts(Tensor x, Tensor norm, float eps, {_RULE}) -> (Tensor, Tensor, Tensor)",
    reference=reference.norm_route_experts,
    meta=_norm_meta,
    triton="headway.kernels.route_experts.triton:norm_route_experts",
)
