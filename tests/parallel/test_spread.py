"""Tokens drawn from logits that are spread over ranks, against one rank with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.engine.world import World
from headway.kernels.sample import sample
from headway.parallel.mesh import Mesh
from headway.parallel.shard import VocabularyPart
from headway.sampling.spread import SpreadLogits
from tests.parallel.ranks import on_ranks

ROWS = 7


class Plain:
    """A draw without tables: every row is greedy."""

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, flags: int) -> torch.Tensor:
        assert flags == 0
        zeros, ints = torch.zeros(ROWS), torch.zeros(ROWS, dtype=torch.int32)
        counts = torch.zeros(ROWS, logits.shape[1], dtype=torch.int16)
        seeds = torch.zeros(ROWS, 2, dtype=torch.int32)
        found: Any = sample(
            logits, slots, zeros, ints, zeros, zeros, seeds, ints, counts, ints, zeros, zeros, zeros, flags
        )
        return found


@pytest.mark.parametrize("vocab", [5, 96, 97])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_best_is_the_best_of_all(ranks: int, vocab: int) -> None:
    """Ties within a rank and across ranks, rows of which everything is forbidden, NaN, and slots of padding."""
    generator = torch.Generator().manual_seed(vocab)
    whole = torch.randint(0, 3, (ROWS, vocab), generator=generator).float()  # ties everywhere
    whole[1] = float("-inf")
    whole[2, : vocab - 1] = float("-inf")
    whole[3, 0] = float("nan")
    whole[4] = -5.0  # below the zeros that pad the vocabulary
    slots = torch.arange(ROWS, dtype=torch.int32)
    slots[6] = -1

    def work(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        part = VocabularyPart(world.tensor, vocab)
        own = torch.zeros(ROWS, part.rows)
        own[:, : part.own] = whole[:, part.first : part.first + part.own]
        spread = SpreadLogits(part)
        draw: Any = Plain()
        return spread.best(own, slots, draw), spread.whole(own)

    wanted = Plain().apply(whole, slots, 0)
    for best, gathered in on_ranks(Mesh(ranks, 1), work):
        assert torch.equal(best, wanted)
        torch.testing.assert_close(gathered, whole, rtol=0, atol=0, equal_nan=True)


class Garbage:
    """A draw whose kernels are left out: what its memory held is anything."""

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, flags: int) -> torch.Tensor:
        return torch.full((ROWS,), 0x7F7F7F7F, dtype=torch.int32)


def test_a_rehearsal_reads_no_logit_outside() -> None:
    def work(world: World) -> torch.Tensor:
        draw: Any = Garbage()
        part = VocabularyPart(world.tensor, 97)
        return SpreadLogits(part).best(torch.zeros(ROWS, part.rows), torch.arange(ROWS, dtype=torch.int32), draw)

    assert all(len(each) == ROWS for each in on_ranks(Mesh(2, 1), work))
