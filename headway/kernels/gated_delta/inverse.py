"""The inverse of a small triangular matrix, which both kernels of long rows need."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_of(power, L: tl.constexpr, LEVELS: tl.constexpr):
    """Of I + A [L, L], A = ``power`` being strictly lower triangular."""
    i = tl.arange(0, L)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - power
    for _ in tl.static_range(LEVELS - 1):
        power = tl.dot(power, power, input_precision="ieee")
        inverse += tl.dot(inverse, power, input_precision="ieee")
    return inverse
