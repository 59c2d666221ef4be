"""Copies of cached keys and values into shared memory, 16 bytes a thread.

For tiles too small for the tensor copies of ``triton_prefill``, and for any order of the cache in memory.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

SPAN = gl.constexpr(8)
"""Keys that lie together in every cache, whose smallest block this is: one block id serves them."""


@gluon.constexpr_function
def copy_layout(warps, size, keys):
    """Threads over [keys / SPAN, SPAN, D]: a thread copies keys of one span, so that it needs one block id; with heads of 256,
    whose lines take a whole warp, of two."""
    lanes = size // 8  # along a head
    rows = min(SPAN, keys * lanes // (32 * warps))
    return gl.BlockedLayout([1, rows, 8], [32 // lanes * rows // 8, 8 // rows, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def load_blocks(cache, tile, BS: gl.constexpr, BLOCK_N: gl.constexpr, COPY: gl.constexpr):
    """[BLOCK_N / SPAN] block ids of a tile's spans, block 0 where there is none."""
    table, seq_len, num_blocks, _ = cache
    span = gl.arange(0, BLOCK_N // SPAN, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    position = gl.maximum(tile, 0) * BLOCK_N + SPAN * span
    block = gl.load(table + position // BS, mask=position < seq_len, other=0)
    return gl.where((block >= 0) & (block < num_blocks), block, 0)


@gluon.jit
def copy_keys(
    target,  # shared [BLOCK_N, D]
    source,  # k_ptr or v_ptr at the KV head
    block,
    cache,
    tile,
    OFFSET_STRIDE: gl.constexpr,
    D: gl.constexpr,
    BS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    COPY: gl.constexpr,
):
    """Start copying a tile of keys or values. Places past the row's end, which may hold anything, become zeros."""
    _, seq_len, _, block_stride = cache
    span = SPAN * gl.arange(0, BLOCK_N // SPAN, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    step = gl.arange(0, SPAN, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, COPY)))
    inside = span % BS
    if BS > BLOCK_N:
        inside = (tile * BLOCK_N + span) % BS
    place = source + block.to(gl.int64) * block_stride + inside * OFFSET_STRIDE
    place = gl.expand_dims(gl.expand_dims(place, 1), 2)
    place += gl.expand_dims(gl.expand_dims(step * OFFSET_STRIDE, 0), 2) + gl.expand_dims(gl.expand_dims(dim, 0), 0)
    target = target.reshape([BLOCK_N // SPAN, SPAN, D])
    position = tile * BLOCK_N + gl.expand_dims(span, 1) + gl.expand_dims(step, 0)
    async_copy.async_copy_global_to_shared(target, place, mask=gl.expand_dims(position < seq_len, 2))
