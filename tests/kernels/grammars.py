"""Slots with random automata over a random vocabulary, and a plain loop that follows them."""

from __future__ import annotations

import array
import random
from dataclasses import dataclass, field

import torch

from headway.api.structured.kinds import kinds_of
from headway.core.automaton import CLASS_INTS
from tests.kernels.guarded import ints

WORDS = 3
"""Twelve bytes at most."""


@dataclass
class Slots:
    """What the grammar operations read, drawn from ``seed``; slot 1 has no grammar.

    Attributes:
        automata: (states, classes, first accepting, class of each byte, transitions) per slot.
    """

    seed: int
    vocab: int
    num_slots: int = 4
    automata: list[tuple[int, int, int, list[int], list[list[int]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.tokens = [bytes(rng.randrange(256) for _ in range(self._length())) for _ in range(self.vocab)]
        for _ in range(self.num_slots):
            states, classes = rng.randrange(2, 9), rng.randrange(1, 6)
            group = [rng.randrange(classes) for _ in range(256)]
            dead = rng.choice([0.05, 0.3])
            rows = [[0] * classes] + [
                [0 if rng.random() < dead else rng.randrange(1, states) for _ in range(classes)]
                for _ in range(states - 1)
            ]
            self.automata.append((states, classes, rng.randrange(1, states + 1), group, rows))
        self.on = [int(slot != 1) for slot in range(self.num_slots)]
        self.state = [rng.randrange(0, each[0]) for each in self.automata]
        self.stop_counts = [[rng.randrange(0, 3), 4] for _ in range(self.num_slots)]
        self.stop_ids = [[rng.randrange(self.vocab) for _ in range(4)] for _ in range(self.num_slots)]

    def _length(self) -> int:
        return self.rng.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 11, 12])

    def eos(self, slot: int) -> list[int]:
        return self.stop_ids[slot][: self.stop_counts[slot][0]]

    def accepts(self, slot: int) -> bool:
        return self.state[slot] >= max(1, self.automata[slot][2])

    def walk(self, slot: int, token: int) -> int:
        _, _, _, group, rows = self.automata[slot]
        state = self.state[slot] if self.tokens[token] else 0
        for byte in self.tokens[token]:
            state = rows[state][group[byte]]
        return state

    def kinds(self, slot: int) -> list[int]:
        """Of the slot's states, by the longest token."""
        _, classes, _, _, rows = self.automata[slot]
        return kinds_of(array.array("H", (target for row in rows for target in row)), classes, 12).tolist()

    def tables(self) -> tuple[torch.Tensor, ...]:
        """grammar_on, grammar_info, grammar_state, grammar_table, vocabulary. What nobody may read is garbage."""
        width = CLASS_INTS + 40
        table = torch.full((self.num_slots, width), 0x7EADBEEF, dtype=torch.int32)
        for slot, (_, _, _, group, rows) in enumerate(self.automata):
            flat = [target for row in rows for target in row] + self.kinds(slot)
            flat += [0x7EAD] * (len(flat) % 2)
            table[slot, :CLASS_INTS] = ints(group)
            pairs = [low | high << 16 for low, high in zip(flat[::2], flat[1::2], strict=True)]
            table[slot, CLASS_INTS : CLASS_INTS + len(pairs)] = ints(pairs)
        vocabulary = torch.full((WORDS + 1, self.vocab), -1, dtype=torch.int32)
        for token, text in enumerate(self.tokens):
            vocabulary[WORDS, token] = len(text)
            for word in range((len(text) + 3) // 4):
                four = text[4 * word : 4 * word + 4].ljust(4, b"\xff")
                vocabulary[word, token] = int.from_bytes(four, "little", signed=True)
        info = ints([list(each[:3]) for each in self.automata])
        return ints(self.on), info, ints(self.state), table, vocabulary
