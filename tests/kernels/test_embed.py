"""``embed``: rows of a table by id."""

from __future__ import annotations

import inspect

import pytest
import torch

from headway.kernels.embed import embed
from headway.kernels.testing import kernel_dtypes, make_random


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("size", [1, 63, 1024, 1030])
@pytest.mark.parametrize("tokens", [0, 1, 8, 33])
def test_kernel_equals_reference(tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    weight = make_random(50, size, dtype=dtype, device=device, seed=1)
    ids = torch.randint(0, 50, (tokens,), dtype=torch.int32, generator=torch.Generator().manual_seed(2)).to(device)
    found = embed.implementation("cuda")(ids, weight)
    assert torch.equal(found, weight[ids.long()]) and torch.equal(found, embed.reference(ids, weight))


def test_rows_may_be_scaled(device: str) -> None:
    """Rounded once."""
    weight = make_random(9, 20, dtype=torch.float16, device=device, seed=1)
    ids = torch.tensor([3, 8, 3], dtype=torch.int32, device=device)
    for run in (embed.implementation("cuda"), embed.reference):
        assert torch.equal(run(ids, weight, 33.75), weight[[3, 8, 3]] * 33.75)


def test_ids_outside_the_table_read_its_ends(device: str) -> None:
    weight = make_random(9, 16, dtype=torch.float32, device=device, seed=1)
    ids = torch.tensor([-1, 9, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    for run in (embed.implementation("cuda"), embed.reference):
        assert torch.equal(run(ids, weight), weight[[0, 8, 8, 0]])


def test_rows_apart_in_memory(device: str) -> None:
    weight = make_random(9, 32, dtype=torch.float32, device=device, seed=1)[:, :20]
    ids = torch.tensor([3, 8, 3], dtype=torch.int32, device=device)
    assert torch.equal(embed.implementation("cuda")(ids, weight), weight[[3, 8, 3]])


def test_meta_gives_shapes() -> None:
    meta = embed(
        torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(9, 20, dtype=torch.bfloat16, device="meta")
    )
    assert meta.shape == (3, 20) and meta.dtype is torch.bfloat16


def test_what_follows_starts_behind_its_wait() -> None:
    """Kernels of the forward pass read the step's index tensors before they wait: their writer must have ended."""
    from headway.kernels.embed.triton import embed_kernel

    source = inspect.getsource(embed_kernel.fn)
    places = [source.index(text) for text in ("wait_for_inputs(EARLY)", "start_next(EARLY)", "tl.load(")]
    assert places == sorted(places)
