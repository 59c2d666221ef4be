"""Small device functions that several kernels share: order-preserving integer keys of floats, and queries beside 8-bit keys."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def comparable(x):
    """f32 logits that ``order_key`` takes: NaN is -inf, -0.0 is 0.0."""
    x = x.to(tl.float32) + 0.0
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def load_logits(ptr, mask):
    """``comparable`` f32 logits; masked-off lanes are -inf."""
    return comparable(tl.load(ptr, mask=mask, other=float("-inf")))


@triton.jit
def order_key(x):
    """int32 key of f32: key(a) < key(b) if and only if a < b (no NaN, no -0.0)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_key(key):
    """The f32 whose ``order_key`` is ``key``."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_below(x, top):
    """exp(x - top) for x <= top, also when both are +inf."""
    return tl.where(x == top, 1.0, tl.exp(x - top))


@triton.jit
def load_queries(at, keep, dtype: tl.constexpr):
    """Queries as factors of products with keys of ``dtype``: 8-bit floats are read as f16, which holds them all."""
    q = tl.load(at, mask=keep, other=0.0)
    if (dtype == tl.float8e4nv) & (q.dtype == tl.bfloat16):
        wide = q.to(tl.float32)
        return tl.where(wide > 65504.0, 65504.0, tl.where(wide < -65504.0, -65504.0, wide)).to(tl.float16)
    else:
        return q


@triton.jit
def widened(x, dtype: tl.constexpr):
    """``x`` as ``dtype``; 8-bit floats by way of f32, because cards before Hopper have no other way from them to bf16."""
    if x.dtype == tl.float8e4nv:
        return x.to(tl.float32).to(dtype)
    else:
        return x.to(dtype)
