"""``speech_rules`` in Triton: a program per row, which goes over the row's logits twice where times have rules."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit(do_not_specialize=["row_stride", "vocab", "num_slots", "longest", "width"])
def speech_rules_kernel(
    logits, slots, history, num_tokens, prompt_len, numbers, ids,
    row_stride, vocab, num_slots, longest, width,
    IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    known = (slot >= 0) & (slot < num_slots)
    slot = tl.where(known, slot, 0)
    if known & (tl.load(numbers + slot * 6) > 0):
        base = logits + row * row_stride
        length, begin = tl.load(num_tokens + slot), tl.load(prompt_len + slot)
        fresh = length <= begin
        never, count = tl.load(numbers + slot * 6 + 1), tl.load(numbers + slot * 6 + 2)
        first, end = tl.load(numbers + slot * 6 + 3), tl.load(numbers + slot * 6 + 4)
        initial = tl.load(numbers + slot * 6 + 5)
        column = tl.arange(0, IDS)
        most = tl.minimum(tl.where(fresh, count, never), width)
        listed = tl.load(ids + slot * width + column, mask=column < most, other=-1)
        tl.store(base + listed, tl.full([IDS], float("-inf"), tl.float32), mask=(listed >= 0) & (listed < vocab))
        tl.debug_barrier()  # other threads read below what these wrote
        if first >= 0:
            latest = tl.full([BLOCK], -1, tl.int32)
            for start in range(begin, tl.minimum(length, longest), BLOCK):
                place = start + tl.arange(0, BLOCK)
                told = tl.load(history + slot * longest + place, mask=place < tl.minimum(length, longest), other=-1)
                latest = tl.maximum(latest, tl.where(told >= first, told, -1))
            newest = tl.max(latest, axis=0)
            last = tl.load(history + slot * longest + tl.maximum(length - 1, 0))
            before = tl.load(history + slot * longest + tl.maximum(length - 2, 0))
            in_time = (fresh == 0) & (last >= first)
            closed = (length - begin < 2) | (before >= first)
            opened = in_time & (closed == 0)
            both = in_time & closed
            least = tl.where(newest < 0, first, tl.where(opened, newest, newest + 1))
            highest = tl.where(fresh & (initial >= 0), first + initial, vocab)
            low_text = tl.where(fresh, first, tl.where(opened, end, 0))
            top_time = tl.full([BLOCK], float("-inf"), tl.float32)
            sum_time = tl.zeros([BLOCK], tl.float32)
            top_text = tl.full([BLOCK], float("-inf"), tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                inside = token < vocab
                is_time = token >= first
                value = tl.load(base + token, mask=inside, other=float("-inf")).to(tl.float32)
                bad = tl.where(
                    is_time, both | (token < least) | (token > highest) | (token < low_text), token < low_text
                )
                value = tl.where(bad, float("-inf"), value)
                tl.store(base + token, value, mask=inside & bad)
                of_time = tl.where(is_time, value, float("-inf"))
                higher = tl.maximum(top_time, of_time)
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                sum_time = sum_time * tl.exp(top_time - shift) + tl.exp(of_time - shift)
                top_time = higher
                top_text = tl.maximum(top_text, tl.where(is_time, float("-inf"), value))
            top = tl.max(top_time, axis=0)
            shift = tl.where(top == float("-inf"), 0.0, top)
            times = shift + tl.log(tl.sum(sum_time * tl.exp(top_time - shift), axis=0))
            if times > tl.max(top_text, axis=0):
                for start in range(0, tl.minimum(first, vocab), BLOCK):
                    token = start + tl.arange(0, BLOCK)
                    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
                    tl.store(base + token, nothing, mask=token < tl.minimum(first, vocab))


def speech_rules(
    logits: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    numbers: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    speech_rules_kernel[(logits.shape[0],)](
        logits, slots, history, num_tokens, prompt_len, numbers, ids, logits.stride(0), logits.shape[1],
        numbers.shape[0], history.shape[1], ids.shape[1], IDS=triton.next_power_of_2(ids.shape[1]), BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
