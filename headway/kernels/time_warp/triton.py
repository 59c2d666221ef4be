"""``time_warp`` in Triton: one program, a lane per token, diagonal by diagonal."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "num_frames", "row_stride"])
def time_warp_kernel(
    costs, codes, lines, starts, num_tokens, num_frames, row_stride, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.arange(0, BLOCK)
    inside = token < num_tokens
    nowhere = tl.full([BLOCK], float("inf"), tl.float32)
    total = nowhere
    beside = tl.where(token == 0, 0.0, nowhere)  # the way comes from ahead of the first frame
    code = tl.zeros([BLOCK], tl.int32)
    for d in range(num_tokens + num_frames - 1):
        # Lanes hand their cell to the next one. Two lines take turns: none is written before all have read it.
        line = lines + (d % 2) * (BLOCK + 1)
        tl.store(line + 1 + token, total)
        tl.debug_barrier()
        above = tl.load(line + token, mask=token > 0, other=float("inf"))
        frame = d - token
        here = inside & (frame >= 0) & (frame < num_frames)
        cost = tl.load(costs + token * row_stride + frame, mask=here, other=0.0)
        both = (beside < above) & (beside < total)
        down = (both == 0) & (above < beside) & (above < total)
        best = tl.where(both, beside, tl.where(down, above, total))
        code = tl.where(both, 2 * frame, tl.where(down, 2 * frame + 1, code))
        tl.store(codes + token * num_frames + frame, code, mask=here)
        total = tl.where(here, cost + best, nowhere)
        beside = above
    tl.debug_barrier()  # other lanes wrote what is read below
    end = num_frames - 1
    for back in range(num_tokens):
        t = num_tokens - 1 - back
        entered = tl.load(codes + t * num_frames + end)
        entered = tl.minimum(tl.maximum(entered, 0), 2 * num_frames - 1)
        tl.store(starts + t, entered // 2)
        end = tl.maximum(entered // 2 - 1 + entered % 2, 0)


def time_warp(costs: torch.Tensor) -> torch.Tensor:
    num_tokens, num_frames = costs.shape
    assert costs.stride(1) == 1 and costs.stride(0) * num_tokens < 2**31
    block = max(triton.next_power_of_2(num_tokens), 512)  # one kernel for all texts that models hear
    codes = torch.empty(num_tokens, num_frames, dtype=torch.int32, device=costs.device)
    lines = torch.empty(2 * (block + 1), dtype=torch.float32, device=costs.device)
    starts = torch.empty(num_tokens, dtype=torch.int32, device=costs.device)
    time_warp_kernel[(1,)](
        costs, codes, lines, starts, num_tokens, num_frames, costs.stride(0), BLOCK=block, num_warps=8,
    )  # fmt: skip
    return starts
