"""Triton kernel of ``head_linear``: one program per block of tokens, head and block of outputs. It loads its first weights
before it waits for the kernel before it, and ends at once if no token of its block is of a short row."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import num_sms
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

FEW, MANY = 16, 64
"""Tokens of a program, where there are few and where there are more."""
ROW_SEARCH = tl.constexpr(128)
"""Rows that a program looks at together."""


@triton.jit
def row_spans(token, query_start_ptr, num_rows):
    """(first token, end) of the row of each token; the end is 2 ** 30 for tokens of no row."""
    begin = token * 0
    end = token * 0 + 1073741824
    for start in range(0, num_rows + 1, ROW_SEARCH):
        i = start + tl.arange(0, ROW_SEARCH)
        edge = tl.load(query_start_ptr + i, mask=i <= num_rows, other=-1)[None, :]
        behind = (edge <= token[:, None]) | (edge < 0)
        begin = tl.maximum(begin, tl.max(tl.where(behind, edge, 0), axis=1))
        end = tl.minimum(end, tl.min(tl.where(behind, 1073741824, edge), axis=1))
    return begin, end


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "most_queries"],
    do_not_specialize_on_alignment=["query_start_ptr"],
)
def head_linear_kernel(
    x_ptr,  # [T, H, K]
    w_ptr,  # [H, K, N]
    out_ptr,  # [T, H, N]
    query_start_ptr,  # [R + 1]
    num_tokens,
    num_rows,
    most_queries,
    x_token,
    x_head,
    x_dim,
    w_head,
    w_in,
    w_out,
    out_token,
    out_head,
    out_dim,
    K: tl.constexpr,
    N: tl.constexpr,
    ALL: tl.constexpr,  # rows of any number of tokens
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = n < N
    w_at = w_ptr + head * w_head + k[:, None] * w_in + n[None, :] * w_out
    w = tl.load(w_at, mask=(k < K)[:, None] & in_n[None, :], other=0.0)
    last = tl.load(query_start_ptr + num_rows)
    owned = token < last
    mine = token < num_tokens
    if not ALL:
        begin, end = row_spans(token, query_start_ptr, num_rows)
        mine = mine & ((end - begin <= most_queries) | (token >= last))
    wait_for_inputs(EARLY)
    if tl.sum(mine.to(tl.int32), axis=0) == 0:
        return
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_token + head * x_head + k[None, :] * x_dim
    used = mine & owned
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if start > 0:
            w = tl.load(w_at + start * w_in, mask=(start + k < K)[:, None] & in_n[None, :], other=0.0)
        x = tl.load(x_at + start * x_dim, mask=used[:, None] & (start + k < K)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    out_at = out_ptr + token.to(tl.int64)[:, None] * out_token + head * out_head + n[None, :] * out_dim
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mine[:, None] & in_n[None, :])


def head_linear(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, query_start: torch.Tensor, most_queries: int
) -> None:
    num_tokens, heads, inputs = x.shape
    outputs = w.shape[2]
    block_t = FEW if num_tokens <= FEW else MANY
    block_n = min(128 if block_t == MANY else 64, max(16, next_power_of_2(outputs)))
    # Products of few tokens are bound by how many programs load weights.
    while block_n > 16 and cdiv(num_tokens, block_t) * heads * cdiv(outputs, block_n) < num_sms(x.device):
        block_n //= 2
    # Of few tokens a program has all its weights before it waits, where registers have room for them.
    block_k = min(max(128, 8192 // block_n) if block_t == FEW else 64, max(16, next_power_of_2(inputs)))
    head_linear_kernel[(cdiv(num_tokens, block_t), heads, cdiv(outputs, block_n))](
        x, w, out, query_start, num_tokens, query_start.shape[0] - 1, most_queries,
        *x.stride(), *w.stride(), *out.stride(), K=inputs, N=outputs, ALL=most_queries >= num_tokens,
        BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3, **launch_early(x.device),
    )  # fmt: skip
