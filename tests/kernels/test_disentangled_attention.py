"""``disentangled_attention``: the reference against a loop over pairs, the other implementations against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.kernels.disentangled_attention import disentangled_attention
from headway.kernels.testing import assert_close, interpreter_loops, make_random

LENGTHS = [17, 17, 2, 1, 0, 33]
HEADS, SIZE, KINDS, LONGEST = 2, 12, 6, 40


def inputs(device: str, keys: bool, queries: bool) -> tuple[Any, ...]:
    """With 3 tokens of padding, which hold NaN, and a row of padding."""
    total = sum(LENGTHS)
    qkv = make_random(total + 3, 3 * HEADS * SIZE, dtype=torch.float32, device=device)
    qkv[total:] = float("nan")
    starts = torch.tensor([0, *LENGTHS, 0]).cumsum(0).int().to(device)
    tables = [make_random(KINDS, HEADS * SIZE, dtype=torch.float32, device=device, seed=i) for i in (1, 2)]
    generator = torch.Generator().manual_seed(3)
    places = torch.randint(KINDS, (2 * LONGEST - 1,), generator=generator).int().to(device)
    return qkv, starts, tables[0] if keys else None, tables[1] if queries else None, places, HEADS, 0.2, max(LENGTHS)


def by_pairs(qkv: torch.Tensor, starts: torch.Tensor, keys: Any, queries: Any, places: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(sum(LENGTHS), HEADS * SIZE)
    for first, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        for head in range(HEADS):
            part = slice(head * SIZE, (head + 1) * SIZE)
            q, k, v = (qkv[first:end, i * HEADS * SIZE :][:, part].double() for i in range(3))
            scores = q @ k.T
            for i in range(end - first):
                for j in range(end - first):
                    kind = int(places[i - j + LONGEST - 1])
                    scores[i, j] += 0 if keys is None else q[i] @ keys[kind, part].double()
                    scores[i, j] += 0 if queries is None else k[j] @ queries[kind, part].double()
            out[first:end, part] = (torch.softmax(scores * 0.2, -1) @ v).float()
    return out


@pytest.mark.parametrize(("keys", "queries"), [(True, True), (True, False), (False, True)])
def test_all_follow_the_formula(keys: bool, queries: bool, device: str) -> None:
    given = inputs("cpu", keys, queries)
    expected = by_pairs(*given[:5])
    total = len(expected)
    assert_close(disentangled_attention.reference(*given)[:total], expected)
    assert_close(disentangled_attention.implementation("cpu")(*given)[:total], expected)
    with interpreter_loops():
        found = disentangled_attention.implementation("cuda")(*inputs(device, keys, queries))
    assert_close(found[:total].cpu(), expected)
