"""The operations' native CPU implementations; shapes and meaning in each operation's package.

Each function checks cheaply that the kernels can serve (float32 or bfloat16, contiguous, same dtype) and otherwise
calls the operation's reference. A call costs about 3 microseconds.
"""

from __future__ import annotations

from typing import Any

import torch

from headway.core.ints import cdiv
from headway.kernels.cpu import instructions, loader
from headway.kernels.decode_attention.reference import heads_to_write
from headway.kernels.registry import OPS

PANEL = 32
"""Outputs that the packed layout of weights keeps together; linear.c knows the same number."""
MAX_HEAD_SIZE = 1024
"""Larger heads would overrun the kernels' stack buffers."""


def available() -> bool:
    """Whether the kernels are built and loaded (builds them on the first call, a few seconds once per machine)."""
    return loader.library() is not None


def preferred_dtype() -> torch.dtype:
    """The faster of bfloat16 and float32 on this CPU.

    Decoding is bound by reading weights, which bfloat16 halves. Our kernels widen bfloat16 where the CPU has no products for it
    at the price of a few shifts, so they always gain; torch's are slow there.
    """
    gains = available() or instructions.cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}
    return torch.bfloat16 if gains else torch.float32


def native() -> Any:
    """The loaded library. Call only when ``available()``."""
    loaded = loader.library()
    assert loaded is not None
    return loaded


def is_native(*tensors: torch.Tensor) -> bool:
    """Whether all are contiguous and of one dtype the kernels know."""
    dtype = tensors[0].dtype
    if dtype is not torch.float32 and dtype is not torch.bfloat16:
        return False
    return all(tensor.dtype is dtype and tensor.is_contiguous() for tensor in tensors)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not is_native(x, weight):
        return _reference("rms_norm", x, weight, eps)
    out, size, dtype = torch.empty_like(x), x.shape[-1], x.dtype
    native().headway_rms_norm(
        x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.numel() // max(size, 1), size, eps,
        dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float = 1.0
) -> torch.Tensor:
    if factor != 1.0:
        x = x * factor
    if not is_native(x, residual, weight) or x.shape != residual.shape:
        return _reference("add_rms_norm", x, residual, weight, eps)
    out, size, dtype = torch.empty_like(x), x.shape[-1], x.dtype
    native().headway_rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // max(size, 1), size, eps,
        dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def norm_add(
    x: torch.Tensor, after: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, factor: float = 1.0,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    y = rms_norm(x.sum(0).to(residual.dtype) if x.dim() == 3 else x, after, eps)
    y = y if factor == 1.0 else y * factor
    if scale is not None:
        residual.add_(y).mul_(scale)
        return residual.new_empty((0, y.shape[1])) if weight is None else rms_norm(residual, weight, eps)
    return residual.add_(y).new_empty((0, y.shape[1])) if weight is None else add_rms_norm(y, residual, weight, eps)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    if not is_native(x) or x.dim() != 2:
        return _reference("silu_mul", x)
    rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty((rows, size))
    native().headway_silu_mul(
        x.data_ptr(), out.data_ptr(), rows, size, x.dtype is torch.bfloat16, torch.get_num_threads()
    )
    return out


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]
    num_blocks, block_size, kv_heads, size = k_cache.shape
    if not is_native(qkv, k_cache, v_cache, *norms) or not _are_int32(positions, kv_slots) or size > MAX_HEAD_SIZE:
        return _reference(
            "rope_kv_write", qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, k_cache, v_cache, num_heads
        )
    if not cos_sin.is_contiguous() or cos_sin.dtype is not torch.float32:
        cos_sin = cos_sin.float().contiguous()
    q = qkv.new_empty((qkv.shape[0], num_heads, size))
    native().headway_rope_kv_write(
        qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(), eps,
        kv_slots.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), q.data_ptr(),
        qkv.shape[0], num_heads, kv_heads, size, cos_sin.shape[1], cos_sin.shape[0], num_blocks * block_size,
        qkv.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return q


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    arrivals: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    num_decode_rows: int,
    max_query_len: int,
    max_seq_len_bound: int,
    decode_rows: torch.Tensor | None = None,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    reads_this_step: bool = False,
    width: int = 1,
) -> torch.Tensor:
    tokens, heads, size = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    tables = _are_int32(block_tables, row_slots, query_start, seq_lens)
    by_head = all(each is None or (each.dtype is torch.float32 and each.is_contiguous()) for each in (sinks, slopes))
    if not is_native(q, k_cache, v_cache) or not tables or not by_head or size > MAX_HEAD_SIZE:
        return _reference(
            "paged_attention", q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, arrivals,
            scale, window, soft_cap, num_decode_rows, max_query_len, max_seq_len_bound, decode_rows, chunk, sinks, slopes,
            reads_this_step, width,
        )  # fmt: skip
    out = torch.empty_like(q)
    failed = native().headway_paged_attention(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(), row_slots.data_ptr(),
        query_start.data_ptr(), seq_lens.data_ptr(), out.data_ptr(), tokens, row_slots.shape[0],
        block_tables.shape[0], block_tables.shape[1], num_blocks, block_size, heads, kv_heads, size, scale, window,
        soft_cap, chunk, None if sinks is None else sinks.data_ptr(), None if slopes is None else slopes.data_ptr(),
        q.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("paged_attention: no memory for its work list")
    return out


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """The layout of ``linear_packed``; ``weight`` [N, K] float32 or bfloat16 on the CPU, K even for bfloat16."""
    outputs, inputs = weight.shape
    weight = weight.detach().contiguous()
    packed = weight.new_empty((cdiv(outputs, PANEL), inputs, PANEL))
    native().headway_linear_pack(
        weight.data_ptr(), packed.data_ptr(), outputs, inputs, weight.dtype is torch.bfloat16, torch.get_num_threads()
    )
    return packed


def decode_attention(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    arrivals: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    max_seq_len_bound: int,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    width: int = 1,
    shares: bool = False,
) -> torch.Tensor:
    written = heads_to_write(k_cache, v_cache, shares)
    q = rope_kv_write(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, *written, num_heads)
    return paged_attention(
        q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, arrivals, scale, window, soft_cap,
        qkv.shape[0] if width == 1 else 0, width, max_seq_len_bound, None, chunk, sinks, slopes, False, width,
    )  # fmt: skip


def linear_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, gelu: bool = False
) -> torch.Tensor:
    x = x.contiguous()
    bf, narrow = x.dtype is torch.bfloat16, packed.dtype is torch.bfloat16
    known = is_native(x) and is_native(packed) and (narrow or not bf) and (bias is None or is_native(x, bias))
    if not known or x.shape[-1] != packed.shape[1]:
        return _reference("linear_packed", x, packed, bias, outputs, gelu)
    y, inputs = x.new_empty((*x.shape[:-1], outputs)), packed.shape[1]
    failed = native().headway_linear(
        x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        x.numel() // max(inputs, 1), outputs, inputs, bf, narrow, gelu, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("linear: no memory for its input")
    return y


def _are_int32(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in tensors)


def _reference(name: str, *args: Any) -> torch.Tensor:
    result: torch.Tensor = OPS[name].reference(*args)
    return result
