"""``apply_edits`` in Triton: one program per edit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.kernels.triton_early import launch_early, start_next


@triton.jit
def apply_edits_kernel(arena, packed, arena_size, packed_size, MAX_EDIT: tl.constexpr, EARLY: tl.constexpr):
    start_next(EARLY)
    edit = tl.program_id(0)
    if edit < tl.load(packed):
        at = tl.load(packed + 1).to(tl.int64) + 3 * edit
        if (at >= 0) & (at + 2 < packed_size):
            dst = tl.load(packed + at).to(tl.int64)
            src = tl.load(packed + at + 1).to(tl.int64)
            length = tl.load(packed + at + 2)
            fits = (dst >= 0) & (src >= 0) & (length >= 0) & (length <= MAX_EDIT)
            fits = fits & (dst + length <= arena_size) & (src + length <= packed_size)
            lane = tl.arange(0, MAX_EDIT)
            mask = fits & (lane < length)
            tl.store(arena + dst + lane, tl.load(packed + src + lane, mask=mask, other=0), mask=mask)


def apply_edits(arena: torch.Tensor, packed: torch.Tensor, max_edits: int) -> None:
    if max_edits:
        # Launched the usual way, so all before it has ended and it need not wait; what comes behind it may start early.
        early = launch_early(packed.device)["EARLY"]
        apply_edits_kernel[(max_edits,)](arena, packed, arena.numel(), packed.numel(), MAX_EDIT=1024, EARLY=early)
