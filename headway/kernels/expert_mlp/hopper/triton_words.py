"""Products of 4-bit weights on tensor cores, whose first factor is unpacked in the registers that it was loaded into.

A word of 16 bits holds four weights that lie 16 apart (see ``expert_mlp.packing``), and of a weight's bits sign, exponent and
fraction lie as in a bf16 once the word is shifted: two words at a time, a shift and a mask give two factors, and a product with
the block's scale brings the exponent to its place, subnormal numbers included. Inputs of a product may come in any order that
both factors share, so a thread takes the eight words that its load of 16 bytes brings: nothing moves between threads, and
nothing goes through shared memory. A scale's power of two is split: what 16 bits cannot hold multiplies the sums.

Weights are the first factor, 16 outputs a warp; tokens are the columns of the second, of which few are enough.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

WORDS = gl.constexpr(32)
"""Of a row in one step: eight for each of a product's four threads. They hold 128 weights."""
SHIFT = gl.constexpr(94)
"""Added to a scale for the exponent of a factor."""
REST = gl.constexpr(4294967296.0)
"""2^32: of a scale's power what the factors leave."""


@gluon.constexpr_function
def sums_layout(parts):
    """Sums [parts, 16, tokens]: a warp has one part."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[parts, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def split_layout(parts):
    """Words [parts, 16, 4, 8] as the products' first factor has them: threads over 4, registers over 8."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 8, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    places = [[1 << bit, 0, 0, 0] for bit in range(parts.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, places, [], [parts, 16, 4, 8])


@gluon.jit
def as_words(ptr):
    """``ptr`` to 16-bit words."""
    return ptr.to(gl.pointer_type(gl.int16), bitcast=True)


@gluon.jit
def four(words, low, high):
    """Four factors bf16 of words, the first two of the block of scale ``low``, the others of ``high``."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, t;
        and.b32 a, $4, 0x81C081C0;
        shl.b32 b, $4, 3;
        and.b32 b, b, 0x81C081C0;
        shl.b32 c, $4, 6;
        and.b32 c, c, 0x81C081C0;
        shl.b32 d, $4, 1;
        and.b32 d, d, 0x80008000;
        shr.b32 t, $4, 5;
        and.b32 t, t, 0x01000100;
        or.b32 d, d, t;
        shr.b32 t, $4, 4;
        and.b32 t, t, 0x00C000C0;
        or.b32 d, d, t;
        mul.rn.bf16x2 $0, a, $5;
        mul.rn.bf16x2 $1, b, $5;
        mul.rn.bf16x2 $2, c, $6;
        mul.rn.bf16x2 $3, d, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r", [words, low, high],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def factors(words, scales, SPLIT: gl.constexpr):
    """``four`` of a step's words [parts, 16, 32], and of the two scales of every eight: uint16 [parts, 16, 4]."""
    like = gl.zeros([words.shape[0], words.shape[1], 4, 8], gl.int16, layout=SPLIT)
    wide = scales.to(gl.uint16, bitcast=True).to(gl.int32)
    low = (((wide & 255) + SHIFT) << 7).to(gl.int16)
    high = (((wide >> 8) + SHIFT) << 7).to(gl.int16)
    low, _ = gl.broadcast(gl.expand_dims(low, 3), like)
    high, _ = gl.broadcast(gl.expand_dims(high, 3), like)
    shape: gl.constexpr = words.shape
    low = gl.convert_layout(gl.reshape(low, shape), words.type.layout, assert_trivial=True)
    high = gl.convert_layout(gl.reshape(high, shape), words.type.layout, assert_trivial=True)
    return four(words, low, high)


@gluon.jit
def across(size: gl.constexpr, dim: gl.constexpr, L: gl.constexpr):
    """Numbers from 0 on along one of three dimensions of the layout ``L``."""
    if dim == 0:
        x = gl.arange(0, size, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
        return gl.expand_dims(gl.expand_dims(x, 1), 2)
    elif dim == 1:
        x = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
        return gl.expand_dims(gl.expand_dims(x, 0), 2)
    else:
        x = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(0, L)))
        return gl.expand_dims(gl.expand_dims(x, 0), 0)


@gluon.jit
def load_step(weight_ptr, scales_ptr, row, step, K: gl.constexpr, PARTS: gl.constexpr, LAST: gl.constexpr):
    """Words [PARTS, 16, 32] and scales [PARTS, 16, 4], two in each, of a step of 16 rows from ``row`` on. LAST: a step may go
    beyond the row."""
    A: gl.constexpr = gl.DotOperandLayout(0, sums_layout(PARTS), 8)
    B: gl.constexpr = gl.SliceLayout(3, split_layout(PARTS))
    words: gl.constexpr = K // 4
    m, other = across(16, 1, A), across(16, 1, B)
    col = (step * PARTS + across(PARTS, 0, A)) * WORDS + across(WORDS, 2, A)
    pair = (step * PARTS + across(PARTS, 0, B)) * 2 + across(4, 2, B) // 2  # of blocks of 32
    at = as_words(weight_ptr) + row * words + (m * words + col)
    scales_at = as_words(scales_ptr) + row * (K // 64) + (other * (K // 64) + pair)
    if LAST:
        return gl.load(at, mask=col < words, other=0), gl.load(scales_at, mask=pair < K // 64, other=0)
    else:
        return gl.load(at), gl.load(scales_at)


@gluon.jit
def load_inputs(
    x_at, keep, step, K: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr, MASKED: gl.constexpr, LAST: gl.constexpr
):  # fmt: skip
    """A step's four second factors [PARTS, 32, tokens]. ``x_at``: [1, 1, tokens], and so ``keep``, which counts with MASKED."""
    col = (step * PARTS + across(PARTS, 0, L)) * WORDS + across(WORDS, 1, L)
    at = x_at + (col // 16 * 64 + col % 16)
    if MASKED or LAST:
        if LAST:
            keep = keep & (col < K // 4)
        return (
            gl.load(at, mask=keep, other=0.0),
            gl.load(at + 16, mask=keep, other=0.0),
            gl.load(at + 32, mask=keep, other=0.0),
            gl.load(at + 48, mask=keep, other=0.0),
        )
    else:
        return gl.load(at), gl.load(at + 16), gl.load(at + 32), gl.load(at + 48)


@gluon.jit
def add_step(acc, loaded, x, SPLIT: gl.constexpr):
    """``acc`` and a step's products."""
    words, scales = loaded
    a, b, c, d = factors(words, scales, SPLIT)
    acc = mma_v2(a, x[0], acc)
    acc = mma_v2(b, x[1], acc)
    acc = mma_v2(c, x[2], acc)
    return mma_v2(d, x[3], acc)


@gluon.jit
def add_steps(
    acc, acc2, matrix, x_at, keep, start, COUNT: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr,
    PAIRED: gl.constexpr, MASKED: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """COUNT steps, of which all loads of weights come first."""
    weight_ptr, scales_ptr, row, row2 = matrix
    SPLIT: gl.constexpr = split_layout(PARTS)
    loaded = ()
    loaded2 = ()
    for i in gl.static_range(COUNT):
        loaded += (load_step(weight_ptr, scales_ptr, row, start + i, K, PARTS, LAST),)
        if PAIRED:
            loaded2 += (load_step(weight_ptr, scales_ptr, row2, start + i, K, PARTS, LAST),)
    for i in gl.static_range(COUNT):
        x = load_inputs(x_at, keep, start + i, K, PARTS, L, MASKED, LAST)
        acc = add_step(acc, loaded[i], x, SPLIT)
        if PAIRED:
            acc2 = add_step(acc2, loaded2[i], x, SPLIT)
    return acc, acc2


@gluon.jit
def multiply(
    acc, acc2, matrix, x_at, keep, K: gl.constexpr, PARTS: gl.constexpr, UNROLL: gl.constexpr, L: gl.constexpr,
    PAIRED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """``acc`` and the products of 16 rows with tokens; ``acc2``: with PAIRED of 16 more rows. They lack the factor REST.

    Args:
        matrix: pointers of weights and scales, the first row, and the first of the second ones.
        x_at, keep: see ``load_inputs``.
    """
    chunk: gl.constexpr = PARTS * WORDS
    whole: gl.constexpr = K // 4 // (chunk * UNROLL) * UNROLL
    rest: gl.constexpr = (K // 4 - whole * chunk + chunk - 1) // chunk
    for start in range(0, whole, UNROLL):
        acc, acc2 = add_steps(acc, acc2, matrix, x_at, keep, start, UNROLL, K, PARTS, L, PAIRED, MASKED, False)
    if rest > 0:
        acc, acc2 = add_steps(acc, acc2, matrix, x_at, keep, whole, rest, K, PARTS, L, PAIRED, MASKED, True)
    return acc, acc2
