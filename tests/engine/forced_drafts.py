"""A drafter that knows the answers, and guesses them rightly or wrongly by a pattern. Tests only.

It tells requests apart by their seeds: request i of a batch has seed i, and the drafter a row of its known tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from headway.core.messages import AddRequest
from headway.engine.drafts import Drafts
from headway.speculative.base import Drafter
from headway.state.batch import StepBatch
from headway.state.slots import SlotArena
from tests.engine.harness import Answer
from tests.engine.tiny_llama import VOCAB

Pattern = Literal["all", "none", "random"]
LENGTH = 192


class ForcedDrafter(Drafter):
    """Writes into the draft table what follows each slot's tokens in ``truth``, changed where the pattern says so.

    Args:
        truth: int32 [N, LENGTH], prompts and answers, by seed.
        wrong: bool [N, LENGTH], tokens to guess wrongly.
    """

    def __init__(self, arena: SlotArena, truth: torch.Tensor, wrong: torch.Tensor, number: int) -> None:
        device = arena.ints.device
        guesses = torch.where(wrong, (truth + 1) % VOCAB, truth)
        self._guesses = torch.zeros(guesses.shape, dtype=torch.int32, device=device)
        self._guesses.copy_(guesses)
        self._places = torch.arange(number, device=device)
        self._arena, self._number = arena, number

    def propose(self, batch: StepBatch, flags: int) -> None:
        """See ``speculative.base.Drafter``."""
        num_tokens, seeds = self._arena.view("num_tokens"), self._arena.view("seeds")
        request = seeds[:, 0].long().clamp(0, len(self._guesses) - 1)
        places = (num_tokens.long()[:, None] + self._places).clamp(0, LENGTH - 1)  # [S, K]
        drafts = self._arena.view("drafts").view(-1, self._number)
        drafts.copy_(self._guesses.index_select(0, request).gather(1, places))


def forced(requests: Sequence[AddRequest], answers: dict[str, Answer], number: int, pattern: Pattern) -> Drafts:
    """Drafts for requests whose answers are known."""
    truth = torch.zeros(len(requests), LENGTH, dtype=torch.int32)
    for i, request in enumerate(requests):
        assert request.seed == i, "the drafter tells requests by their seeds"
        tokens = [*request.prompt_token_ids, *answers[request.request_id].token_ids]
        truth[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    chance = {"all": 0.0, "none": 1.0, "random": 0.4}[pattern]
    wrong = torch.rand(truth.shape, generator=torch.Generator().manual_seed(number)) < chance
    return Drafts(number, lambda house: ForcedDrafter(house.arena, truth, wrong, number))
