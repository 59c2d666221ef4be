"""What the kernels of ``expert_mlp`` share: activations, and weights in MXFP4."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def activated(gate, up, limit, alpha, ACT: tl.constexpr, GATED: tl.constexpr):
    """f32: what stands between the products; ``up`` counts where GATED."""
    if ACT == "clamped_swiglu":
        gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
        return gate * sigmoid(alpha * gate) * (up + 1.0)
    if ACT == "silu":
        y = gate * sigmoid(gate)
    elif ACT == "gelu_tanh":
        y = gate * sigmoid(
            1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        )  # 0.5 (1 + tanh u) = sigmoid(2 u)
    elif ACT == "gelu":
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        y = tl.maximum(gate, 0.0)
        if ACT == "relu2":
            y = y * y
    if GATED:
        y = y * up
    return y


@triton.jit
def load_weight(at, col, keep, K: tl.constexpr, BLOCK: tl.constexpr):
    """A pass over rows of a weight; nothing is masked in K where passes divide it."""
    if K % BLOCK:
        return tl.load(at + col, mask=keep & (col < K), other=0)
    else:
        return tl.load(at + col, mask=keep, other=0)


@triton.jit
def as_words(ptr):
    """``ptr`` to the 16-bit words of ``packing``."""
    return ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def first_of_word(col):
    """Where the first weight of a row's word lies in the row; the other three follow 16 apart."""
    return col // 16 * 64 + col % 16


@triton.jit
def load_scales(at, first, SIDE: tl.constexpr, keep, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    """f32 [rows, WIDTH]: 2^(scale - 127) of one block of each pair from the ``first``-th on; 0 from PAIRS on."""
    col = first + tl.arange(0, WIDTH)[None, :]
    scale = tl.load(at + 2 * col + SIDE, mask=keep & (col < PAIRS), other=0).to(tl.uint32)
    bits = tl.where(scale == 0, 1 << 22, scale << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def unpacked(words, scales, NTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """f32 [ROWS, BLOCK]: the NTH weights of words [ROWS, BLOCK], times scales [ROWS, BLOCK / 16].

    Their exponent and fraction are those of an f32 once they lie at its place: small ones are subnormal there as they are
    here, and a power of two brings them back.
    """
    wide = words.to(tl.uint16, bitcast=True).to(tl.uint32)
    if NTH < 3:
        wide = wide << (3 * NTH)
        bits = ((wide & 0x8000) << 16) | ((wide & 0x01C0) << 16)
    else:
        bits = ((wide & 0x4000) << 17) | ((wide & 0x2000) << 11) | ((wide & 0x0C00) << 12)
    values = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    values = tl.reshape(values, [ROWS, BLOCK // 16, 16]) * scales[:, :, None]
    return tl.reshape(values, [ROWS, BLOCK])
