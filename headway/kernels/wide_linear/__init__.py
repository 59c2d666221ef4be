"""The products of a layer for many tokens on Hopper, with what follows them in the epilogue.

At these sizes a product is limited by the matrix units, and the kernels behind it by memory: what it writes they read again.
Here that never leaves the SM.

    x         [T, K] activations (bf16, f16), rows contiguous and beginning at multiples of 16 bytes, K a multiple of 64
    weight    [N, K] contiguous, x's dtype

wide_gate_up(x, weight, act) -> y [T, N / 2]    act(gate) * up of x W^T, act one of ``GATES``, weight = (gate rows, up rows),
                                            N / 2 a multiple of 8
wide_add(x, weight, residual, factor=1)     residual [T, N] += factor * x W^T in place, residual contiguous, N a multiple of 8
wide_qkv(x, weight, positions, cos_sin, q_norm, k_norm, eps, kv_slots, k_cache, v_cache, num_heads) -> q [T, H, D]
                                            rope_kv_write(x W^T, positions, ...), which see; D = Drot = 128, H and KH are
                                            even, both norms or none
wide_gelu(x, weight, bias, tanh) -> y [T, N]  GELU(x W^T + bias), bias [N] contiguous, all bf16; ``tanh`` as in ``gelu_mul``

Rounding is that of the separate ops: what an epilogue takes is a product in x's dtype, with its bias if there is one. Sums are
in float32, in an order that depends on K alone: a token's result has the same bits whatever the other tokens are.
"""

from __future__ import annotations

from headway.kernels.registry import Op
from headway.kernels.wide_linear import reference

wide_gate_up = Op(
    "wide_gate_up(Tensor x, Tensor weight, str act='silu') -> Tensor",
    reference=reference.wide_gate_up,
    meta=lambda x, weight, act="silu": x.new_empty(x.shape[0], weight.shape[0] // 2),
    triton="headway.kernels.wide_linear.hopper.launch:wide_gate_up",
)
wide_qkv = Op(
    "wide_qkv(Tensor x, Tensor weight, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, float eps, "
    "Tensor kv_slots, Tensor(a!) k_cache, Tensor(b!) v_cache, int num_heads) -> Tensor",
    reference=reference.wide_qkv,
    meta=lambda x, *others: x.new_empty(x.shape[0], others[-1], others[-3].shape[3]),  # heads, and those of k_cache
    triton="headway.kernels.wide_linear.hopper.launch:wide_qkv",
)
wide_add = Op(
    "wide_add(Tensor x, Tensor weight, Tensor(a!) residual, float factor=1.0) -> ()",
    reference=reference.wide_add,
    triton="headway.kernels.wide_linear.hopper.launch:wide_add",
)
wide_gelu = Op(
    "wide_gelu(Tensor x, Tensor weight, Tensor bias, bool tanh) -> Tensor",
    reference=reference.wide_gelu,
    meta=lambda x, weight, bias, tanh: x.new_empty(x.shape[0], weight.shape[0]),
    triton="headway.kernels.wide_linear.hopper.launch:wide_gelu",
)
