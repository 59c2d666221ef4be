"""Decode attention over latents in Gluon: its code on the machine of ``gluon_warps``, where it serves, and on Hopper itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.hopper import runs_gluon
from headway.kernels.mla_decode import mla_decode
from headway.kernels.testing import assert_close, interpreter_loops
from tests.kernels.latent_cases import Scene, Sizes, scene, tokens_of

pytest.importorskip("triton.experimental.gluon", reason="the kernel's module imports Gluon")

SCALE = 0.05
ANY = 2**31 - 1
DECODE = [(1, 200), (1, 0), (1, 1), (1, 64), (1, 65), (1, 530), (1, 128)]
DRAFTS = [(3, 200), (3, 3), (1, 0), (4, 64), (2, 65), (4, 130)]
MIXED = [(1, 70), (9, 9), (2, 130), (70, 70), (1, 300)]
CASES: list[tuple[Sequence[tuple[int, int]], int, int, int]] = [
    (DECODE, 16, 5, ANY), (DECODE, 5, 1, ANY), (DRAFTS, 16, 7, ANY), (MIXED, 4, 40, 2), ([(1, 0)], 16, 3, ANY),
    (DECODE[:3], 70, 6, ANY), ([(1, 5000)], 4, 132, ANY),
]  # fmt: skip
"""(tokens and context of rows, heads, programs, most queries)."""


def sizes(heads: int, block: int = 16) -> Sizes:
    return Sizes(heads, 64, 64, 128, 256, block)


def made_of(rows: Sequence[tuple[int, int]], heads: int, device: str, dtype: torch.dtype, block: int = 16) -> Scene:
    return scene(sizes(heads, block), device, dtype, rows, bound=max(context for _, context in rows) + 40)


def arguments(made: Scene, most: int) -> tuple[Any, ...]:
    return (made.q_latent, made.q, made.latents, *made.tables, None, SCALE, most, made.max_query_len, made.bound)


def wanted(made: Scene, most: int) -> torch.Tensor:
    copied = replace(made, latents=made.latents.nan_to_num())
    return mla_decode.reference(*arguments(copied, most))


def run_on_machine(made: Scene, programs: int, most: int, seed: int = 0) -> torch.Tensor:
    """What the kernels write, one program after the other; rows that are shared are put together in Triton's interpreter."""
    from headway.kernels.mla_decode.hopper import triton
    from headway.kernels.mla_decode.hopper.launch import KEYS, STAGES
    from headway.kernels.mla_decode.hopper.triton_merge import merge_shares_kernel
    from tests.kernels.gluon_pointer import Pointer
    from tests.kernels.gluon_warps import Descriptor, Machine

    heads, rank, width = made.q_latent.shape[1], made.q_latent.shape[2], made.latents.shape[2]
    longest = min(made.max_query_len, most)
    block_h = min(next_power_of_2(heads), 64)
    block_q = min(next_power_of_2(longest), 64 // block_h)
    parts, blocks, num_rows = cdiv(longest, block_q), cdiv(heads, block_h), len(made.row_slots)
    out = torch.full((heads, len(made.q), rank), torch.nan, dtype=made.q.dtype)
    partial = torch.full((blocks * programs, 2, block_q * block_h, rank), torch.nan)
    top = torch.full((blocks * programs, 2, block_q * block_h), torch.nan)
    queries, block_size = (block_q, block_h, 64), made.latents.shape[1]
    flat = made.latents.reshape(-1, width)
    descriptors = (
        Descriptor(made.q_latent, queries), Descriptor(made.q[..., -64:], queries),
        Descriptor(flat, (min(block_size, KEYS), 64)),
    )  # fmt: skip
    slots, table_width = made.block_tables.shape
    tables = (made.row_slots, made.query_start, made.seq_lens)
    pointers = [Pointer(each.view(-1)) for each in (out, partial, top, made.block_tables, *tables)]
    numbers = (num_rows, len(made.q), slots, len(made.latents), table_width, most, SCALE, block_size)
    kind = (heads, rank, block_size, parts, block_q, block_h, KEYS, STAGES, False)
    for head_block in range(blocks):
        for program in range(programs):
            machine = Machine(triton, (head_block, program), programs, seed + program)
            machine.names["shared_latents_kernel"](*descriptors, *pointers, *numbers, *kind)
    with interpreter_loops():
        merge_shares_kernel[(heads, num_rows * parts * block_q)](
            out, partial, top, *tables, num_rows, len(made.q), slots, table_width, programs, most, RANK=rank,
            BS=block_size, PARTS=parts, BLOCK_Q=block_q, BLOCK_H=block_h, KEYS=KEYS, EARLY=False,
        )  # fmt: skip
    return out


@pytest.mark.parametrize(("rows", "heads", "programs", "most"), CASES)
def test_equals_reference_on_the_machine(rows: Sequence[tuple[int, int]], heads: int, programs: int, most: int) -> None:
    made = made_of(rows, heads, "cpu", torch.float16)
    found, expected = run_on_machine(made, programs, most), wanted(made, most)
    mine = tokens_of(made, lambda count, length: count <= most)
    assert_close(found[:, mine], expected[:, mine])


def test_rows_without_a_slot_give_zeros_on_the_machine() -> None:
    made = made_of([(1, 100), (1, 70), (1, 30)], 4, "cpu", torch.float16)
    made.row_slots[1] = 99
    found = run_on_machine(made, 3, ANY)
    assert not found[:, 1].any()
    assert_close(found[:, [0, 2]], wanted(made, ANY)[:, [0, 2]])


def test_serves_16_bits_that_copies_can_begin_at() -> None:
    from headway.kernels.mla_decode.hopper.launch import serves

    def asked(width: int = 320, dtype: torch.dtype = torch.bfloat16, cached: torch.dtype | None = None, block: int = 16,
              apart: int = 0) -> bool:  # fmt: skip
        q, q_latent = torch.zeros(3, 4, 128, dtype=dtype), torch.zeros(3, 4, 256 + apart, dtype=dtype)[..., :256]
        return serves(q_latent, q, torch.zeros(5, block, width, dtype=cached or dtype))

    assert asked() and asked(dtype=torch.float16) and asked(block=128) and asked(apart=8)
    assert not asked(dtype=torch.float32) and not asked(cached=torch.float8_e4m3fn)
    assert not asked(width=288) and not asked(width=256) and not asked(block=4) and not asked(apart=4)


@pytest.fixture
def hopper() -> str:
    if not torch.cuda.is_available() or not runs_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper's warpgroup products")
    return "cuda"


WIDE = [
    (DECODE, 16), (DECODE, 128), (DECODE, 20), (DRAFTS, 16), (DRAFTS, 128), (MIXED, 16), ([(1, 8000)], 16),
    ([(1, 40 + 97 * (row % 23)) for row in range(300)], 16), ([(2, 2 + 61 * row) for row in range(70)], 64),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("rank", [256, 512])
@pytest.mark.parametrize(("rows", "heads"), WIDE)
def test_equals_reference(rows: Sequence[tuple[int, int]], heads: int, rank: int, block: int, hopper: str) -> None:
    """Within rounding, the same bits each time, also where memory behind rows' ends holds NaN."""
    made = scene(Sizes(heads, 64, 64, 128, rank, block), hopper, torch.bfloat16, rows,
                 bound=max(context for _, context in rows) + 40)  # fmt: skip
    expected, found = wanted(made, 16), mla_decode(*arguments(made, 16))
    mine = tokens_of(made, lambda count, length: count <= 16)
    assert_close(found[:, mine], expected[:, mine])
    for _ in range(10):
        assert torch.equal(mla_decode(*arguments(made, 16))[:, mine], found[:, mine]), "a moving result would be a race"
