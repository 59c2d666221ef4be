"""A product of many tokens with its bias and GELU in the epilogue, in Gluon: a candidate for ``kernels/wide_linear``.

``bench/ops/texts.py`` measures it beside cuBLAS and a kernel behind it. Its warps and tiles are those of ``wide_linear``: the
warps that multiply activate, too, as those that finish are too few.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headway.core.ints import cdiv
from headway.kernels.paged_attention.tiles import num_sms
from headway.kernels.triton_early import launch_early
from headway.kernels.wide_linear.hopper.launch import _activations, weight_descriptor
from headway.kernels.wide_linear.hopper.triton import BLOCK_M, ROWS, SHARE, run_tiles
from headway.kernels.wide_linear.tiles import GROUP, STAGES, WIDE


@gluon.jit
def gelu(x):
    """x * Phi(x) as x / (1 + 2^(x q(x^2))): no difference of near numbers, so small results keep their digits.

    q is fitted to log2((1 - Phi(x)) / Phi(x)) / x up to 5: off by a third of bfloat16's last place at most, from -5 on by 2e-9.
    """
    s = x * x
    q = s * -1.3032075e-05 + 0.0014235622
    q = q * s - 0.10939683
    q = q * s - 2.2976465
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(x * q)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def bias_gelu(y, n, arguments, KIND: gl.constexpr):
    """GELU of the product and its bias, while it lies in registers."""
    _, bias_ptr, _ = arguments
    N: gl.constexpr = KIND[0]
    GELU: gl.constexpr = KIND[1]
    COLUMNS: gl.constexpr = y.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    column = n * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, ACC))
    bias = gl.load(bias_ptr + column, mask=column < N, other=0.0)
    x = y + gl.expand_dims(bias.to(gl.float32), 0)
    if GELU:
        x = gelu(x)
    return x


@gluon.jit
def finish_copies(m, n, first_half, last_half, phase, sums, bars, arguments, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Store halves of a tile."""
    _, _, done, taken = bars
    out_ptr, _, num_tokens = arguments
    N: gl.constexpr = KIND[0]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    PASS: gl.constexpr = SHARE * WARPS
    COLUMNS: gl.constexpr = sums.shape[2]
    col = n * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPY))
    for half in range(first_half, last_half):
        row = m * BLOCK_M + half * ROWS + gl.arange(0, PASS, layout=gl.SliceLayout(1, COPY))
        mbarrier.wait(done.index(half), phase)
        for part in gl.static_range(ROWS // PASS):
            now = row + part * PASS
            keep = gl.expand_dims(now < num_tokens, 1) & gl.expand_dims(col < N, 0)
            to = out_ptr + gl.expand_dims(now * N, 1) + gl.expand_dims(col, 0)
            gl.store(to, sums.index(half).slice(part * PASS, PASS).load(COPY), mask=keep)
        gl.thread_barrier()
        mbarrier.arrive(taken.index(half))


@gluon.jit(do_not_specialize=["num_tokens", "tiles_m"])
def gelu_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [1, N, K]
    bias_ptr,  # [N]
    out_ptr,  # [T, N]
    num_tokens,
    tiles_m,
    N: gl.constexpr,
    GELU: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: persistent programs; 4 warps, which are one of the two warpgroups that multiply."""
    arguments = (out_ptr, bias_ptr, num_tokens)
    KIND: gl.constexpr = (N, GELU)
    WIDE: gl.constexpr = weight_desc.block_shape[1]
    tiles_n = (N + WIDE - 1) // WIDE
    run_tiles(x_desc, weight_desc, tiles_m, tiles_n, bias_gelu, finish_copies, arguments, KIND, K, STAGES, GROUP, EARLY)


def wide_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gelu: bool = True, wide: int = WIDE, group: int = GROUP
) -> torch.Tensor:
    """GELU(x W^T + b), or without GELU: x [T, K], weight [N, K], bias [N] -> [T, N]."""
    rows, outputs = x.shape[0], weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tiles_m, tiles_n = cdiv(rows, BLOCK_M), cdiv(outputs, wide)
    gelu_kernel[(min(num_sms(x.device), tiles_m * tiles_n),)](
        _activations(x), weight_descriptor(weight, 1, wide), bias, out, rows, tiles_m, N=outputs, GELU=gelu,
        K=x.shape[1], STAGES=STAGES[wide], GROUP=group, num_warps=4, **launch_early(x.device),
    )  # fmt: skip
    return out
