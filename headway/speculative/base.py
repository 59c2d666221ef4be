"""What the runner asks of a drafter, and what a drafter is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headway.models.interface import Forward, Model, ModelSpec
from headway.sampling.sampler import Judge, Sampler
from headway.state.batch import StepBatch
from headway.state.slots import SlotArena


class Drafter:
    """Guesses tokens, on the device alone. Captured in the graph of the step whose tokens it follows.

    Attributes:
        auxiliary: layers of the model whose output it reads, rising.
        reads_hidden: whether ``observe`` needs the hidden states of all tokens.
    """

    auxiliary: tuple[int, ...] = ()
    reads_hidden: bool = False

    def observe(self, batch: StepBatch, forward: Forward) -> None:
        """What the model made of the step's tokens; runs behind the model, and may not keep references to ``forward``."""

    def propose(self, batch: StepBatch, flags: int) -> None:
        """Fill ``drafts[slot]`` of the batch's slots (the core table, int32 [S, K]) with the tokens that may follow the known
        ones. Runs at the end of every step, when the step's tokens are in the slots' histories. A row that has ended may get
        anything, but tokens of the vocabulary. As many are wanted as the step's rows had, ``batch.width`` - 1: none in a step
        without, but whatever the drafter caches must be kept up all the same.

        Args:
            flags: of ``kernels.sample``: what the step's own draw needed.
        """
        raise NotImplementedError

    def judge(self, batch: StepBatch, slots: torch.Tensor, offset: int, flags: int) -> Judge | None:
        """What has the last word on the tokens of outcome ``offset`` of ``slots`` (int32 [R], -1: none), before they are
        compared with the drafts; None: nobody, a draft is accepted when it is what was drawn."""
        return None


class DraftModel(Protocol):
    """A drafter's model. What else it offers only its drafter knows."""

    @property
    def spec(self) -> ModelSpec:
        """What it declares; its cache is the drafter's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftHouse:
    """What there is where a drafter moves in.

    Attributes:
        arena: slot tables; the sampler's and the core ones, with ``number`` drafts.
        sampler: over these.
        target: the model whose tokens are guessed.
        model: the drafter's own, if it has one.
        number: K, drafts a row.
        num_blocks, block_size: of the target's caches, whose block tables the drafter's share.
        kv_dtype: of caches.
        max_tokens, max_rows: of a step.
        drawing: see ``SpeculativeConfig.draft_sample_method``.
    """

    arena: SlotArena
    sampler: Sampler
    target: Model
    model: DraftModel | None
    number: int
    num_blocks: int
    block_size: int
    kv_dtype: torch.dtype
    max_tokens: int
    max_rows: int
    drawing: str | None = None
