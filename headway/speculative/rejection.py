"""Speculative sampling with the drafter's distribution (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1).

A draft d is drawn from the drafter's distribution q. It is accepted with probability min(1, p(d) / q(d)), p being the target's;
else the token is drawn from max(0, p - q), normalised. What comes out is distributed as p. Both are taken as a request's
parameters make them: with penalties (p alone: q need not know the tokens between), what is forbidden, temperature and filters.

The three draws (of d, whether it is accepted, of the rest) are functions of seed and position, each with a seed of its own. A
position is drafted anew when a draft before it was rejected, with the same noise: nothing had been decided by it until then.
"""

from __future__ import annotations

import torch

from headway.core.params import GREEDY_EPS
from headway.kernels.sample import PENALTIES, filtered_logits
from headway.kernels.sample.rng import log_exponential, token_bits
from headway.sampling.sampler import Judge, Sampler
from headway.state.batch import StepBatch
from headway.state.slots import SlotArena

DRAFT, ACCEPT, REST = 0x2545F491, 0x5851F42D, 0x14057B7E
"""What seeds are changed by, for draws that shall know nothing of each other, nor of the target's own."""


class Rejection:
    """Draws drafts, keeps what they were drawn from, and judges them.

    Args:
        arena: the sampler's tables and the core ones, with ``number`` drafts.
        vocab_size: V of the target; [S + 1, ``number``, V] float32 are kept.
    """

    def __init__(self, arena: SlotArena, sampler: Sampler, number: int, vocab_size: int) -> None:
        view, device = arena.view, arena.ints.device
        self._num_slots, self._penalties = arena.num_slots, sampler.penalties.tensors
        self._numbers = tuple(view(name) for name in ("temperature", "top_k", "top_p", "min_p"))
        self._seeds, self._num_tokens = view("seeds"), view("num_tokens")
        self._drafts = view("drafts").view(arena.num_slots, number)
        self._logits = torch.zeros(arena.num_slots + 1, number, vocab_size, device=device)  # the last row: of padding

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, link: int, flags: int
    ) -> torch.Tensor:
        """int32 [R], draft ``link`` of each row, from the drafter's logits [R, V].

        Args:
            slots: int32 [R], -1 on padding.
            positions: int32 [S], of that draft.
            flags: of ``kernels.sample``: what the step's own draw needed.
        """
        slot = slots.clamp(0, self._num_slots - 1).to(torch.int64)
        x = filtered_logits(logits, slots, *self._numbers, *self._penalties, flags & ~PENALTIES)
        place = torch.where(slots < 0, self._num_slots, slot)
        self._logits[:, link].index_copy_(0, place, x)
        noise = log_exponential(token_bits(self._seed(slot, DRAFT), positions.index_select(0, slot), x.shape[1]))
        return (x - noise * self._is_random(slot)[:, None]).argmax(1).to(torch.int32)

    def judge(self, batch: StepBatch, slots: torch.Tensor, offset: int, flags: int) -> Judge | None:
        """See ``Drafter.judge``. Rows of greedy requests, and those without a draft here, keep what was drawn."""
        rows = len(slots)
        if offset + 1 >= batch.width:
            return None
        here, next_one = batch.logit_indices[offset * rows :][:rows], batch.logit_indices[(offset + 1) * rows :][:rows]

        def judge(token_ids: torch.Tensor, logits: torch.Tensor) -> None:
            slot = slots.clamp(0, self._num_slots - 1).to(torch.int64)
            position = self._num_tokens.index_select(0, slot)
            x = filtered_logits(logits, slots, *self._numbers, *self._penalties, flags)
            p, q = x.softmax(1), self._logits[:, offset].index_select(0, slot).softmax(1)
            draft = self._drafts[:, offset].index_select(0, slot).to(torch.int64)[:, None]
            accept = self._uniform(slot, position) * q.gather(1, draft) < p.gather(1, draft)  # [R, 1]
            rest = (p - q).clamp(min=0)
            noise = log_exponential(token_bits(self._seed(slot, REST), position, x.shape[1]))
            other = (rest.log() - noise).argmax(1, keepdim=True)
            found = torch.where(accept, draft, other)[:, 0].to(torch.int32)
            # Where all is forbidden nothing was drawn; where p is q nothing is left, and rounding alone can reject.
            judged = (next_one != here) & (slots >= 0) & self._is_random(slot) & (token_ids >= 0)
            judged &= accept[:, 0] | (rest.amax(1) > 0)
            token_ids.copy_(torch.where(judged, found, token_ids))

        return judge

    def _is_random(self, slot: torch.Tensor) -> torch.Tensor:
        return self._numbers[0].index_select(0, slot) >= GREEDY_EPS

    def _seed(self, slot: torch.Tensor, change: int) -> torch.Tensor:
        """int32 [R, 2]"""
        return self._seeds.index_select(0, slot) ^ change

    def _uniform(self, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """f32 [R, 1], in (0, 1)."""
        bits = token_bits(self._seed(slot, ACCEPT), position, 1)
        return (bits.to(torch.int64) & 0xFFFFFFFF).to(torch.float32).add(0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24)
