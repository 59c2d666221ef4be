"""``mla_write``: the reference against norms and complex rotation in f64, the kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headway.kernels.mla_write import mla_write
from headway.kernels.testing import (
    assert_close,
    assert_same_cache,
    interpreter_loops,
    kernel_dtypes,
    make_cos_sin,
    make_random,
)
from tests.kernels.latent_cases import SIZES, Sizes, kernel

EPS = 1e-5
SLOTS = [9, -1, 31, 8, 1000, 25]
cases = pytest.mark.parametrize("sizes", SIZES)


def arguments(sizes: Sizes, dtype: torch.dtype, device: str, cached: torch.dtype | None = None) -> list[torch.Tensor]:
    tokens, width = len(SLOTS), sizes.rank + sizes.rotated
    joined = make_random(tokens, sizes.heads * (sizes.nope + sizes.rotated) + width, dtype=dtype, device=device)
    q, kv = joined.split((joined.shape[1] - width, width), dim=1)
    cache = torch.full((4, sizes.block, width), float("nan"), dtype=cached or dtype, device=device)
    positions = torch.tensor([0, 5, 31, 99, 7, 2], dtype=torch.int32, device=device)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    norm = make_random(sizes.rank, dtype=dtype, device=device, seed=3)
    return [
        q.unflatten(1, (sizes.heads, -1)),
        kv,
        positions,
        make_cos_sin(32, sizes.rotated, device),
        norm,
        slots,
        cache,
    ]


def run(
    implementation: Callable[..., torch.Tensor], sizes: Sizes, dtype: torch.dtype, device: str,
    cached: torch.dtype | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    q, kv, positions, table, norm, slots, cache = arguments(sizes, dtype, device, cached)
    with interpreter_loops():
        latent = implementation(q, kv, positions, table, norm, EPS, slots, cache)
    return [latent, q.clone(), cache]


@cases
def test_reference_equals_complex_rotation(sizes: Sizes) -> None:
    q, kv, positions, table, norm, _, _ = arguments(sizes, torch.float32, "cpu")
    q, kv = q.clone(), kv.clone()
    latent, rotated, cache = run(mla_write.reference, sizes, torch.float32, "cpu")
    half = sizes.rotated // 2
    place = positions.clamp(max=31).long()
    turn = torch.complex(table[place, :half].double(), table[place, half:].double())

    def turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        made = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
        return torch.cat([made.real, made.imag], dim=-1).float()

    assert_close(rotated[..., sizes.nope :], turned(q[..., sizes.nope :], turn[:, None]))
    assert torch.equal(rotated[..., : sizes.nope], q[..., : sizes.nope])
    x = kv[:, : sizes.rank].double()
    normed = x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * norm
    assert_close(latent, torch.cat([normed.float(), turned(kv[:, sizes.rank :], turn)], dim=1))
    flat = cache.flatten(0, 1)
    known = [(token, slot) for token, slot in enumerate(SLOTS) if 0 <= slot < len(flat)]
    for token, slot in known:
        assert torch.equal(flat[slot], latent[token])
    assert int(flat.isnan().any(1).sum()) == len(flat) - len(known)


@cases
def test_kernel_equals_reference(sizes: Sizes, device: str) -> None:
    for dtype in kernel_dtypes():
        expected = run(mla_write.reference, sizes, dtype, device)
        for mine, theirs in zip(run(kernel(mla_write), sizes, dtype, device), expected, strict=True):
            assert_same_cache(mine, theirs)


def test_eight_bits(device: str) -> None:
    """What is returned is what was cached, and what is too large is cached as the largest."""
    dtype = torch.float8_e4m3fn
    expected = run(mla_write.reference, SIZES[0], torch.float32, device, dtype)
    found = run(kernel(mla_write), SIZES[0], torch.float32, device, dtype)
    assert_same_cache(found[2], expected[2])
    assert torch.equal(found[2].flatten(0, 1)[9].float(), found[0][0])
