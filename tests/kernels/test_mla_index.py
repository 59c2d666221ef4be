"""The indexer's operations: the references against what they mean written out, the kernels against the references, ties by
themselves."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from headway.kernels.mla_index import index_scores, index_topk, index_write
from headway.kernels.testing import (
    assert_close,
    assert_same_cache,
    interpreter_loops,
    kernel_dtypes,
    make_cos_sin,
    make_random,
)
from tests.kernels.latent_cases import SIZES, kernel, on, scene

EPS, SCALE, HEADS, SIZE, ROTATED = 1e-6, 0.2, 5, 20, 8
SLOTS = [9, -1, 31, 8, 1000, 25]


def write(
    implementation: Callable[..., None], dtype: torch.dtype, device: str, cached: torch.dtype | None = None
) -> list[torch.Tensor]:
    tokens = len(SLOTS)
    q = make_random(tokens, HEADS, SIZE, dtype=dtype, device=device)
    k = make_random(tokens, SIZE + 3, dtype=dtype, device=device, seed=1)[:, :SIZE]
    positions = torch.tensor([0, 5, 31, 99, 7, 2], dtype=torch.int32, device=device)
    weight, bias = (make_random(SIZE, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    keys = torch.full((4, 8, SIZE), float("nan"), device=device).to(cached or dtype)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    with interpreter_loops():
        implementation(q, k, positions, make_cos_sin(32, ROTATED, device), weight, bias, EPS, slots, keys)
    return [q, keys]


def test_writing(device: str) -> None:
    for dtype in kernel_dtypes():
        for mine, theirs in zip(
            write(kernel(index_write), dtype, device), write(index_write.reference, dtype, device), strict=True
        ):
            assert_same_cache(mine, theirs)
    eight = torch.float8_e4m3fn
    assert_same_cache(
        write(kernel(index_write), torch.float32, device, eight)[1],
        write(index_write.reference, torch.float32, device, eight)[1],
    )


@pytest.mark.parametrize("sms", [1, 40])
def test_scores(sms: int, device: str) -> None:
    for dtype in kernel_dtypes():
        made = scene(SIZES[0], device, dtype)
        size, first, number = made.latents.shape[2], 4, 30
        q = make_random(number, HEADS, size, dtype=dtype, device=device, seed=2)
        weights = make_random(number, HEADS + 4, dtype=dtype, device=device, seed=3)[:, :HEADS]
        arguments = (q, weights, made.latents, *made.tables, first, SCALE, made.bound)
        with (
            patch("headway.kernels.mla_index.triton.num_sms", lambda device: sms),
            patch("headway.kernels.mla_index.triton.LEAST_KEYS", 8),
        ):
            found = on(kernel(index_scores), *arguments)
        expected = on(index_scores.reference, *arguments)
        starts, lens = made.query_start.tolist(), made.seq_lens.tolist()
        owner = {token: row for row in range(len(lens)) for token in range(starts[row], starts[row + 1])}
        for nth in range(number):
            row = owner[first + nth]
            if lens[row]:
                sees = lens[row] - (starts[row + 1] - first - nth) + 1
                assert_close(found[nth, :sees], expected[nth, :sees])
                keys = made.latents[made.block_tables[int(made.row_slots[row])].long()].flatten(0, 1)[:sees].double()
                written = (torch.relu(q[nth].double() @ keys.T * SCALE) * weights[nth].double()[:, None]).sum(0)
                assert_close(expected[nth, :sees].to(dtype), written.to(dtype))


def best(scores: list[float], position: int, number: int) -> list[int]:
    """By the definition, in Python."""
    seen = sorted(range(position + 1), key=lambda i: (-scores[i], i))[:number]
    return sorted(seen) + [-1] * (number - len(seen))


@pytest.mark.parametrize("which", ["reference", "kernel"])
@pytest.mark.parametrize("number", [1, 7, 64, 700])
def test_best_positions_and_ties(which: str, number: int, device: str) -> None:
    """Random scores, scores of a few values, all alike, and those that only the last bits tell apart."""
    generator = torch.Generator().manual_seed(1)
    size = 600
    rows = [
        torch.randn(size, generator=generator),
        torch.randint(0, 3, (size,), generator=generator).float(),
        torch.zeros(size),
        1.0 + torch.randint(0, 5, (size,), generator=generator) * 2.0**-23,
        torch.where(torch.rand(size, generator=generator) < 0.9, 0.0, torch.randn(size, generator=generator)),
        torch.where(torch.arange(size) % 2 == 0, 0.0, -0.0),
        torch.where(torch.arange(size) % 3 == 0, float("-inf"), 1.0),
    ]
    positions = [599, 300, 450, 599, 63, 599, 200]
    scores = torch.stack(rows).to(device)
    for row, position in enumerate(positions):
        scores[row, position + 1 :] = 9e9  # later tokens, which nobody may see
    selected = torch.full((len(rows), number), 12345, dtype=torch.int32, device=device)
    implementation = index_topk.reference if which == "reference" else kernel(index_topk)
    places = torch.tensor(positions, dtype=torch.int32, device=device)
    with patch("headway.kernels.mla_index.triton_topk.BLOCK", 256), interpreter_loops():
        implementation(scores, places, selected)
    for row, position in enumerate(positions):
        wanted = best([value + 0.0 for value in scores[row].tolist()], position, number)
        assert selected[row].tolist() == wanted, row


def test_nan_is_least(device: str) -> None:
    scores = torch.tensor([[1.0, float("nan"), 0.5, float("nan"), -5.0]], device=device)
    for implementation in (index_topk.reference, kernel(index_topk)):
        selected = torch.zeros(1, 3, dtype=torch.int32, device=device)
        with interpreter_loops():
            implementation(scores, torch.tensor([4], dtype=torch.int32, device=device), selected)
        assert selected.tolist() == [[0, 2, 4]]
