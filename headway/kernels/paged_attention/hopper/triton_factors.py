"""Factors of the products in decode attention for Hopper: queries, and 8-bit floats (e4m3) as f16; see ``triton_decode``."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def repeat_layout(size, warps):
    """Threads over [repeats, heads, D / 2], of which ``head_layout`` is a slice."""
    return gl.BlockedLayout([1, 1, size // 64], [1, 1, 32], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def sums_layout(warps, size):
    """Threads over [warps, 16, size] of products' sums whose columns 0, 2, 4... and 1, 3, 5... were two products': each has
    four neighbours, beginning with the first."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0]]
    registers += [[0, 0, 1 << bit] for bit in range(4, size.bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    places = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, places, [], [warps, 16, size])


@gluon.constexpr_function
def pack_of(dtype):
    """Numbers of a 16-bit word."""
    return 2 if dtype == gl.float8e4nv else 1


@gluon.jit
def word_pointer(ptr, word: gl.constexpr):
    """``ptr`` to words, which its numbers fill."""
    if ptr.dtype.element_ty == word:
        return ptr
    else:
        return ptr.to(gl.pointer_type(word), bitcast=True)


@gluon.jit
def as_factor(x, dtype: gl.constexpr):
    """Queries as f16, which ends earlier than bf16."""
    x = x.to(gl.float32)
    return gl.where(x > 65504.0, 65504.0, gl.where(x < -65504.0, -65504.0, x)).to(dtype)


@gluon.jit
def unpaired(words):
    """(first, second) numbers of words, as f16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        .reg .b16 a, b;
        prmt.b32 t, $2, 0, 0x3120;
        mov.b32 {a, b}, t;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        }""",
        "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def whole(words, B: gl.constexpr):
    """Words [WARPS, KEYS, D / 2] as a second factor [WARPS, KEYS, D] of the layout ``B``: even columns, then odd ones."""
    even, odd = unpaired(words)
    both = gl.permute(gl.join(even, odd), (0, 1, 3, 2))
    both = gl.reshape(both, [words.shape[0], words.shape[1], 2 * words.shape[2]])
    return gl.convert_layout(both, B, assert_trivial=True)


@gluon.jit
def queries_of_words(low, high):
    """[16, D / 2] of halves [8, D / 2] of queries: their even columns above their odd ones."""
    both = gl.reshape(gl.join(low, high), [8, low.shape[1] // 2, 2, 2])
    return gl.reshape(gl.permute(both, (2, 0, 3, 1)), [16, low.shape[1]])


@gluon.jit
def in_order(sums):
    """[WARPS, 16, D] with its columns in order, whose even ones came first."""
    WARPS: gl.constexpr = sums.shape[0]
    D: gl.constexpr = sums.shape[2]
    both = gl.permute(gl.reshape(sums, [WARPS, 16, 2, D // 2]), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(both, [WARPS, 16, D]), sums_layout(WARPS, D), assert_trivial=True)


@gluon.jit
def repeated(x, more):
    """[8, D / 2]: ``x`` as often as ``more`` has it."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, more.type.layout)
    x, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(x, LAYOUT, assert_trivial=True), 0), more)
    return gl.reshape(x, [8, x.shape[2]])


@gluon.jit
def share_queries(smem, low, high, D: gl.constexpr, WARPS: gl.constexpr, WORDS: gl.constexpr):
    """Halves [heads, D / 2] of queries into rows 0 to 7 and 8 to 15 of shared memory; even and odd columns with WORDS."""
    ROWS: gl.constexpr = low.shape[0]
    LAYOUT: gl.constexpr = repeat_layout(D, WARPS)
    more = gl.zeros([8 // ROWS, ROWS, D // 2], low.dtype, layout=LAYOUT)  # heads again fill the eight rows
    low, high = repeated(low, more), repeated(high, more)
    if WORDS:
        smem.store(queries_of_words(as_factor(low, smem.dtype), as_factor(high, smem.dtype)))
    else:
        smem.store(gl.reshape(gl.permute(gl.join(low, high), (2, 0, 1)), [16, D // 2]))


@gluon.jit
def shared_queries(smem, WARPS: gl.constexpr, S: gl.constexpr):
    """The first factor that ``fold`` wants, from what ``share_queries`` stored."""
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    every = gl.zeros([WARPS, 1, 1], smem.dtype, layout=A)
    both, _ = gl.broadcast(gl.expand_dims(smem.load(gl.SliceLayout(0, A)), 0), every)
    return both
