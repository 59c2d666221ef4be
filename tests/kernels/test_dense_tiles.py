"""Attention over whole rows in Gluon: its code on the machine of ``gluon_warps``, and on Hopper the kernels."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from headway.core.ints import cdiv
from headway.kernels.dense_attention import reference
from headway.kernels.hopper import runs_gluon
from headway.kernels.testing import assert_close, make_random

if TYPE_CHECKING:
    from headway.kernels.dense_attention.hopper.launch import Form

FORMS = [(0, 64, 2, 128), (0, 128, 2, 168), (1, 64, 3, 80), (1, 128, 2, 128), (2, 128, 2, 168)]
CASES = [([1, 63, 130, 0, 257, 64], 4, 2, 64), ([510], 2, 2, 64), ([128, 127], 2, 1, 128)]
"""(lengths of rows, heads, KV heads, size of a head)."""


def inputs(lengths: list[int], heads: int, kv_heads: int, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, keys and values, with padding that is no number, and where rows begin."""
    qkv = make_random(sum(lengths) + 40, (heads + 2 * kv_heads) * size, dtype=torch.float16, device=device)
    qkv[sum(lengths) :] = torch.nan
    return qkv, torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def run_on_machine(
    form: Form, qkv: torch.Tensor, starts: torch.Tensor, heads: int, kv_heads: int, longest: int
) -> torch.Tensor:
    """What the kernel writes, one program after the other."""
    from headway.kernels.dense_attention.hopper import triton
    from tests.kernels.gluon_pointer import Pointer
    from tests.kernels.gluon_warps import Descriptor, Machine

    size = qkv.shape[1] // (heads + 2 * kv_heads)
    out = torch.full((len(qkv), heads * size), torch.nan, dtype=qkv.dtype)
    descriptors = [Descriptor(qkv, (rows, size)) for rows in (64, form.keys)]
    arguments = (*descriptors, Pointer(starts), Pointer(out.view(-1)), len(qkv), size**-0.5, heads, kv_heads)
    tiles = cdiv(longest, 64 * max(form.groups, 1))
    for place in product(range(tiles), range(heads), range(len(starts) - 1)):
        machine = Machine(triton, place, 1, sum(place))
        if form.groups:
            machine.names["dense_tiles_kernel"](*arguments, form.groups, form.stages, form.registers)
        else:
            machine.specialize([(machine.names["dense_alone_kernel"], (*arguments, form.stages))], [], [])
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "size"), CASES)
def test_equals_reference_on_the_machine(
    form: tuple[int, int, int, int], lengths: list[int], heads: int, kv_heads: int, size: int
) -> None:
    pytest.importorskip("triton.experimental.gluon", reason="the kernels' modules import Gluon")
    from headway.kernels.dense_attention.hopper.launch import Form

    qkv, starts = inputs(lengths, heads, kv_heads, size, "cpu")
    found = run_on_machine(Form(*form), qkv, starts, heads, kv_heads, max(lengths))
    tokens = sum(lengths)
    numbers = (heads, kv_heads, size**-0.5, -1, 0.0, max(lengths))
    assert_close(found[:tokens], reference.dense_attention(qkv[:tokens], starts, None, *numbers))
    assert bool(found[tokens:].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "size"), CASES)
def test_equals_reference(
    form: tuple[int, int, int, int], lengths: list[int], heads: int, kv_heads: int, size: int
) -> None:
    if not torch.cuda.is_available() or not runs_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper's warpgroup products")
    from headway.kernels.dense_attention.hopper.launch import Form, launch_dense

    qkv, starts = inputs(lengths, heads, kv_heads, size, "cuda")
    tokens, scale, longest = sum(lengths), size**-0.5, max(lengths)
    wanted = reference.dense_attention(qkv[:tokens], starts, None, heads, kv_heads, scale, -1, 0.0, longest)
    for _ in range(20):
        out = torch.full((len(qkv), heads * size), torch.nan, dtype=qkv.dtype, device="cuda")
        launch_dense(Form(*form), qkv, starts, out, heads, kv_heads, scale, longest)
        assert_close(out[:tokens], wanted)
        assert bool(out[tokens:].isnan().all())
