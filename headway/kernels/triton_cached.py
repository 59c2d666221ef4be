"""What kernels in Gluon store in the KV cache; ``rope_kv_write``'s in Triton has the same."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def as_cached(x, dtype: gl.constexpr):
    """``x`` in a cache's dtype; 8-bit floats end at their largest value, NaN stays."""
    if dtype == gl.float8e4nv:
        x = x.to(gl.float32)
        x = gl.where(x > 448.0, 448.0, gl.where(x < -448.0, -448.0, x))
    return x.to(dtype)
