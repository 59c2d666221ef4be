"""The ring of answers that ``suffix_keep`` writes and ``suffix_draft`` reads, as a list."""

from __future__ import annotations

import torch

from tests.kernels.guarded import ints


class Kept:
    """Answers that are kept: a ring of ``size`` tokens, of at most ``most`` answers.

    Attributes:
        answers: (first token, tokens) of all, counted in tokens ever written.
    """

    def __init__(self, size: int, most: int) -> None:
        self.size, self.most, self.written = size, most, 0
        self.ring = [-1] * size
        self.answers: list[tuple[int, int]] = []

    def add(self, answer: list[int]) -> None:
        answer = [*answer[-(self.size // 2 - 1) :], -1]
        self.answers.append((self.written, len(answer)))
        for token in answer:
            self.ring[self.written % self.size] = token
            self.written += 1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [0] * self.most
        for i, (start, _) in enumerate(self.answers):
            starts[i % self.most] = start
        return ints(self.ring), torch.tensor([self.written, len(self.answers), *starts])

    def texts(self) -> list[tuple[list[int], list[int]]]:
        """What is left of each of the newest answers, and the place in the ring of each of its tokens."""
        found = []
        for start, count in self.answers[-self.most :]:
            places = [when for when in range(start, start + count - 1) if when >= self.written - self.size]
            found.append(([self.ring[when % self.size] for when in places], [when % self.size for when in places]))
        return found
