"""Following a slot's automaton (device functions); the tables' layout is in ``grammar_mask``."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def following_state(table, state, group, walks, num_states, num_classes, table_ints, CLASS_INTS: tl.constexpr):
    """The state after a byte of class ``group`` where ``walks``, else ``state``; 0 for whatever leaves the table."""
    at = (state * num_classes + group).to(tl.uint32, bitcast=True)  # numbers below 0 are far beyond any table
    room = (2 * (table_ints - CLASS_INTS)).to(tl.uint32, bitcast=True)
    inside = walks & (group.to(tl.uint32, bitcast=True) < num_classes.to(tl.uint32, bitcast=True)) & (at < room)
    next_of = (table + CLASS_INTS).to(tl.pointer_type(tl.uint16), bitcast=True)
    following = tl.load(next_of + at, mask=inside, other=0).to(tl.int32)
    return tl.where(walks, tl.where(following < num_states, following, 0), state)


@triton.jit
def ready_to_walk(table, state, num_states, num_classes, table_ints, CLASS_INTS: tl.constexpr):
    """(class of each byte, state after each byte) [256], of a walk that begins in ``state``: what ``walk`` needs first.

    The weights have passed through the cache since the last walk, and each transition waits for the one before. So those
    of all states that a first byte may lead to are asked for, too.
    """
    byte = tl.arange(0, 256)
    begins = (state > 0) & (state < num_states) & (byte < 256)
    group = tl.load(table + byte, mask=begins, other=0)
    after = following_state(table, state + 0 * byte, group, begins, num_states, num_classes, table_ints, CLASS_INTS)
    after = tl.where(begins, after, 0)
    room = (2 * (table_ints - CLASS_INTS)).to(tl.uint32, bitcast=True)
    row = tl.minimum((after * num_classes).to(tl.uint32, bitcast=True), room - 1)
    next_of = (table + CLASS_INTS).to(tl.pointer_type(tl.uint16), bitcast=True)
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [next_of + row, after], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return group, after


@triton.jit
def of_byte(values, four, nth: tl.constexpr):
    """values[b] of values [256], b byte ``nth`` of ``four``."""
    return tl.sum(tl.where(tl.arange(0, 256) == ((four >> (8 * nth)) & 255), values, 0), 0)


@triton.jit
def walk(
    table, ready, vocabulary, token, num_states, num_classes, table_ints, vocab, num_words, CLASS_INTS: tl.constexpr
):
    """The state after the token's bytes; 0 for one of no length or outside the vocabulary. ``ready``: of ``ready_to_walk``."""
    real = (token >= 0) & (token < vocab)
    length = tl.load(vocabulary + num_words.to(tl.int64) * vocab + token, mask=real, other=0)
    four = tl.load(vocabulary + token, mask=real, other=0)
    length = tl.minimum(length, 4 * num_words)
    state = tl.where(length > 0, of_byte(ready[1], four, 0), 0)
    done = tl.zeros_like(length)
    while (done < length) & (state != 0):
        one, two = of_byte(ready[0], four, 0), of_byte(ready[0], four, 1)
        three, last = of_byte(ready[0], four, 2), of_byte(ready[0], four, 3)
        left = length - done
        done += 4
        four = tl.load(vocabulary + (done // 4) * vocab + token, mask=left > 4, other=0)
        state = following_state(table, state, one, done > 4, num_states, num_classes, table_ints, CLASS_INTS)
        walks = (left > 1) & (state != 0)
        state = following_state(table, state, two, walks, num_states, num_classes, table_ints, CLASS_INTS)
        walks = (left > 2) & (state != 0)
        state = following_state(table, state, three, walks, num_states, num_classes, table_ints, CLASS_INTS)
        walks = (left > 3) & (state != 0)
        state = following_state(table, state, last, walks, num_states, num_classes, table_ints, CLASS_INTS)
    return state
