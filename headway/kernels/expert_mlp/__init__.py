"""The experts of a mixture: for each token a feed-forward block of each expert it goes to, and their weighted sum.

expert_mlp(x, ids, weights, gate_up, gate_up_bias, gate_up_scales, down, down_bias, down_scales, act, gated, limit, alpha,
           weigh_inputs) -> y
    x        [T, C] activations (bf16, f16, f32), contiguous
    ids      int32 [T, K]: experts of each token; a number outside [0, E) is no expert     weights  f32 [T, K]
    gate_up  [E, N, C] in x's dtype, N = 2 I (gates, then ups) where ``gated``, else I      gate_up_bias  [E, N] or None
    down     [E, C, I]                                                                      down_bias     [E, C] or None
    gate_up_scales, down_scales   None; or uint8 [E, N, C / 32] and [E, C, I / 32]: the matrices are in MXFP4 then (OCP
             microscaling formats), uint8 [E, N, C / 2] and [E, C, I / 2], 4-bit floats e2m1 as ``packing`` lays them out, times
             2^(scale - 127) of their block of 32. C and I are multiples of 64. Scales are at most 160; below 27, which is
             2^-100, weights may lose bits or count as 0
    act      silu, gelu_tanh, gelu, relu, relu2: act(gate) * up, or act(up) where not gated; or clamped_swiglu, which is gated:
             with gate at most limit and up within +-limit, gate * sigmoid(alpha gate) * (up + 1)
    y        [T, C] in x's dtype: the sum over k, in this order and in f32, of
             weights[t, k] * (down act(gate_up x + bias) + bias); with ``weigh_inputs`` the weight is that of x instead, which
             is rounded to x's dtype, and results are summed as they are. 0 where a token has no expert. What
             is between the products is rounded to x's dtype, and what an expert gives may be

add_experts(x, ids, ..., weigh_inputs, residual) -> (): residual [T, C] in x's dtype += expert_mlp(x, ids, ..., weigh_inputs)

Weights lie expert by expert, so a rank that owns experts [a, b) holds that slice of each tensor and calls the op with ids - a:
numbers outside are no experts of its own, and the ranks' sums add up.

Nothing here depends on how many tokens go where: grids are sized by T, K and E alone, see ``tiles``.
"""

from __future__ import annotations

from headway.kernels.expert_mlp import reference
from headway.kernels.registry import Op, like_first

ACTS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swiglu")
"""What ``act`` may be."""

_GIVEN = (
    "Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, Tensor? gate_up_scales, Tensor down, "
    "Tensor? down_bias, Tensor? down_scales, str act, bool gated, float limit, float alpha, bool weigh_inputs"
)
expert_mlp = Op(
    f"expert_mlp({_GIVEN}) -> Tensor",
    reference=reference.expert_mlp,
    meta=like_first,
    triton="headway.kernels.expert_mlp.triton:expert_mlp",
    cpu="headway.kernels.expert_mlp.cpu:expert_mlp",
)
add_experts = Op(
    f"add_experts({_GIVEN}, Tensor(a!) residual) -> ()",
    reference=reference.add_experts,
    triton="headway.kernels.expert_mlp.triton:add_experts",
)
