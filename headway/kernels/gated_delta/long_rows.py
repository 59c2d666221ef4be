"""Triton kernels of ``gated_delta`` for long rows of bfloat16 whose decays are by head: 64 tokens at a time.

With g's running sum G in a chunk, (I + A) U = beta (V - exp(G) K h), A strictly lower triangular: the UT transform of
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (Yang et al., 2024) with the decays of "Gated
Delta Networks" (Yang, Kautz, Hatamizadeh, 2024). A does not depend on the state. So all chunks invert I + A beside each other,
and one program a row, head and block of values (``delta_across_kernel``) goes from chunk to chunk with the state in registers
and has five products a chunk left.

Powers of A stay small for 16 tokens only (see ``triton.py``). So blocks of 16 on the diagonal are inverted by their powers
(``delta_blocks_kernel``), and joined twice (``delta_within_kernel``): with X the inverses of a pair of blocks and O what
is below them, the pair's inverse is X - X O X. Of the whole, what is beside the ones of its diagonal is rounded.

Keys and queries are multiplied as they are, and the products by 1 / length: what is rounded is what the model gave.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.chunks import CHUNK, CHUNKS_AT
from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import MOST_KB, shared_limit
from headway.kernels.gated_delta.inverse import inverse_of
from headway.kernels.gated_delta.reference import EPS
from headway.kernels.triton_rows import clear_chunk, row_of, softplus

BLOCK = 16
VALUES, STAGES, WARPS = 64, 2, 4
"""Of ``delta_across_kernel``: values of a head that a program has, chunks of which it has begun to load the inputs, warps. Not
below 64 values on Hopper: of products of 16 and 32 columns Triton 3.6 reads another place of shared memory there. Cards of the
kind that have less shared memory keep products' operands in registers, and take half as many."""


@triton.jit
def chunk_of(entry, packed_ptr, TABLE_AT: tl.constexpr):
    """(row, n-th chunk, whether there is one) of an entry of the table of chunks."""
    found = entry < tl.load(packed_ptr + TABLE_AT + 1)
    at = packed_ptr + tl.load(packed_ptr + TABLE_AT) + 2 * entry
    return tl.load(at, mask=found, other=0), tl.load(at + 1, mask=found, other=0), found


@triton.jit
def lengths(x, SMALL: tl.constexpr):
    """1 / length of the rows of x [L, K], f32 [L]."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + SMALL)


@triton.jit
def joined(x, a, apart, PRECISION: tl.constexpr):
    """Inverses of blocks twice as large: ``x`` [L, L] has those of the blocks, a has what is below them where ``apart``."""
    below = tl.where(apart, a, 0.0)
    return x - tl.dot(x, tl.dot(below, x, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def delta_blocks_kernel(
    k_ptr, a_ptr, a_log_ptr, dt_bias_ptr, b_ptr,  # see ``delta_walk_kernel``
    query_start_ptr, row_slots_ptr, seq_lens_ptr, packed_ptr,
    blocks_ptr,  # f32 [T, H, B], rows of (I + A)^-1 of the block that has the token
    factors_ptr,  # f32 [5, H, T]: 1 / length of q, times scale, and of k; beta; g; and its running sums in the chunk
    k_stride, k_head, a_stride, b_stride, heads, share, num_slots, num_tokens, beta_scale, most,
    K: tl.constexpr, SMALL: tl.constexpr, BLOCK_K: tl.constexpr, L: tl.constexpr, B: tl.constexpr, LEVELS: tl.constexpr,
    TABLE_AT: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    row, chunk, found = chunk_of(block // (L // B), packed_ptr, TABLE_AT)
    first, count, _, _, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    i, k = tl.arange(0, B), tl.arange(0, BLOCK_K)
    its = chunk * L + block % (L // B) * B
    if found & live & (count > most) & (its < count):
        inside = its + i < count
        token = (first + its + i).to(tl.int64)
        in_keys = inside[:, None] & (k < K)[None, :]
        key_at = k_ptr + token[:, None] * k_stride + head // share * k_head + k[None, :]
        key = tl.load(key_at, mask=in_keys, other=0.0)
        of_key = lengths(key, SMALL)
        raw = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0).to(tl.float32) + tl.load(
            dt_bias_ptr + head
        )
        g = tl.where(inside, -tl.exp(tl.load(a_log_ptr + head)) * softplus(raw), 0.0)
        pull = tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
        beta = tl.where(inside, beta_scale / (1.0 + tl.exp(-pull)), 0.0)
        factor, per = factors_ptr + head * num_tokens + token, heads * num_tokens
        tl.store(factor + per, of_key, mask=inside)
        tl.store(factor + 2 * per, beta, mask=inside)
        tl.store(factor + 3 * per, g, mask=inside)
        total = tl.cumsum(g, 0)
        below = i[:, None] > i[None, :]
        decay = tl.where(below, tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0)), 0.0)
        near = tl.dot(key, tl.trans(key), input_precision="ieee") * decay * (beta * of_key)[:, None] * of_key[None, :]
        at = blocks_ptr + (token[:, None] * heads + head) * B + i[None, :]
        tl.store(at, inverse_of(near, B, LEVELS), mask=inside[:, None] & (i < B)[None, :])


@triton.jit
def delta_within_kernel(
    q_ptr, k_ptr, query_start_ptr, row_slots_ptr, seq_lens_ptr, packed_ptr, blocks_ptr, factors_ptr,
    inverse_ptr,  # [T, H, L] of q's dtype, rows of (I + A)^-1 - I
    scores_ptr,  # [T, H, L] of q's dtype, rows of (q k^T) with decays, causal
    o_ptr,  # [T, H, V], cleared where no live row has a token
    q_stride, q_head, k_stride, k_head, heads, share, num_slots, num_rows, num_tokens, scale, most,
    K: tl.constexpr, V: tl.constexpr, SMALL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    L: tl.constexpr, B: tl.constexpr, TABLE_AT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    entry, head = tl.program_id(0), tl.program_id(1)
    row, chunk, found = chunk_of(entry, packed_ptr, TABLE_AT)
    first, count, _, _, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    begin, v = first + chunk * L, tl.arange(0, BLOCK_V)
    idle = tl.where(found & (live == 0), tl.minimum(L, count - chunk * L), 0)
    behind = tl.load(query_start_ptr + num_rows) + entry * L
    clear_chunk(o_ptr + head * V + v, heads * V, v < V, begin, idle, behind, tl.num_programs(0) * L, num_tokens, L)
    if found & live & (count > most):
        i, k = tl.arange(0, L), tl.arange(0, BLOCK_K)
        inside = chunk * L + i < count
        token = (begin + i).to(tl.int64)
        in_keys = inside[:, None] & (k < K)[None, :]
        key_at = k_ptr + token[:, None] * k_stride + head // share * k_head + k[None, :]
        query_at = q_ptr + token[:, None] * q_stride + head // share * q_head + k[None, :]
        key, query = tl.load(key_at, mask=in_keys, other=0.0), tl.load(query_at, mask=in_keys, other=0.0)
        same = (i // B)[:, None] == (i // B)[None, :]
        whole = inside[:, None] & (i < L)[None, :]
        diagonal_at = blocks_ptr + (token[:, None] * heads + head) * B + (i % B)[None, :]
        inverse = tl.load(diagonal_at, mask=whole & same, other=0.0)
        factor, per = factors_ptr + head * num_tokens + token, heads * num_tokens
        of_query, of_key = scale * lengths(query, SMALL), tl.load(factor + per, mask=inside, other=0.0)
        tl.store(factor, of_query, mask=inside)
        beta, g = tl.load(factor + 2 * per, mask=inside, other=0.0), tl.load(factor + 3 * per, mask=inside, other=0.0)
        total = tl.cumsum(g, 0)
        tl.store(factor + 4 * per, total, mask=inside)
        causal = i[:, None] >= i[None, :]
        decay = tl.where(causal, tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0)), 0.0) * of_key[None, :]
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * decay * of_query[:, None]
        rows = (token[:, None] * heads + head) * L + i[None, :]
        tl.store(scores_ptr + rows, scores.to(scores_ptr.dtype.element_ty), mask=whole)
        near = tl.dot(key, tl.trans(key), input_precision="ieee") * decay * (beta * of_key)[:, None]
        a = tl.where(i[:, None] > i[None, :], near, 0.0)
        pairs = (i // (2 * B))[:, None] == (i // (2 * B))[None, :]
        inverse = joined(inverse, a, pairs & (same == 0), PRECISION)
        inverse = joined(inverse, a, pairs == 0, PRECISION)
        inverse = tl.where(i[:, None] == i[None, :], 0.0, inverse)
        tl.store(inverse_ptr + rows, inverse.to(inverse_ptr.dtype.element_ty), mask=whole)


@triton.jit
def delta_across_kernel(
    q_ptr, k_ptr, v_ptr, inverse_ptr, scores_ptr, factors_ptr, state_ptr, query_start_ptr, row_slots_ptr,
    seq_lens_ptr, o_ptr,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, state_stride, heads, share, num_slots, num_tokens, most,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    i, k = tl.arange(0, L), tl.arange(0, BLOCK_K)
    in_k, in_v = k < K, v < V
    both = in_k[:, None] & in_v[None, :]
    kind = v_ptr.dtype.element_ty
    if live & (count > most):
        at = state_ptr + slot * state_stride + (head * K + k[:, None]) * V + v[None, :]
        h = tl.load(at, mask=both & (start > 0), other=0.0).to(tl.float32)  # [K, V]
        for t0 in tl.range(0, count, L, num_stages=STAGES):
            inside = t0 + i < count
            token = (first + t0 + i).to(tl.int64)
            in_keys, in_values = inside[:, None] & in_k[None, :], inside[:, None] & in_v[None, :]
            whole = inside[:, None] & (i < L)[None, :]
            key_at = k_ptr + token[:, None] * k_stride + head // share * k_head + k[None, :]
            query_at = q_ptr + token[:, None] * q_stride + head // share * q_head + k[None, :]
            rows = (token[:, None] * heads + head) * L + i[None, :]
            key, query = tl.load(key_at, mask=in_keys, other=0.0), tl.load(query_at, mask=in_keys, other=0.0)
            value = tl.load(v_ptr + token[:, None] * v_stride + head * v_head + v[None, :], mask=in_values, other=0.0)
            inverse = tl.load(inverse_ptr + rows, mask=whole, other=0.0)
            scores = tl.load(scores_ptr + rows, mask=whole, other=0.0)
            factor, per = factors_ptr + head * num_tokens + token, heads * num_tokens
            of_query, of_key = tl.load(factor, mask=inside, other=0.0), tl.load(factor + per, mask=inside, other=0.0)
            beta = tl.load(factor + 2 * per, mask=inside, other=0.0)
            total = tl.load(factor + 4 * per, mask=inside, other=0.0)
            carried, passed = h.to(kind), tl.exp(total)
            known = tl.dot(key, carried, input_precision="ieee") * (of_key * passed)[:, None]
            u = beta[:, None] * (value.to(tl.float32) - known)  # [L, V]
            u += tl.dot(inverse, u.to(kind), input_precision="ieee")
            out = tl.dot(query, carried, input_precision="ieee") * (of_query * passed)[:, None]
            out += tl.dot(scores, u.to(kind), input_precision="ieee")
            tl.store(o_ptr + (token[:, None] * heads + head) * V + v[None, :], out.to(kind), mask=in_values)
            last = tl.min(total, 0)  # decays are at most 1
            left = (u * (of_key * tl.exp(last - total))[:, None]).to(kind)
            h = tl.exp(last) * h + tl.dot(tl.trans(key), left, input_precision="ieee")
        tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)


def delta_long_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    beta_scale: float,
    scale: float,
    state: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    max_chunks: int,
    short: int,
    o: torch.Tensor,
) -> None:
    """Write what tokens of rows of more than ``short`` give to ``o`` [T, H, V], zeros for those of no live row where the table
    of chunks has it and for those behind all rows, and the states; arguments as in ``gated_delta``."""
    assert max_chunks > 0, "rows of several tokens are in the table of chunks"
    (slots, heads, keys, values), tokens = state.shape, len(v)
    blocks = torch.empty((tokens, heads, BLOCK), dtype=torch.float32, device=v.device)
    factors = torch.empty((5, heads, tokens), dtype=torch.float32, device=v.device)
    inverse, scores = (torch.empty((tokens, heads, CHUNK), dtype=v.dtype, device=v.device) for _ in range(2))
    share, block_k, strides = heads // k.shape[1], next_power_of_2(keys), (*q.stride()[:2], *k.stride()[:2])
    rows = query_start, row_slots, seq_lens
    delta_blocks_kernel[(max_chunks * (CHUNK // BLOCK), heads)](
        k, a, a_log, dt_bias, b, *rows, packed, blocks, factors, *strides[2:], a.stride(0), b.stride(0), heads, share, slots,
        tokens, beta_scale, short, K=keys, SMALL=EPS, BLOCK_K=block_k, L=CHUNK, B=BLOCK,
        LEVELS=BLOCK.bit_length() - 1, TABLE_AT=CHUNKS_AT, num_warps=1,
    )  # fmt: skip
    delta_within_kernel[(max_chunks, heads)](
        q, k, *rows, packed, blocks, factors, inverse, scores, o, *strides, heads, share, slots, len(seq_lens), tokens,
        scale, short, K=keys, V=values, SMALL=EPS, BLOCK_K=block_k, BLOCK_V=next_power_of_2(values), L=CHUNK, B=BLOCK,
        TABLE_AT=CHUNKS_AT, PRECISION="tf32" if v.element_size() == 2 else "ieee", num_warps=4,
    )  # fmt: skip
    block_v = VALUES if shared_limit(v.device) == MOST_KB << 10 else VALUES // 2
    delta_across_kernel[(len(seq_lens), heads, cdiv(values, block_v))](
        q, k, v, inverse, scores, factors, state, *rows, o, *strides, *v.stride()[:2], state.stride(0), heads, share,
        slots, tokens, short, K=keys, V=values, BLOCK_K=block_k, BLOCK_V=block_v, L=CHUNK, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
