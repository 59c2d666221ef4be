"""Compiles the kernels of latent attention for GPUs that need not be there; run by ``test_latents_compile``.

    python -m tests.kernels.compile_latents 80 90 120

With "sparing", caches of 16 bits only where there are none of 8 bits, but for rows of drafts, whose tiles are the largest.
Operations are launched as on the card, with its shared memory, for the shapes of models; what they launch is compiled. Prints a
line of JSON each: kernel, shape, capability, shared memory, what went wrong. A process of its own: the tests' has Triton's
interpreter switched on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.driver import driver

from headway.kernels.head_linear import head_linear
from headway.kernels.head_linear.triton import head_linear_kernel
from headway.kernels.mla_decode import mla_decode
from headway.kernels.mla_decode.launch import BLACKWELL_MEMBERS, MOST_MEMBERS
from headway.kernels.mla_decode.triton import mla_decode_kernel, mla_merge_kernel
from headway.kernels.mla_index import index_scores, index_topk, index_write
from headway.kernels.mla_index.triton import index_scores_kernel, index_write_kernel
from headway.kernels.mla_index.triton_topk import index_topk_kernel
from headway.kernels.mla_prefill import mla_gather, mla_prefill
from headway.kernels.mla_prefill.triton import mla_gather_kernel, mla_prefill_kernel
from headway.kernels.mla_write import mla_write
from headway.kernels.mla_write.triton import mla_write_kernel
from headway.kernels.registry import Op
from tests.kernels.cards import EIGHT_BITS, SHARED
from tests.kernels.compile_cards import compile_one
from tests.kernels.dry_boot import NoKernel
from tests.kernels.no_gpu import NoDriver

SHAPES = {
    "DeepSeek-V2-Lite": (16, 128, 64, 128, 512),
    "DeepSeek-V3": (128, 128, 64, 128, 512),
    "GLM-4.7-Flash": (20, 192, 64, 256, 512),
    "MiniCPM3": (40, 64, 32, 64, 256),
}
"""Heads, elements of a query that are not rotated and that are, of a value, of a latent."""
KERNELS: tuple[Any, ...] = (
    head_linear_kernel, mla_decode_kernel, mla_gather_kernel, mla_merge_kernel, mla_prefill_kernel, mla_write_kernel,
    index_scores_kernel, index_topk_kernel, index_write_kernel,
)  # fmt: skip
BF16, FP8, ANY = torch.bfloat16, torch.float8_e4m3fn, 2**31 - 1
Sources = dict[tuple[Any, ...], tuple[Any, dict[str, Any]]]


class Keeper:
    """Stands for Triton's compiler and keeps what it was to compile, each specialisation once."""

    def __init__(self) -> None:
        self.sources: Sources = {}

    def compile(self, source: Any, target: Any, options: Any, **others: Any) -> NoKernel:
        constants = tuple(sorted((path, str(value)) for path, value in source.constants.items()))
        key = (source.fn.fn.__name__, constants, tuple(source.signature.items()), options.get("num_stages"))
        self.sources.setdefault(key, (source, options))
        return NoKernel(source.fn.fn.__name__, [])


def empty(*sizes: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(sizes, dtype=kind, device="meta")


Step = tuple[int, int, bool]
DRAFTS: Step = (16, 4, False)
STEPS: tuple[Step, ...] = ((4, 1, False), DRAFTS, (4, 1, True), (8192, 8192, False))
"""Tokens, of the longest row, and whether positions are selected: a decode step, drafts, selected positions, a long prompt."""


def launch(shape: tuple[int, ...], cached: torch.dtype, steps: Sequence[Step]) -> None:
    """Steps over caches of a dtype; a long prompt has a context."""
    heads, nope, rotated, value, rank = shape
    cache = empty(64, 16, rank + rotated, kind=cached)
    kv_b = empty(heads, nope + value, rank, kind=BF16)
    for tokens, longest, sparse in steps:
        selected = empty(4, 2048) if sparse else None
        q = empty(tokens, heads, nope + rotated, kind=BF16)
        table, norm = empty(4096, rotated, kind=torch.float32), empty(rank, kind=BF16)
        latent = mla_write(
            q, empty(tokens, rank + rotated, kind=BF16), empty(tokens), table, norm, 1e-6, empty(tokens), cache
        )
        tables = empty(8, 256), empty(4), empty(5), empty(4)
        most = 16 if longest > 16 else ANY
        q_latent, out = empty(tokens, heads, rank, kind=BF16), empty(tokens, heads, value, kind=BF16)
        head_linear(q[..., :nope], kv_b[:, :nope], q_latent, tables[2], most)
        mixed = mla_decode(q_latent, q, cache, *tables, selected, 0.1, most, longest, 4096)
        head_linear(mixed.transpose(0, 1), kv_b[:, nope:].transpose(1, 2), out, tables[2], most)
        if selected is not None:
            index_q, index_k = empty(tokens, 64, 128, kind=BF16), empty(64, 16, 128, kind=cached)
            norm = empty(128, kind=BF16)
            index_write(index_q, index_q[:, 0], empty(tokens), table, norm, norm, 1e-6, empty(tokens), index_k)
            index_topk(
                index_scores(index_q, empty(tokens, 64, kind=BF16), index_k, *tables, 0, 0.1, 4096),
                empty(tokens),
                selected,
            )
        if longest > 16:
            work, sums = empty(*out.shape, kind=torch.float32), empty(tokens, heads, kind=torch.float32)
            kv = empty(tokens, heads, nope + value, kind=BF16)
            mla_prefill(q, kv, latent[:, rank:], out, None, *tables[2:], 0.1, -1, most, 0)
            mla_prefill(q, kv, latent[:, rank:], work, sums, *tables[2:], 0.1, -1, most, 500)
            piece = mla_gather(cache, *tables, 0, 500, most, BF16)
            kv = empty(500, heads, nope + value, kind=BF16)
            mla_prefill(q, kv, piece[:, rank:], work, sums, *tables[2:], 0.1, 0, most, 500)


def sources(shape: tuple[int, ...], card: int, sparing: bool) -> Sources:
    """What a card with so much shared memory compiles."""
    keeper, room = Keeper(), SHARED[card] << 10
    driver.set_active(NoDriver())
    for kernel in KERNELS:
        kernel.device_caches.clear()  # else what a card before compiled is launched as it is
    with ExitStack() as stack:
        stack.enter_context(patch("triton.compiler.compile", keeper.compile))
        stack.enter_context(patch.object(Op, "__call__", lambda self, *args: self.implementation("cuda")(*args)))
        for module in ("mla_decode.launch", "mla_prefill.triton"):
            stack.enter_context(patch(f"headway.kernels.{module}.shared_limit", lambda device: room))
        members = BLACKWELL_MEMBERS if card // 10 == 10 else MOST_MEMBERS
        stack.enter_context(patch("headway.kernels.mla_decode.launch.most_members", lambda device: members))
        for module in ("mla_decode.launch", "head_linear.triton", "mla_index.triton"):
            stack.enter_context(patch(f"headway.kernels.{module}.num_sms", lambda device: 132))
        eight_bits = card >= EIGHT_BITS
        with torch.inference_mode():
            launch(shape, BF16, [DRAFTS] if sparing and eight_bits else STEPS)
            if eight_bits:
                launch(shape, FP8, STEPS)
    return keeper.sources


def main(names: list[str], cards: list[int], sparing: bool) -> None:
    for card in cards:
        for name in names:
            for (kernel, *_), (source, options) in sources(SHAPES[name], card, sparing).items():
                shared, complaint = compile_one(source, options, card)
                told = {"name": kernel, "shape": name, "capability": card, "shared": shared, "complaint": complaint}
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(
        [each for each in words if each in SHAPES] or list(SHAPES),
        [*map(int, filter(str.isdigit, words))],
        "sparing" in words,
    )
