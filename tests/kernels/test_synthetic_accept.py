"""``synthetic_accept``: the kernel does what the reference does, and that is as often right as it was told."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.synthetic_accept import synthetic_accept
from tests.kernels.guarded import ints, run, run_both

S, K, V = 50, 3, 97


def arguments(offset: int, always: int, part: int, seed: int = 0) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(torch.int32)

    slots = ints([*range(0, S, 2), -1, S, 2**31 - 1])
    tokens, drafts = random(0, V, len(slots)), random(0, V, S, K)
    tokens[:9] = drafts[:18:2, min(offset, K - 1)]  # right by chance
    tables = (random(0, 2**31 - 1, S), random(-(2**31), 2**31 - 1, S, 2))
    return tokens, slots, drafts, *tables, offset, always, part, V


@pytest.mark.parametrize("offset", range(K + 1))
@pytest.mark.parametrize("always", [0, 1, 3])
def test_kernel_equals_reference(offset: int, always: int) -> None:
    args = arguments(offset, always, 2**23, seed=offset)
    reference, kernel = (after[0] for after, _ in run_both(synthetic_accept, args))
    assert torch.equal(reference, kernel)
    tokens, drafts = args[0], args[2]
    assert isinstance(tokens, torch.Tensor) and isinstance(drafts, torch.Tensor)
    assert torch.equal(reference[-3:], tokens[-3:]), "slots that are none"
    if offset == K:
        assert torch.equal(reference, tokens)
        return
    right = reference[:-3] == drafts[::2, offset]
    assert right.all() if offset < always else not right.any() if offset > always else 3 < right.sum() < 22


def test_as_often_as_told() -> None:
    num_tokens = torch.arange(40_000, dtype=torch.int32)
    slots = torch.arange(40_000, dtype=torch.int32)
    seeds = torch.full((40_000, 2), 7, dtype=torch.int32)
    drafts, tokens = torch.ones(40_000, 1, dtype=torch.int32), torch.zeros(40_000, dtype=torch.int32)
    args = (tokens, slots, drafts, num_tokens, seeds, 0, 0, int(0.3 * 2**24), V)
    after, _ = run(synthetic_accept, synthetic_accept.reference, args, "cpu")
    assert abs(after[0].float().mean().item() - 0.3) < 0.01
