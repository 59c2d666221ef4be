"""Triton kernels of ``ssd_scan``.

``update`` has a program for each row of one token, head and block of channels: state in, state out, once. ``scan`` has one for
each longer row, head and block of channels; it walks the row in chunks, by products of matrices, and keeps the state in
registers, so that states between chunks never reach memory. A step of decode rows alone launches ``update`` only.
``walk`` stands in for it where there are rings: of a short row it takes what the stored state has not seen and the row's own
tokens as one chunk, by products of matrices. Its time is that of reading the state: token after token each would wait for loads
of the one before. The state behind the chunk is made only where it is stored, in f32 (as is all that does not lie in memory).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import num_sms
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_rows import clear_chunk, clear_idle, clear_tokens, opened_outputs, row_of, softplus

TOKENS, REGISTERS = 32, 168
"""Of ``scan``: tokens of a chunk, and registers a thread with which three programs share an SM. Chunks of 64 tokens took all
registers and spilled: one program an SM. States of more than 128 columns keep them all: with 168 they take twice as long."""
WALKED, WALKED_CHUNKS = 8192, (16, 32)
"""Of ``walk``: elements of a state that a program holds, and tokens of a chunk. The first, the fewest that a product of
matrices takes, where the ring has no more places; else the second, of which longer rings take several."""


@triton.jit
def head_weights(a_ptr, dt_bias_ptr, d_ptr, head):
    """(a, bias of its time steps, d) of a head, in f32; 0 where there is none."""
    bias, d = 0.0, 0.0
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    if d_ptr is not None:
        d = tl.load(d_ptr + head).to(tl.float32)
    return tl.load(a_ptr + head), bias, d


@triton.jit
def time_step(raw, dt_min, dt_max):
    """f32, of what stands before softplus."""
    return tl.minimum(tl.maximum(softplus(raw), dt_min), dt_max)


@triton.jit
def with_token(h, x, b, step, a):
    """The state [P, N] behind a token, all f32; it is added in one rounding wherever that is, which compilers would not promise
    of a product and a sum."""
    return tl.fma((step * x)[:, None], b[None, :], tl.exp(step * a)[:, None] * h)


@triton.jit
def ssd_update_kernel(
    x_ptr,  # [T, H, P]
    dt_ptr,  # [T, H], or None
    dt_bias_ptr,  # [H], or None
    a_ptr,  # f32 [H]
    b_ptr,  # [T, G, N]
    c_ptr,  # [T, G, N]
    d_ptr,  # [H], or None
    state_ptr,  # [S, H, P, N]
    query_start_ptr, row_slots_ptr, seq_lens_ptr,
    y_ptr,  # [T, H, P] contiguous
    x_stride, x_head, dt_stride, b_stride, b_group, c_stride, c_group, state_stride, heads,
    share,  # heads of a group
    num_slots, dt_min, dt_max, num_tokens,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,  # see ``clear_idle``; 0: only the row's own tokens are cleared
    EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    head = tl.program_id(1)
    a, dt_bias, d = head_weights(a_ptr, dt_bias_ptr, d_ptr, head)
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    both = in_p[:, None] & in_n[None, :]
    if WIDTH > 0:
        of_head, rows = y_ptr + head * P + p, tl.num_programs(0)
        clear_idle(of_head, heads * P, in_p, row, first, count, live, query_start_ptr, rows, num_tokens, WIDTH)
    else:
        clear_tokens(y_ptr + head * P + p, heads * P, in_p, first, tl.where(live | (count > 1), 0, count))
    if live & (count == 1):
        token = first.to(tl.int64)
        at = state_ptr + slot * state_stride + (head * P + p[:, None]) * N + n[None, :]
        h = tl.load(at, mask=both & (start > 0), other=0.0).to(tl.float32)
        x = tl.load(x_ptr + token * x_stride + head * x_head + p, mask=in_p, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * b_stride + head // share * b_group + n, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * c_stride + head // share * c_group + n, mask=in_n, other=0.0).to(tl.float32)
        step = tl.full((1,), 1.0, tl.float32)
        if dt_ptr is not None:
            raw = tl.load(dt_ptr + token * dt_stride + head + tl.arange(0, 1)).to(tl.float32)
            if dt_bias_ptr is not None:
                raw += dt_bias
            step = time_step(raw, dt_min, dt_max)
        h = with_token(h, x, b, step, a)
        y = tl.sum(h * c[None, :], 1)
        if d_ptr is not None:
            y += d * x
        tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)
        tl.store(y_ptr + (token * heads + head) * P + p, y.to(y_ptr.dtype.element_ty), mask=in_p)


@triton.jit
def of_state(c, h):
    """c h^T [L, P]. Of a state in f32 and c in bf16 in two halves of 8 bits each, since the products with c are exact: as
    three TF32 its copies would fill the shared memory of a multiprocessor with two programs."""
    if h.dtype == tl.float32 and c.dtype == tl.bfloat16:
        upper = h.to(tl.bfloat16)
        lower = (h - upper.to(tl.float32)).to(tl.bfloat16)
        found = tl.dot(c, tl.trans(upper)) + tl.dot(c, tl.trans(lower))
    else:
        found = tl.dot(c.to(h.dtype), tl.trans(h), input_precision="tf32x3")
    return found


@triton.jit
def state_behind(h, x, b, step, total, decays, seen):
    """The state f32 [P, N] behind the tokens of a chunk that are ``seen``, its first ones, in f32 whatever x [L, P] and b
    [L, N] are: others would round it at each token. ``total``: the running sum of ``decays``, the logs, [L]."""
    whole = tl.sum(tl.where(seen, decays, 0.0), 0)
    left = tl.where(seen, tl.exp(tl.where(seen, whole - total, 0.0)) * step, 0.0)
    added = tl.dot(tl.trans(x.to(tl.float32) * left[:, None]), b.to(tl.float32), input_precision="tf32x3")
    return tl.exp(whole) * h.to(tl.float32) + added


@triton.jit
def ssd_walk_kernel(
    x_ptr, dt_ptr, dt_bias_ptr, a_ptr, b_ptr, c_ptr, d_ptr, state_ptr, query_start_ptr, row_slots_ptr, seq_lens_ptr,
    y_ptr, x_stride, x_head, dt_stride, b_stride, b_group, c_stride, c_group, state_stride, heads, share, num_slots,
    dt_min, dt_max,
    inputs_ptr,  # [S', places, H P + G N + H]
    stored_at_ptr, store_at_ptr, places, short, num_tokens,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,  # see ``clear_idle``; 0: only the row's own tokens are cleared
    L: tl.constexpr,  # tokens of a chunk
    SEVERAL: tl.constexpr,  # a row may have more chunks than one
    EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    head = tl.program_id(1)
    a, bias, d = head_weights(a_ptr, dt_bias_ptr, d_ptr, head)
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n, i = tl.arange(0, BLOCK_N), tl.arange(0, L)
    in_p, in_n = p < P, n < N
    both = in_p[:, None] & in_n[None, :]
    kind = x_ptr.dtype.element_ty
    if WIDTH > 0:
        of_head, rows = y_ptr + head * P + p, tl.num_programs(0)
        clear_idle(of_head, heads * P, in_p, row, first, count, live, query_start_ptr, rows, num_tokens, WIDTH)
    else:
        clear_tokens(y_ptr + head * P + p, heads * P, in_p, first, tl.where(live | (count > short), 0, count))
    if live & (count <= short):
        stored, store = tl.load(stored_at_ptr + row), tl.load(store_at_ptr + row)
        at = state_ptr + slot * state_stride + (head * P + p[:, None]) * N + n[None, :]
        h = tl.load(at, mask=both & (stored > 0), other=0.0)
        if SEVERAL or h.dtype != kind:
            h = h.to(tl.float32)
        b_at = heads * P + head // share * N
        dt_at = heads * P + heads // share * N + head
        per_token = dt_at - head
        if dt_ptr is not None:
            per_token += heads
        ring = inputs_ptr + slot * places * per_token
        end = start + count
        for t0 in tl.range(stored, end, L, num_stages=1):
            position = t0 + i
            past, mine = position < start, (position >= start) & (position < end)
            kept = mine & (position >= store)
            leads = kept & (tl.program_id(2) == 0)
            given = ring + (position % places) * per_token  # [L]
            token = (first + position - start).to(tl.int64)
            x_at = x_ptr + token[:, None] * x_stride + head * x_head + p[None, :]
            b_from = b_ptr + token[:, None] * b_stride + head // share * b_group + n[None, :]
            c_from = c_ptr + token[:, None] * c_stride + head // share * c_group + n[None, :]
            ring_x, ring_b = given[:, None] + head * P + p[None, :], given[:, None] + b_at + n[None, :]
            old_x = tl.load(ring_x, mask=past[:, None] & in_p[None, :], other=0.0)
            old_b = tl.load(ring_b, mask=past[:, None] & in_n[None, :], other=0.0)
            own_x = tl.load(x_at, mask=mine[:, None] & in_p[None, :], other=0.0)
            own_b = tl.load(b_from, mask=mine[:, None] & in_n[None, :], other=0.0)
            c = tl.load(c_from, mask=mine[:, None] & in_n[None, :], other=0.0)
            x, b = tl.where(past[:, None], old_x, own_x), tl.where(past[:, None], old_b, own_b)
            step = tl.where(past | mine, 1.0, 0.0)
            if dt_ptr is not None:
                old = tl.load(given + dt_at, mask=past, other=0.0)
                own = tl.load(dt_ptr + token * dt_stride + head, mask=mine, other=0.0)
                tl.store(given + dt_at, own, mask=leads)
                raw = tl.where(past, old, own).to(tl.float32) + bias
                step = tl.where(past | mine, time_step(raw, dt_min, dt_max), 0.0)
            tl.store(ring_x, own_x, mask=kept[:, None] & in_p[None, :])
            tl.store(ring_b, own_b, mask=leads[:, None] & in_n[None, :] & (head % share == 0))
            total = tl.cumsum(step * a, 0)  # [L]
            causal = i[:, None] >= i[None, :]
            decay = tl.where(causal, tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0)), 0.0)
            scores = tl.dot(c, tl.trans(b), input_precision="tf32x3") * decay * step[None, :]  # [L, L]
            y = tl.dot(scores, x.to(tl.float32), input_precision="tf32x3")
            y += tl.exp(total)[:, None] * of_state(c, h)
            if d_ptr is not None:
                y += d * x.to(tl.float32)
            y_at = y_ptr + (token[:, None] * heads + head) * P + p[None, :]
            tl.store(y_at, y.to(kind), mask=mine[:, None] & in_p[None, :])
            if (store > tl.maximum(t0, start)) & (store <= tl.minimum(t0 + L, end)):
                seen = state_behind(h, x, b, step, total, step * a, position < store)
                tl.store(at, seen.to(state_ptr.dtype.element_ty), mask=both)
            if SEVERAL:
                h = state_behind(h, x, b, step, total, step * a, past | mine)


@triton.jit
def ssd_scan_kernel(
    x_ptr, dt_ptr, dt_bias_ptr, a_ptr, b_ptr, c_ptr, d_ptr, state_ptr, query_start_ptr, row_slots_ptr, seq_lens_ptr,
    y_ptr, x_stride, x_head, dt_stride, b_stride, b_group, c_stride, c_group, state_stride, heads, share, num_slots,
    dt_min, dt_max,
    short,  # rows of so many tokens or fewer are not taken
    num_tokens,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0), tl.num_programs(0)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    head = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    i = tl.arange(0, TOKENS)
    in_p, in_n = p < P, n < N
    both = in_p[:, None] & in_n[None, :]
    kind = x_ptr.dtype.element_ty
    idle, behind = tl.where(live | (count <= short), 0, count), tl.load(query_start_ptr + rows) + row * TOKENS
    clear_chunk(y_ptr + head * P + p, heads * P, in_p, first, idle, behind, rows * TOKENS, num_tokens, TOKENS)
    if live & (count > short):
        at = state_ptr + slot * state_stride + (head * P + p[:, None]) * N + n[None, :]
        h = tl.load(at, mask=both & (start > 0), other=0.0).to(tl.float32)  # [P, N]
        a = tl.load(a_ptr + head)
        for t0 in range(0, count, TOKENS):
            inside = t0 + i < count
            token = (first + t0 + i).to(tl.int64)
            x_at = x_ptr + token[:, None] * x_stride + head * x_head + p[None, :]
            x = tl.load(x_at, mask=inside[:, None] & in_p[None, :], other=0.0)  # [L, P]
            shared = inside[:, None] & in_n[None, :]
            b = tl.load(
                b_ptr + token[:, None] * b_stride + head // share * b_group + n[None, :], mask=shared, other=0.0
            )
            c = tl.load(
                c_ptr + token[:, None] * c_stride + head // share * c_group + n[None, :], mask=shared, other=0.0
            )
            step = tl.where(inside, 1.0, 0.0)
            if dt_ptr is not None:
                raw = tl.load(dt_ptr + token * dt_stride + head, mask=inside, other=0.0).to(tl.float32)
                if dt_bias_ptr is not None:
                    raw += tl.load(dt_bias_ptr + head).to(tl.float32)
                step = tl.where(inside, time_step(raw, dt_min, dt_max), 0.0)
            total = tl.cumsum(step * a, 0)  # [L]; tokens behind the row's end neither decay nor add
            causal = i[:, None] >= i[None, :]
            decay = tl.where(causal, tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0)), 0.0)
            scores = tl.dot(c, tl.trans(b), input_precision="ieee") * decay * step[None, :]  # [L, L]
            y = tl.dot(scores.to(kind), x, input_precision="ieee")
            carried = tl.dot(c, tl.trans(h).to(kind), input_precision="ieee")  # [L, P]
            y += tl.exp(total)[:, None] * carried
            if d_ptr is not None:
                y += tl.load(d_ptr + head).to(tl.float32) * x.to(tl.float32)
            y_at = y_ptr + (token[:, None] * heads + head) * P + p[None, :]
            tl.store(y_at, y.to(kind), mask=inside[:, None] & in_p[None, :])
            whole = tl.sum(step * a, 0)
            left = (x.to(tl.float32) * (tl.exp(whole - total) * step)[:, None]).to(kind)
            h = tl.exp(whole) * h + tl.dot(tl.trans(left), b, input_precision="ieee")
        tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)


def chunk_block(programs: int, width: int, block_n: int, device: torch.device) -> int:
    """BLOCK_P of ``ssd_scan_kernel``: large, but for rows and heads, ``programs``, that would leave processors idle."""
    block = max(16, min(next_power_of_2(width), 8192 // block_n))
    while block > 32 and programs * cdiv(width, block) < num_sms(device):
        block //= 2
    return block


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_min: float,
    dt_max: float,
    state: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    max_chunks: int,
    max_query_len: int,
    short: int,
    inputs: torch.Tensor | None = None,
    stored_at: torch.Tensor | None = None,
    store_at: torch.Tensor | None = None,
) -> torch.Tensor:
    slots, heads, width, size = state.shape
    assert x.stride(2) == b.stride(2) == c.stride(2) == 1 and (dt is None or dt.stride(1) == 1)
    rows, block_n = len(seq_lens), max(16, next_power_of_2(size))
    y, cleared = opened_outputs(x, rows, max_query_len, short, max_query_len > short)
    args: tuple[Any, ...] = (
        x, dt, dt_bias, a, b, c, d, state, query_start, row_slots, seq_lens, y,
        x.stride(0), x.stride(1), 0 if dt is None else dt.stride(0), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        state.stride(0), heads, heads // b.shape[1], slots, dt_min, dt_max,
    )  # fmt: skip
    block, early = max(4, min(next_power_of_2(width), 4096 // block_n)), launch_early(x.device)
    if inputs is None:
        assert short == 1, "rows of drafts need a ring"
        ssd_update_kernel[(rows, heads, cdiv(width, block))](
            *args, len(x), P=width, N=size, BLOCK_P=block, BLOCK_N=block_n, WIDTH=cleared, num_warps=4, **early
        )
    else:
        assert inputs.is_contiguous(), "rings lie in memory of their own"
        block, places = max(16, min(next_power_of_2(width), WALKED // block_n)), inputs.shape[1]
        tokens = WALKED_CHUNKS[places > WALKED_CHUNKS[0]]
        ssd_walk_kernel[(rows, heads, cdiv(width, block))](
            *args, inputs, stored_at, store_at, places, short, len(x), P=width, N=size, BLOCK_P=block, BLOCK_N=block_n,
            WIDTH=cleared, L=tokens, SEVERAL=places > tokens, num_warps=4, **early,
        )  # fmt: skip
    if max_query_len > short:
        block = chunk_block(rows * heads, width, block_n, x.device)
        ssd_scan_kernel[(rows, heads, cdiv(width, block))](
            *args, short, len(x), P=width, N=size, BLOCK_P=block, BLOCK_N=block_n, TOKENS=TOKENS, num_warps=4, num_stages=2,
            maxnreg=REGISTERS if block_n <= 128 and x.element_size() == 2 else None,
        )  # fmt: skip
    return y
