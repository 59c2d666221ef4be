"""Triton kernel of ``delta_decode``: a program for each row and head, which holds the head's whole state in registers while it
takes the tokens in turn, first those that the stored state has not seen, and then the row's own.

It convolves its own channels of the values, and of queries and keys those that its head reads, which other heads may read, too:
the first of these writes them to the window, and its keys to the ring. Places that are read and places that are written are
different ones, so no program waits for another. Whole heads lie in one piece in memory, and programs that run at one time have
neighbouring ones.

To run a token again takes two instructions for each number of the state, and no sum. Products of matrices would take 16 tokens
whatever there are, and registers for their sums beside the state. So states have the bits of plain decoding, too. What a token
needs of memory is loaded while the token before it is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import next_power_of_2
from headway.kernels.delta_decode.reference import delta_decode as three_kernels
from headway.kernels.gated_delta.reference import EPS
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_rows import clear_idle, opened_outputs, row_of, softplus
from headway.kernels.triton_windows import convolved, hold_past, moved_on

MOST_HELD = 32768
"""Elements of a head's state that a program's registers can hold; larger ones take the three kernels."""
A_WARPS = 4096
"""Elements of a state for each warp: 128 in registers of a thread."""
AHEAD = False
"""Read states and windows before the wait for the kernel before: no other kernel behind the embedding writes them."""


@triton.jit
def hold_taps(weight_at, mask, TAPS: tl.constexpr):
    """Weights of the token itself, of the one before it, and so on; a tuple."""
    taps = ()
    for back in tl.static_range(TAPS):
        taps = taps + (tl.load(weight_at + (TAPS - 1 - back), mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return taps


@triton.jit
def decayed(h, g, BY_CHANNEL: tl.constexpr):
    """exp(g) h, g being of the head or of each of its channels."""
    decay = tl.exp(g)
    if BY_CHANNEL:
        decay = decay[:, None]
    return h * decay


@triton.jit
def with_token(h, key, u):
    """h + key u^T, [K, V], rounded once: for a token of the row and for one that runs again alike, which compilers would not
    promise of a product and a sum."""
    return tl.fma(key[:, None], u[None, :], h)


@triton.jit
def gated_norm(out, gate, norm, eps, V: tl.constexpr, SIGMOID: tl.constexpr, KIND: tl.constexpr):
    """[V] of KIND, rounded where ``gated_delta`` and ``gated_rms_norm`` round."""
    out, gate = out.to(KIND).to(tl.float32), gate.to(tl.float32)
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if not SIGMOID:
        opened = gate * opened
    normed = (out * tl.rsqrt(tl.sum(out * out, 0) / V + eps)).to(KIND)
    return ((normed * norm).to(tl.float32) * opened).to(KIND)


@triton.jit
def kept_token(key_at, u_at, g_at, in_k, in_v, in_g, there):
    """Of a token whose inputs lie there: key, u and g, f32."""
    key = tl.load(key_at, mask=in_k & there, other=0.0)
    u = tl.load(u_at, mask=in_v & there, other=0.0)
    return key, u, tl.load(g_at, mask=in_g & there, other=0.0)


@triton.jit
def run_again(
    h, key_at, u_at, g_at, in_k, in_v, in_g, stored, start, places, per_token, BY_CHANNEL: tl.constexpr
):  # fmt: skip
    """The state behind the tokens from position ``stored`` to ``start``. The three: where inputs of the first place lie."""
    at = stored % places * per_token
    key, u, g = kept_token(key_at + at, u_at + at, g_at + at, in_k, in_v, in_g, stored < start)
    for position in range(stored, start):
        last_key, last_u, last_g = key, u, g
        at = (position + 1) % places * per_token
        key, u, g = kept_token(key_at + at, u_at + at, g_at + at, in_k, in_v, in_g, position + 1 < start)
        h = with_token(decayed(h, last_g, BY_CHANNEL), last_key, last_u)
    return h


@triton.jit
def own_token(pair_at, v_at, gate_at, pull_at, raw_at, in_pair, in_v, in_g, there):
    """Of a token of the row, as they lie there: queries and keys, values, gates, b, a."""
    pair = tl.load(pair_at, mask=in_pair & there, other=0.0)
    value = tl.load(v_at, mask=in_v & there, other=0.0)
    gate = tl.load(gate_at, mask=in_v & there, other=0.0)
    pull = tl.load(pull_at, mask=there, other=0.0)
    return pair, value, gate, pull, tl.load(raw_at, mask=in_g & there, other=0.0)


@triton.jit
def delta_decode_kernel(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, TAPS]
    ring_ptr,  # [S, LENGTH, C]
    a_ptr,  # [T, H] or [T, H, K]
    a_log_ptr,  # f32 [H]
    dt_bias_ptr,  # f32 [H] or [H, K]
    b_ptr,  # [T, H]
    state_ptr,  # [S, H, K, V]
    gate_ptr,  # [T, H V]
    norm_ptr,  # [V]
    inputs_ptr,  # f32 [S', places, HK K + H V + H (or H K)], or None
    stored_at_ptr, store_at_ptr, query_start_ptr, row_slots_ptr, seq_lens_ptr,
    y_ptr,  # [T, H V] contiguous
    x_stride, ring_stride, a_stride, a_head, b_stride, state_stride, gate_stride, channels,
    share,  # value heads of a key head
    num_slots, places, num_tokens, beta_scale, scale, eps,
    K: tl.constexpr, V: tl.constexpr, LENGTH: tl.constexpr, TAPS: tl.constexpr, BY_CHANNEL: tl.constexpr,
    SIGMOID: tl.constexpr, SMALL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ONE: tl.constexpr, WIDTH: tl.constexpr,  # rows have a token at most; see ``clear_idle``, 0: outputs are zeros
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    heads, rows = tl.num_programs(0), tl.num_programs(1)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_k, in_v = k < K, v < V
    key_head, key_heads, leads = head // share, heads // share, head % share == 0
    # Queries and keys side by side: alone they are fewer than threads, and each thread would load all it meets in the state.
    pair = tl.arange(0, 2 * BLOCK_K)
    in_pair = pair % BLOCK_K < K
    pair_c = (pair // BLOCK_K * key_heads + key_head) * K + pair % BLOCK_K
    v_c = key_heads * 2 * K + head * V + v
    pair_taps = hold_taps(weight_ptr + pair_c * TAPS, in_pair, TAPS)
    v_taps = hold_taps(weight_ptr + v_c * TAPS, in_v, TAPS)
    norm = tl.load(norm_ptr + v, mask=in_v, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    decays: tl.constexpr = K if BY_CHANNEL else 1
    of_g = k if BY_CHANNEL else 0
    in_g = in_k if BY_CHANNEL else live
    bias = tl.load(dt_bias_ptr + head * decays + of_g, mask=in_g, other=0.0)
    if not AHEAD:
        wait_for_inputs(EARLY)
    ring = ring_ptr + slot * ring_stride
    at = state_ptr + slot * state_stride + (head * K + k[:, None]) * V + v[None, :]
    both = in_k[:, None] & in_v[None, :] & live
    stored, store = start, start + count
    if inputs_ptr is not None:
        stored, store = tl.load(stored_at_ptr + row), tl.load(store_at_ptr + row)
    h = tl.load(at, mask=both & (stored > 0), other=0.0).to(tl.float32)  # [K, V]
    pair_past = hold_past(ring + pair_c, start, channels, in_pair & live, LENGTH, TAPS)
    v_past = hold_past(ring + v_c, start, channels, in_v & live, LENGTH, TAPS)
    if AHEAD:
        wait_for_inputs(EARLY)
    of_head = y_ptr + head * V + v
    if WIDTH > 0:
        clear_idle(of_head, heads * V, in_v, row, first, count, live, query_start_ptr, rows, num_tokens, WIDTH)
    if live:
        per_token = key_heads * K + heads * (V + decays)
        key_own, u_own, g_own = inputs_ptr, inputs_ptr, inputs_ptr
        if inputs_ptr is not None:
            own = inputs_ptr + slot * places * per_token
            key_own, u_own = own + key_head * K + k, own + key_heads * K + head * V + v
            g_own = own + key_heads * K + heads * V + head * decays + of_g
            h = run_again(h, key_own, u_own, g_own, in_k, in_v, in_g, stored, start, places, per_token, BY_CHANNEL)
        tokens = 1 if ONE else count
        token = first.to(tl.int64)
        x_at, pull_at = x_ptr + token * x_stride, b_ptr + token * b_stride + head
        pair_at, v_at, gate_at = x_at + pair_c, x_at + v_c, gate_ptr + token * gate_stride + head * V + v
        raw_at = a_ptr + token * a_stride + head * a_head + of_g
        new = own_token(pair_at, v_at, gate_at, pull_at, raw_at, in_pair, in_v, in_g, live)
        for t in range(0, tokens):
            pair_new, v_new, gate, pull, raw = new
            pair_at, v_at, gate_at = pair_at + x_stride, v_at + x_stride, gate_at + gate_stride
            pull_at, raw_at = pull_at + b_stride, raw_at + a_stride
            new = own_token(pair_at, v_at, gate_at, pull_at, raw_at, in_pair, in_v, in_g, t + 1 < tokens)
            both_k = tl.reshape(convolved(pair_new, pair_past, pair_taps, 0.0, TAPS), (2, BLOCK_K))
            lengths = tl.where(tl.arange(0, 2) == 0, scale, 1.0) * tl.rsqrt(tl.sum(both_k * both_k, 1) + SMALL)
            query, key = tl.split(tl.trans(both_k * lengths[:, None]))
            value = convolved(v_new, v_past, v_taps, 0.0, TAPS)
            g = -rate * softplus(raw.to(tl.float32) + bias)
            h = decayed(h, g, BY_CHANNEL)
            u = beta_scale / (1.0 + tl.exp(-pull.to(tl.float32))) * (value - tl.sum(key[:, None] * h, 0))
            h = with_token(h, key, u)
            if inputs_ptr is not None:
                if start + t >= store:
                    kept = (start + t) % places * per_token
                    tl.store(key_own + kept, key, mask=in_k & leads)
                    tl.store(u_own + kept, u, mask=in_v)
                    tl.store(g_own + kept, g, mask=in_g)
            if start + t + 1 == store:
                tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)
            newest = ring + (start + t) % LENGTH * channels
            tl.store(newest + pair_c, pair_new, mask=in_pair & leads)
            tl.store(newest + v_c, v_new, mask=in_v)
            y = gated_norm(tl.sum(query[:, None] * h, 0), gate, norm, eps, V, SIGMOID, y_ptr.dtype.element_ty)
            tl.store(of_head + (token + t) * heads * V, y, mask=in_v)
            pair_past, v_past = moved_on(pair_new, pair_past, TAPS), moved_on(v_new, v_past, TAPS)


def delta_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    ring: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    beta_scale: float,
    scale: float,
    state: torch.Tensor,
    gate: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    sigmoid: bool,
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
    (slots, length, channels), (_, heads, keys, values) = ring.shape, state.shape
    assert max_query_len <= short, "short rows alone"
    assert x.stride(1) == gate.stride(1) == a.stride(-1) == b.stride(1) == ring.stride(2) == 1
    assert ring.stride(1) == channels and length >= weight.shape[1] + max_query_len - 1, (
        "channels lie side by side; the ring holds the window and the row"
    )
    assert inputs is None or inputs.is_contiguous(), "rings lie in memory of their own"
    block_k, block_v, rows = max(16, next_power_of_2(keys)), next_power_of_2(values), len(seq_lens)
    if block_k * block_v > MOST_HELD:
        return three_kernels(
            x, weight, ring, a, a_log, dt_bias, b, beta_scale, scale, state, gate, norm, eps, sigmoid,
            query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short, inputs, stored_at, store_at,
        )  # fmt: skip
    y, width = opened_outputs(gate, rows, max_query_len, short)
    delta_decode_kernel[(heads, rows)](
        x, weight, ring, a, a_log, dt_bias, b, state, gate, norm, inputs, stored_at, store_at, query_start, row_slots,
        seq_lens, y, x.stride(0), ring.stride(0), a.stride(0), a.stride(1), b.stride(0), state.stride(0), gate.stride(0),
        channels, heads * 2 * keys // (channels - heads * values), slots, 0 if inputs is None else inputs.shape[1],
        len(gate), beta_scale, scale, eps,
        K=keys, V=values, LENGTH=length, TAPS=weight.shape[1], BY_CHANNEL=a.dim() == 3, SIGMOID=sigmoid, SMALL=EPS,
        BLOCK_K=block_k, BLOCK_V=block_v, ONE=max_query_len == 1, WIDTH=width, AHEAD=AHEAD,
        num_warps=max(1, block_k * block_v // A_WARPS), **launch_early(x.device),
    )  # fmt: skip
    return y
