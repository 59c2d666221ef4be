"""``cross_kv_write``: keys and values of encoder outputs go to their places in the paged cache.

cross_kv_write(kv, places, k_cache, v_cache) -> ()

    kv       float [N, 2 * KH * D], last dimension contiguous: keys, then values, of each encoder output
    places   int32 [N], block * block_size + offset; an output whose place is not in [0, NB * bs) is written nowhere
    k_cache, v_cache  [NB, bs, KH, D] in kv's dtype or float8_e4m3fn, equal strides, head dimensions contiguous
"""

from __future__ import annotations

from headway.kernels.cross_kv_write.reference import cross_kv_write as _reference
from headway.kernels.registry import Op

cross_kv_write = Op(
    "cross_kv_write(Tensor kv, Tensor places, Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()",
    reference=_reference,
    triton="headway.kernels.cross_kv_write.triton:cross_kv_write",
)
