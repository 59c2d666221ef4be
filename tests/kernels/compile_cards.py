"""Compiles what the plain path launches for every supported GPU, without any of them; run by ``test_cards``.

    python -m tests.kernels.compile_cards [all]

An engine is booted without a GPU, as ``dry_boot`` does it but without Hopper's own kernels, and of each kernel the
specialisation with the largest tiles is kept. Attention is launched for other sizes of heads, too. Each is then compiled for
two cards in turns, with "all" for every one. Prints a line of JSON each: kernel, capability, shared memory, what went wrong.

A process of its own: the tests' has Triton's interpreter switched on.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from headway.core.config import EngineArgs
from headway.engine.boot import build_engine
from headway.kernels.cross_attention import cross_attention
from headway.kernels.cross_kv_write import cross_kv_write
from headway.kernels.cross_rows import cross_rows
from headway.kernels.decode_attention import decode_attention
from headway.kernels.dense_attention import dense_attention
from headway.kernels.dense_rope import dense_rope
from headway.kernels.disentangled_attention import disentangled_attention
from headway.kernels.distance_attention import distance_attention
from headway.kernels.expert_mlp import expert_mlp
from headway.kernels.linear_forms.card import Card
from headway.kernels.media_places import media_places
from headway.kernels.paged_attention import paged_attention
from headway.kernels.place_rows import place_rows
from headway.kernels.route_experts import route_experts
from headway.kernels.segment_pool import MAXIMUM, SUM, WEIGHTED_SUM, segment_pool
from headway.kernels.span_attention import span_attention
from headway.kernels.speech_rules import speech_rules
from headway.kernels.store_rows import store_rows
from headway.kernels.testing import PagedInputs
from headway.kernels.time_warp import time_warp
from tests.kernels.cards import EARLY, SHARED, cards_in_turn
from tests.kernels.dry_boot import MODEL, NoDevice, NoKernel, Recorder, patches, steps
from tests.kernels.no_gpu import NoDriver

SMALL = Card("a card with little shared memory", (8, 6), 84, 7e5)
"""What the linear layers' tiles are chosen for: those of Hopper may be larger."""
HEADS = ((32, 8, 64), (16, 8, 96), (16, 8, 128), (8, 4, 256))
"""(query heads, KV heads, head size)."""
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
ATTENTION = ("decode_kernel", "prefill_kernel", "dense_kernel", "disentangled_kernel")
"""Kernels whose tiles depend on the card."""
FLAGS = ("FP4", "FIRST")
"""Of the kernels of mixtures each kind is compiled: they are different programs."""
Sources = dict[tuple[str, int, int], tuple[float, Any, dict[str, Any]]]
"""(kernel, KB of shared memory it was chosen for, head size of attention or flags) -> size of its tiles, source, options."""


class Keeper(Recorder):
    """Keeps what Triton's compiler was to compile.

    Attributes:
        sources: the largest of each kernel.
        room: KB of shared memory that tiles are chosen for at the moment; 0 where that makes no difference.
    """

    def __init__(self) -> None:
        super().__init__("")
        self.sources: Sources = {}
        self.room = 0

    def compile(self, source: Any, target: Any, options: Any, **others: Any) -> NoKernel:
        name, names = source.fn.fn.__name__, source.fn.arg_names
        constants = {names[path[0]]: value for path, value in source.constants.items()}
        sizes = [value for value in constants.values() if isinstance(value, int) and value > 1]
        kind = (
            constants["D"] if name in ATTENTION else sum(bool(constants.get(flag)) << i for i, flag in enumerate(FLAGS))
        )
        size, key = sum(map(math.log, sizes), 0.0), (name, self.room, kind)
        if key not in self.sources or self.sources[key][0] < size:
            self.sources[key] = (size, source, options)
        return NoKernel(name, self.launched)


@contextmanager
def plain_path(keeper: Keeper) -> Iterator[None]:
    """Operations are their launches in plain Triton; nothing is computed."""
    driver.set_active(NoDriver())
    nowhere = lambda device: False  # noqa: E731
    gluon = (
        "headway.kernels.paged_attention.hopper.early_decode.runs_gluon",
        "headway.kernels.paged_attention.hopper.overlap.runs_gluon",
    )
    with ExitStack() as stack:
        for each in (*patches(keeper), *(patch(name, nowhere) for name in gluon)):
            stack.enter_context(each)
        stack.enter_context(
            patch("headway.kernels.paged_attention.launch.shared_limit", lambda device: keeper.room << 10)
        )
        stack.enter_context(patch("headway.kernels.expert_mlp.triton.shared_limit", lambda device: keeper.room << 10))
        stack.enter_context(patch("headway.kernels.skinny_linear.tiles.card_of", lambda device: SMALL))
        yield


def launch_attention(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """Decoding rows, and prompts of some and of many tokens."""

    def empty(*sizes: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=kind, device="meta")

    cache, table = empty(64, 16, kv_heads, size, kind=dtype), empty(4096, size, kind=torch.float32)
    for tokens, decoding in ((4, 4), (200, 0), (20_000, 0)):
        made = PagedInputs(
            q=empty(tokens, heads, size, kind=dtype), k_cache=cache, v_cache=cache, block_tables=empty(8, 64),
            row_slots=empty(4), query_start=empty(5), seq_lens=empty(4), arrivals=empty(4, kv_heads),
            num_decode_rows=decoding, max_query_len=1 if decoding else tokens, max_seq_len_bound=4096,
        )  # fmt: skip
        paged_attention(*made.arguments(size**-0.5))
        paged_attention(*made.arguments(size**-0.5, window=512, soft_cap=30.0))
        by_head = empty(heads, kind=torch.float32)
        paged_attention(*made.arguments(size**-0.5, window=128, sinks=by_head))
        paged_attention(*made.arguments(size**-0.5, chunk=8192, slopes=by_head))
        if decoding:
            norm, width = empty(size, kind=dtype), (heads + 2 * kv_heads) * size
            more = (empty(tokens), table, norm, norm, 1e-6, empty(tokens), cache, cache, heads)
            tables = made.arguments(size**-0.5)[3:8]
            decode_attention(empty(tokens, width, kind=dtype), *more, *tables, size**-0.5, 0, 0.0, 4096)


def launch_encoders(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """What models that see texts both ways launch, and poolers."""

    def empty(*sizes: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=kind, device="meta")

    width = heads + 2 * kv_heads
    for tokens, longest in ((40, 20), (8192, 512)):
        qkv, starts = empty(tokens, width * size, kind=dtype), empty(65)
        bias, table = empty(heads, 1023, kind=torch.float32), empty(4096, size, kind=torch.float32)
        numbers = (heads, kv_heads, size**-0.5)
        dense_attention(qkv, starts, None, *numbers, -1, 0.0, longest)
        dense_attention(qkv, starts, bias, *numbers, 64, 30.0, longest)
        norm = empty(size, kind=dtype)
        dense_rope(qkv, empty(tokens), table, norm, norm, 1e-6, heads, kv_heads)
        distances, three = empty(512, heads * size, kind=dtype), empty(tokens, 3 * heads * size, kind=dtype)
        disentangled_attention(three, starts, distances, distances, empty(1023), heads, size**-0.5, longest)
        launch_cross(tokens, heads, kv_heads, size, dtype)
        for kind in (SUM, MAXIMUM, WEIGHTED_SUM):
            segment_pool(empty(tokens, heads * size, kind=dtype), starts, empty(64), empty(64), kind)


def launch_mixtures(dtype: torch.dtype) -> None:
    """Routing and experts for one token, for some and for many; in 16 bits and in MXFP4, with biases and without."""

    def empty(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=kind, device="meta")

    def experts(count: int, rows: int, columns: int, fp4: bool) -> tuple[torch.Tensor | None, ...]:
        bias = empty(count, rows)
        if not fp4:
            return empty(count, rows, columns), bias, None
        packed = empty(count, rows, columns // 2, kind=torch.uint8)
        return packed, bias, empty(count, rows, columns // 32, kind=torch.uint8)

    shapes = (
        (128, 8, 2048, 768, False),
        (32, 4, 2880, 2880, True),
        (60, 6, 2048, 1408, False),
        (8, 2, 4096, 14336, False),
    )
    for count, top_k, hidden, inner, fp4 in shapes:
        for tokens in (1, 16, 256, 8192):
            x, live = empty(tokens, hidden), empty(tokens, kind=torch.int32)
            groups = (8, 4, 2) if count == 128 else (1, 1, 1)
            correction = empty(count, kind=torch.float32)
            route_experts(
                x, empty(count, hidden), None, correction, live, top_k, "sigmoid", True, 2.5, *groups, 0.0, count % 3
            )
            if top_k == 2:
                route_experts(x, empty(count, hidden), None, None, live, 2, "sparsemixer", False, 1.0, 1, 1, 1, 0.02, 0)
            ids, weights = empty(tokens, top_k, kind=torch.int32), empty(tokens, top_k, kind=torch.float32)
            act = "clamped_swiglu" if fp4 else "silu"
            ins, outs = experts(count, 2 * inner, hidden, fp4), experts(count, hidden, inner, fp4)
            expert_mlp(x, ids, weights, *ins, *outs, act, True, 7.0, 1.7, False)


def launch_sight(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """What steps with pictures launch beside the others."""

    def empty(*sizes: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=kind, device="meta")

    cache, x = empty(64, 16, kv_heads, size, kind=dtype), empty(600, 2048, kind=dtype)
    features = empty(4096, 4 * 2048, kind=dtype)
    media_places(empty(600), empty(5), empty(4), empty(8, 2 + 6 * 256), empty(8, 256), True)
    store_rows(features, empty(256), empty(256, 4 * 2048, kind=dtype))
    for add in (False, True):
        place_rows(x, features, empty(600), 2048, add)
    for longest, window, soft_cap in ((1, 0, 0.0), (600, 0, 0.0), (600, 512, 30.0)):
        q = empty(600, heads, size, kind=dtype)
        tables = (empty(8, 64), empty(4), empty(5), empty(4), empty(600))
        span_attention(q, cache, cache, *tables, size**-0.5, window, soft_cap, longest, 4096)


def launch_cross(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """What models with an encoder and a decoder launch."""

    def empty(*sizes: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=kind, device="meta")

    cache, own = (empty(64, 16, number, size, kind=dtype) for number in (kv_heads, heads))
    q, slots, starts = empty(tokens, heads, size, kind=dtype), empty(tokens), empty(tokens + 1)
    cross_rows(empty(65), empty(64), empty(64), empty(64), slots, empty(tokens))
    cross_kv_write(empty(tokens, 2 * kv_heads * size, kind=dtype), slots, cache, cache)
    cross_attention(q, cache, cache, empty(64, 94), slots, starts, slots, empty(tokens, kv_heads), size**-0.5, 1500)
    bias = empty(heads, 512, kind=torch.float32)
    distance_attention(q, own, own, empty(64, 94), empty(64), empty(65), empty(64), bias, 1.0, 512)
    rules = (empty(64), empty(64, 448), empty(64), empty(64), empty(64, 6), empty(64, 256))
    speech_rules(empty(64, 51866, kind=dtype), *rules)
    time_warp(empty(447, 1500, kind=torch.float32))


def sources() -> Sources:
    """What to compile."""
    keeper = Keeper()
    args = EngineArgs(
        model=str(MODEL), load_format="dummy", dtype="bfloat16", max_model_len=40960, kv_cache_memory_bytes=2**33
    )
    with plain_path(keeper):
        keeper.room = min(SHARED.values())
        core = build_engine(args, progress=False, device=NoDevice())
        with torch.inference_mode():
            steps(core._runner.executor.body)
        others = {(name, 0, 0): found for (name, _, _), found in keeper.sources.items() if name not in ATTENTION}
        keeper.sources.clear()
        for keeper.room in sorted(set(SHARED.values())):
            for heads, kv_heads, size in HEADS:
                launch_attention(heads, kv_heads, size, torch.bfloat16)
                if size in (HEADS[0][2], HEADS[-1][2]):  # between them nothing is chosen anew
                    launch_encoders(heads, kv_heads, size, torch.bfloat16)
                    launch_sight(heads, kv_heads, size, torch.bfloat16)
            launch_mixtures(torch.bfloat16)
    return {**others, **keeper.sources}


def compile_one(source: Any, options: dict[str, Any], capability: int) -> tuple[int, str]:
    """(bytes of shared memory, what went wrong)."""
    early = capability >= EARLY and "EARLY" in source.fn.arg_names
    constants = dict(source.constants)
    if "EARLY" in source.fn.arg_names:
        constants[(source.fn.arg_names.index("EARLY"),)] = early
    source.constants = constants
    chosen = {name: options[name] for name in LAUNCH_OPTIONS if name in options}  # the rest is the card's
    chosen["launch_pdl"] = early
    try:
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
    except Exception as error:
        return 0, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return built.metadata.shared, ""


def compile_share(work: list[tuple[str, Any, dict[str, Any], int]]) -> None:
    """Compile and tell, in a fork: sources cannot be sent to other processes."""
    for name, source, options, capability in work:
        shared, complaint = compile_one(source, options, capability)
        told = {"name": name, "capability": capability, "shared": shared, "complaint": complaint}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def main(everything: bool) -> None:
    found = sorted(sources().items(), key=lambda each: each[0][1])
    turns = {key: cards_in_turn(i) for i, key in enumerate(sorted({(name, kind) for (name, _, kind), _ in found}))}
    work = []
    for capability, shared in SHARED.items():
        # Tiles that more room does not change are not compiled again for it: what counts is the largest room that fits.
        chosen = {(name, kind): kept for (name, room, kind), kept in found if room <= shared}
        work += [
            (name, source, options, capability)
            for (name, kind), (_, source, options) in chosen.items()
            if everything or capability in turns[name, kind]
        ]
    shares = len(os.sched_getaffinity(0))
    forks = [get_context("fork").Process(target=compile_share, args=(work[i::shares],)) for i in range(shares)]
    for each in forks:
        each.start()
    for each in forks:
        each.join()
    sys.exit(any(each.exitcode for each in forks))


if __name__ == "__main__":
    main("all" in sys.argv[1:])
