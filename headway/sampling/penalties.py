"""Repetition, frequency and presence penalties, with token counts kept on the device. ``Draw`` applies them."""

from __future__ import annotations

import torch

from headway.core.messages import AddRequest
from headway.kernels.count_tokens import count_tokens
from headway.sampling.feature import SlotEdit, Tables, float_bits, ints
from headway.state.slots import Table


class Penalties:
    """What the logits of tokens that occurred are lowered by.

    Attributes:
        tensors: (counts, count_on, repetition, frequency, presence), as ``sample`` takes them.
        counts: int16 [S, V], bit 15: the token is in the prompt; low 15 bits: how often it was generated. Kept up to date by
            ``slot_advance`` for slots with ``count_on``; rebuilt from the history when a slot is admitted.
    """

    def __init__(self, at: Tables) -> None:
        view = at.arena.view
        self.count_on = view("count_on")
        self._history, self._prompt_len, self._num_tokens = view("history"), view("prompt_len"), view("num_tokens")
        self.counts = torch.zeros(at.num_slots, at.vocab_size, dtype=torch.int16, device=at.arena.ints.device)
        self.tensors = (self.counts, self.count_on, view("repetition"), view("frequency"), view("presence"))

    @staticmethod
    def tables(vocab_size: int) -> list[Table]:
        """Slot tables of the feature."""
        reals = [Table(name, dtype=torch.float32) for name in ("repetition", "frequency", "presence")]
        return [Table("count_on"), *reals]

    def wanted(self, request: AddRequest) -> bool:
        """Whether any penalty differs from its neutral value."""
        params = request.params
        return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """The flag and the three values."""
        params = request.params
        return [
            SlotEdit("count_on", ints(int(self.wanted(request)))),
            SlotEdit("repetition", float_bits([params.repetition_penalty])),
            SlotEdit("frequency", float_bits([params.frequency_penalty])),
            SlotEdit("presence", float_bits([params.presence_penalty])),
        ]

    def rebuild(self, slots: torch.Tensor, max_tokens: int) -> None:
        """Recount the slots' histories. ``slots`` int32 [n]; ``max_tokens`` >= their lengths."""
        count_tokens(self.counts, slots, self._history, self._prompt_len, self._num_tokens, max_tokens)
