"""From the hidden states of a head to logits: by an output layer of its own, often of the most frequent tokens only, or the
target's.

Shapes: N positions, C hidden size of the head, Vd tokens it can guess, V of the target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from headway.core.errors import WeightsError
from headway.models.interface import Target
from headway.models.layers.linear import Linear

Rows = Callable[[torch.Tensor], torch.Tensor]


class DraftVocabulary(nn.Module):
    """The tokens of a head.

    Args:
        hidden, size, vocab_size: C, Vd, V.
        own: it has an output layer.
        logits: the target's output layer, [N, C] -> [N, V].

    Attributes:
        target_ids: int64 [Vd], tokens of the target that the head's own are; None: the same.
    """

    def __init__(
        self,
        hidden: int,
        size: int,
        vocab_size: int,
        logits: Rows,
        *,
        own: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._size, self._vocab_size, self._logits = size, vocab_size, logits
        self.head = Linear(hidden, {"lm_head": size}, bias=False, dtype=dtype, device=device) if own else None
        self.target_ids = torch.arange(size, device=device) if size != vocab_size else None

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, Vd]."""
        return self._logits(hidden) if self.head is None else self.head.forward(hidden)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, Vd] -> [N, V]; -inf for tokens that the head cannot guess."""
        if self.target_ids is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self.target_ids, logits)

    def destinations(self) -> dict[str, Target]:
        """Where tensors of a checkpoint go."""
        return {} if self.head is None else self.head.destinations("")

    def map(self, offsets: torch.Tensor) -> None:
        """Take ``d2t``, int [Vd]: by how much more a token of the target is than the head's.

        Raises:
            WeightsError: it maps outside the vocabulary, or two tokens to one.
        """
        ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
        inside = bool((ids >= 0).all() and (ids < self._vocab_size).all())  # host: a checkpoint's tensor
        if self.target_ids is None or len(ids) != len(self.target_ids) or not inside or len(ids.unique()) != len(ids):
            raise WeightsError(f"d2t does not map {self._size} tokens into the vocabulary")
        self.target_ids.copy_(ids)
