"""What Triton kernels share that convolve a short row's tokens one after the other, with the window's past in registers."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hold_past(ring_at, start, channels, mask, LENGTH: tl.constexpr, TAPS: tl.constexpr):
    """The inputs before position ``start``, the last one first; a tuple."""
    past = ()
    for back in tl.static_range(1, TAPS):
        at = ring_at + (start - back + LENGTH) % LENGTH * channels
        past = past + (tl.load(at, mask=mask & (start >= back), other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return past


@triton.jit
def moved_on(new, past, TAPS: tl.constexpr):
    """``past`` of the token behind the one that brings ``new``."""
    moved = ()
    if TAPS > 1:
        moved = (new,)  # type: ignore[assignment]
    for back in tl.static_range(1, TAPS - 1):
        moved = moved + (past[back - 1],)  # type: ignore[assignment]  # noqa: RUF005
    return moved


@triton.jit
def convolved(new, past, taps, bias, TAPS: tl.constexpr):
    """f32, as ``causal_conv`` rounds it; ``taps``: weights of the token itself, of the one before it, and so on."""
    total = new.to(tl.float32) * taps[0].to(tl.float32)
    for back in tl.static_range(1, TAPS):
        total += past[back - 1].to(tl.float32) * taps[back].to(tl.float32)
    total += bias
    total = total / (1.0 + tl.exp(-total))
    return total.to(new.dtype).to(tl.float32)
