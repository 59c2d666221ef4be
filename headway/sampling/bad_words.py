"""Token sequences that may not be generated."""

from __future__ import annotations

import numpy as np
import torch

from headway.core.errors import InvalidRequestError
from headway.core.messages import AddRequest
from headway.kernels.bad_words import bad_words
from headway.sampling.feature import SlotEdit, Tables, ints
from headway.state.slots import Table

MAX_PHRASES = 256
MAX_PHRASE_TOKENS = 2048


class BadWords:
    """Forbids the last token of a phrase when the generated tokens end in the rest of it."""

    def __init__(self, at: Tables) -> None:
        view = at.arena.view
        self._counts, self._offsets, self._tokens = view("bw_counts"), view("bw_offsets"), view("bw_tokens")
        self._history, self._num_tokens, self._prompt_len = view("history"), view("num_tokens"), view("prompt_len")

    @staticmethod
    def tables(vocab_size: int) -> list[Table]:
        """Phrases laid end to end: phrase i is tokens[offsets[i] : offsets[i + 1]]."""
        return [Table("bw_counts"), Table("bw_offsets", MAX_PHRASES + 1), Table("bw_tokens", MAX_PHRASE_TOKENS)]

    def wanted(self, request: AddRequest) -> bool:
        """Whether there are phrases."""
        return bool(request.bad_words_token_ids)

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """Count, offsets, tokens. Raises InvalidRequestError when the phrases exceed the tables."""
        phrases = request.bad_words_token_ids
        if not phrases:
            return [SlotEdit("bw_counts", ints(0))]
        offsets = np.cumsum([0, *map(len, phrases)]).astype(np.int32)
        if len(phrases) > MAX_PHRASES or offsets[-1] > MAX_PHRASE_TOKENS:
            raise InvalidRequestError(
                f"bad_words come to {len(phrases)} sequences of {offsets[-1]} tokens; "
                f"at most {MAX_PHRASES} sequences of {MAX_PHRASE_TOKENS} tokens in all are possible",
                "bad_words",
            )
        tokens = np.array([token for phrase in phrases for token in phrase], np.int32)
        return [
            SlotEdit("bw_counts", ints(len(phrases))),
            SlotEdit("bw_offsets", offsets),
            SlotEdit("bw_tokens", tokens),
        ]

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """logits[n, last token of a matching phrase] = -inf."""
        bad_words(
            logits, slots, self._history, self._num_tokens, self._prompt_len, self._counts, self._offsets, self._tokens
        )
