"""Stages: the layers of a model, one after the other on several ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Stage:
    """One rank's stage, which takes hidden states from the stage before and hands its own to the next.

    Attributes:
        group: one rank of each stage, in the order of the layers.
        tokens: the same ranks; what is drawn and guessed goes back here, so that it and hidden states do not wait for each
            other.
        own: the layers of this stage.
        embeds: a drafter on the last stage reads the embedding, so it is there, too.
    """

    group: Group
    tokens: Group
    own: range
    embeds: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.group.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether tokens are drawn here."""
        return self.group.rank == self.group.size - 1

    def receive(self, x: torch.Tensor) -> None:
        """x [T, C] becomes what the stage before sends."""
        self.group.receive(x, self.group.rank - 1)

    def send(self, x: torch.Tensor) -> None:
        """[T, C] to the next stage."""
        self.group.send(x, self.group.rank + 1)

    def tell(self, tokens: torch.Tensor) -> None:
        """The last stage: int32 [n], the tokens and drafts of a step, to all others."""
        for peer in range(self.tokens.size - 1):
            self.tokens.send(tokens, peer)

    def listen(self, tokens: torch.Tensor) -> None:
        """The other stages: int32 [n] will be what the last one tells of its next step, once it is ``heard``."""
        self.tokens.post(tokens, self.tokens.size - 1)

    def heard(self, tokens: torch.Tensor) -> None:
        """Wait, on the device, for what was listened for first."""
        self.tokens.finish(tokens)
