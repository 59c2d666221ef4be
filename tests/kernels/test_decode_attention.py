"""``decode_attention`` against the separate ops: outputs, the written cache, and counters left as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headway.kernels.decode_attention import decode_attention, serves
from headway.kernels.testing import assert_close, interpreter_loops, kernel_dtypes, make_cos_sin, make_paged_inputs
from headway.kernels.testing import make_random as random

CONTEXTS = [1, 37, 0, 130, 64, 65, 2]


@pytest.fixture(autouse=True)
def loops() -> Iterator[None]:
    with interpreter_loops():
        yield


def arguments(
    contexts: list[int], device: str, *, dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (6, 2),
    size: int = 16, norms: bool = True, window: int = 0, soft_cap: float = 0.0, pad_rows: int = 0, bound: int = 160,
) -> list[Any]:  # fmt: skip
    paged = make_paged_inputs(
        [(1, context) for context in contexts], num_decode_rows=len(contexts), heads=heads, size=size, block_size=8,
        dtype=dtype, device=device, pad_rows=pad_rows, pad_tokens=pad_rows, bound=bound, heads_first=True,
    )  # fmt: skip
    rows, width = len(contexts) + pad_rows, (heads[0] + 2 * heads[1]) * size
    qkv = random(rows, width + 8, dtype=dtype, device=device, seed=7)[:, :width]  # rows may be strided
    last = (paged.seq_lens.long() - 1).clamp(min=0)
    kv_slots = paged.block_tables[paged.row_slots.long().clamp(min=0), last // 8].long() * 8 + last % 8
    norm = [random(size, dtype=dtype, device=device, seed=seed) if norms else None for seed in (8, 9)]
    return [
        qkv, paged.k_cache, paged.v_cache, paged.block_tables, paged.row_slots, paged.seq_lens,
        torch.where(paged.seq_lens > 0, kv_slots, -1).int(), make_cos_sin(bound, size, device), *norm,
        torch.zeros(rows * heads[1], dtype=torch.int32, device=device), heads[0], 1e-5, size**-0.5, window, soft_cap,
        bound,
    ]  # fmt: skip


def compare(args: list[Any], launches: int = 1) -> None:
    mine, theirs = list(args), [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
    for caches in (mine, theirs):
        caches[1], caches[2] = caches[1].clone(), caches[2].clone()
    expected = decode_attention.reference(*theirs)
    for _ in range(launches):
        actual = decode_attention.implementation("cuda")(*mine)
        assert_close(actual.cpu(), expected)
    for ours, reference in zip(mine[1:3], theirs[1:3], strict=True):
        left, right = ours.cpu(), reference
        assert torch.equal(left.isnan(), right.isnan()), "only the new tokens' places may change"
        assert_close(left.nan_to_num(), right.nan_to_num())
    assert not mine[10].any(), "counters must be zero for the next launch"


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("norms", [True, False])
def test_equals_the_separate_ops(dtype: torch.dtype, norms: bool, device: str) -> None:
    compare(arguments(CONTEXTS, device, dtype=dtype, norms=norms, pad_rows=2), launches=2)


@pytest.mark.parametrize("window", [1, 2, 9, 64, 65])
def test_windows(window: int, device: str) -> None:
    compare(arguments(CONTEXTS, device, window=window))


def test_soft_cap(device: str) -> None:
    compare(arguments(CONTEXTS, device, soft_cap=1.5))


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (20, 1)])
def test_groups(heads: tuple[int, int], device: str) -> None:
    compare(arguments([70, 3], device, heads=heads, size=32))


def test_one_long_row_is_split_and_put_together(device: str) -> None:
    compare(arguments([300], device, heads=(2, 1), bound=320), launches=2)


def test_hostile_indices_stay_inside(device: str) -> None:
    """Block ids, KV slots and lengths beyond their tables read block 0 or nothing, and write nothing."""
    args = arguments([40, 20], device, norms=False)
    args[1].nan_to_num_(), args[2].nan_to_num_()
    args[3].fill_(2**31 - 1)
    args[6] = torch.tensor([-5, 2**31 - 1], dtype=torch.int32, device=device)
    before = args[1].clone()
    decode_attention.implementation("cuda")(*args)
    assert torch.equal(args[1], before)


def test_no_rows(device: str) -> None:
    args = arguments([5], device)
    for i in (0, 4, 5, 6):
        args[i] = args[i][:0]
    assert decode_attention.implementation("cuda")(*args).shape == (0, 96)


def test_which_heads_it_serves() -> None:
    assert serves(128, 128) and serves(64, 64)
    assert not serves(80, 80) and not serves(128, 64) and not serves(8, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_sizes_of_a_model(rows: int, device: str) -> None:
    contexts = [1 + (97 * row) % 900 for row in range(rows)]
    compare(arguments(contexts, device, dtype=torch.bfloat16, heads=(16, 8), size=128, bound=4096), launches=5)
