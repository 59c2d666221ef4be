"""``expert_mlp`` for few pairs of a token and an expert in MXFP4: ``triton_few``'s kernels on tensor cores."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.expert_mlp.hopper.triton_words import REST, across, multiply, sums_layout
from headway.kernels.expert_mlp.triton_parts import activated


@gluon.jit
def of_one(sums):
    """f32 [16]: the first column of the parts' sums [PARTS, 16, 8]."""
    whole = gl.sum(sums, axis=0) * REST
    column = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, whole.type.layout)), 0)
    return gl.sum(gl.where(column == 0, whole, 0.0), axis=1)


@gluon.jit
def few_in_words_kernel(
    x_ptr,  # [T, K]
    ids_ptr,  # [T * TOP_K]
    weight_ptr,  # [E, N, K / 2]
    scales_ptr,  # [E, N, K / 32]
    bias_ptr,  # [E, N] or null
    out_ptr,  # [T * TOP_K, INNER]
    x_stride,
    limit,
    alpha,
    E: gl.constexpr,
    INNER: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    PARTS: gl.constexpr,
    UNROLL: gl.constexpr,
    ACT: gl.constexpr,
    GATED: gl.constexpr,
    EARLY: gl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    pair = gl.program_id(0)
    first = gl.program_id(1) * 16
    if EARLY:
        gdc_wait()
    expert = gl.load(ids_ptr + pair)
    if (expert < 0) | (expert >= E):
        return
    S: gl.constexpr = sums_layout(PARTS)
    L: gl.constexpr = gl.DotOperandLayout(1, S, 8)
    N: gl.constexpr = 2 * INNER if GATED else INNER
    # All eight columns are the one token: a load of one address costs no more than one that is masked.
    x_at = x_ptr + (pair // TOP_K).to(gl.int64) * x_stride + across(8, 2, L) * 0
    row = expert.to(gl.int64) * N + first
    matrix = (weight_ptr, scales_ptr, row, row + INNER)
    acc = gl.zeros([PARTS, 16, 8], gl.float32, layout=S)
    gate, up = multiply(acc, acc, matrix, x_at, across(8, 2, L) < 8, K, PARTS, UNROLL, L, GATED, False)
    V: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, S))
    n = first + gl.arange(0, 16, layout=V)
    y = of_one(gate)
    z = y
    if GATED:
        z = of_one(up)
    if bias_ptr is not None:
        bias_at = bias_ptr + expert.to(gl.int64) * N + n
        y += gl.load(bias_at).to(gl.float32)
        if GATED:
            z += gl.load(bias_at + INNER).to(gl.float32)
    y = activated(y, z, limit, alpha, ACT, GATED)
    gl.store(out_ptr + pair.to(gl.int64) * INNER + n, y.to(out_ptr.dtype.element_ty))


@gluon.jit
def few_out_words_kernel(
    inner_ptr,  # [T * TOP_K, K]
    ids_ptr,
    weights_ptr,
    weight_ptr,  # [E, N, K / 2]
    scales_ptr,  # [E, N, K / 32]
    bias_ptr,  # [E, N] or null
    out_ptr,  # [T, N]
    E: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    COLS: gl.constexpr,
    PARTS: gl.constexpr,
    UNROLL: gl.constexpr,
    ADD: gl.constexpr,  # to what out_ptr holds
    EARLY: gl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    token = gl.program_id(0)
    first = gl.program_id(1) * 16
    S: gl.constexpr = sums_layout(PARTS)
    L: gl.constexpr = gl.DotOperandLayout(1, S, 8)
    column = across(COLS, 2, L)
    acc = gl.zeros([PARTS, 16, COLS], gl.float32, layout=S)
    if EARLY:
        gdc_wait()
    for k in gl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = gl.load(ids_ptr + pair)
        if (expert >= 0) & (expert < E):  # what no kernel wrote, for want of an expert, is not read
            x_at = inner_ptr + pair.to(gl.int64) * K + column * 0
            row = expert.to(gl.int64) * N + first
            # An expert's sums are a column of their own.
            matrix = (weight_ptr, scales_ptr, row, row)
            acc, _ = multiply(acc, acc, matrix, x_at, column == k, K, PARTS, UNROLL, L, False, True)
    R: gl.constexpr = gl.BlockedLayout([1, COLS], [32, 1], [PARTS, 1], [1, 0])
    y = gl.convert_layout(gl.sum(acc, axis=0), R) * REST
    n = first + gl.arange(0, 16, layout=gl.SliceLayout(1, R))
    k = gl.arange(0, COLS, layout=gl.SliceLayout(0, R))
    pair = token * TOP_K + k
    expert = gl.load(ids_ptr + pair, mask=k < TOP_K, other=-1)
    there = gl.expand_dims((expert >= 0) & (expert < E), 0)
    if bias_ptr is not None:
        at = bias_ptr + gl.expand_dims(expert.to(gl.int64) * N, 0) + gl.expand_dims(n, 1)
        y += gl.load(at, mask=there, other=0.0).to(gl.float32)
    y *= gl.expand_dims(gl.load(weights_ptr + pair, mask=k < TOP_K, other=0.0), 0)
    y = gl.where(there, y, 0.0)
    total = gl.zeros([16], gl.float32, layout=gl.SliceLayout(1, R))
    for nth in gl.static_range(TOP_K):
        total += gl.sum(gl.where(gl.expand_dims(k, 0) == nth, y, 0.0), axis=1)
    at = out_ptr + token.to(gl.int64) * N + n
    z = total.to(out_ptr.dtype.element_ty)
    if ADD:
        z = (z.to(gl.float32) + gl.load(at).to(gl.float32)).to(out_ptr.dtype.element_ty)
    gl.store(at, z)
