"""Features that add to, forbid or allow single tokens: logit_bias, allowed_token_ids, min_tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headway.core.ints import cdiv
from headway.core.messages import AddRequest
from headway.core.params import MAX_LOGIT_BIAS
from headway.core.plan import Int32s
from headway.kernels.allowed_tokens import allowed_tokens
from headway.kernels.logit_bias import logit_bias
from headway.kernels.min_tokens import min_tokens
from headway.sampling.feature import SlotEdit, Tables, float_bits, ints
from headway.state.slots import Table


class LogitBias:
    """Adds a value to chosen tokens' logits. Tables: ids and values, [S, MAX_LOGIT_BIAS], and how many are set."""

    def __init__(self, at: Tables) -> None:
        self._counts = at.arena.view("bias_counts")
        self._ids, self._values = at.arena.view("bias_ids"), at.arena.view("bias_values")

    @staticmethod
    def tables(vocab_size: int) -> list[Table]:
        """Slot tables of the feature."""
        return [
            Table("bias_counts"),
            Table("bias_ids", MAX_LOGIT_BIAS),
            Table("bias_values", MAX_LOGIT_BIAS, torch.float32),
        ]

    def wanted(self, request: AddRequest) -> bool:
        """Whether the request has a non-empty logit_bias."""
        return bool(request.params.logit_bias)

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """Count, ids, values."""
        bias = request.params.logit_bias or {}
        edits = [SlotEdit("bias_counts", ints(len(bias)))]
        if bias:
            edits.append(SlotEdit("bias_ids", ints(*bias)))
            edits.append(SlotEdit("bias_values", float_bits(list(bias.values()))))
        return edits

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """logits[n, id] += value."""
        logit_bias(logits, slots, self._counts, self._ids, self._values)


class AllowedTokens:
    """Everything but the allowed tokens becomes -inf. Tables: a flag and a bit per vocabulary entry."""

    def __init__(self, at: Tables) -> None:
        self._vocab_size = at.vocab_size
        self._on, self._bits = at.arena.view("allowed_on"), at.arena.view("allowed_bits")

    @staticmethod
    def tables(vocab_size: int) -> list[Table]:
        """Slot tables of the feature. Width 2 at least keeps the bit table two-dimensional."""
        return [Table("allowed_on"), Table("allowed_bits", max(2, cdiv(vocab_size, 32)))]

    def wanted(self, request: AddRequest) -> bool:
        """Whether the request restricts its tokens, once or (a grammar on the host) anew in every step."""
        return request.params.allowed_token_ids is not None or request.host_grammar is not None

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """The flag, then bit ``t % 32`` of word ``t // 32`` for each allowed token t."""
        allowed = request.params.allowed_token_ids
        if request.host_grammar is not None:
            return [SlotEdit("allowed_on", ints(1))]  # the bits come with each step that draws
        if allowed is None:
            return [SlotEdit("allowed_on", ints(0))]
        return [SlotEdit("allowed_on", ints(1)), SlotEdit("allowed_bits", token_bits(allowed, self._vocab_size))]

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """logits[n, t] = -inf where t is not allowed."""
        allowed_tokens(logits, slots, self._on, self._bits)


def token_bits(tokens: Sequence[int], vocab_size: int) -> Int32s:
    """int32 words in which bit ``t % 32`` of word ``t // 32`` is set for each of the tokens; two words at least."""
    bits = np.zeros(max(2, cdiv(vocab_size, 32)) * 32, np.uint8)
    bits[np.asarray(tokens, np.int64)] = 1
    words: Int32s = np.packbits(bits, bitorder="little").view(np.int32)
    return words


class MinTokens:
    """Forbids end-of-sequence and stop tokens until min_tokens were generated. Uses the core stop tables."""

    def __init__(self, at: Tables) -> None:
        view = at.arena.view
        self._num_tokens, self._min_total = view("num_tokens"), view("min_total")
        self._stop_counts, self._stop_ids = view("stop_counts"), view("stop_ids")

    def wanted(self, request: AddRequest) -> bool:
        """Whether there is a minimum and something to forbid."""
        return request.params.min_tokens > 0 and bool(request.eos_token_ids or request.params.stop_token_ids)

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """Nothing of its own."""
        return []

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """logits[n, stop ids] = -inf while num_tokens < min_total."""
        min_tokens(logits, slots, self._num_tokens, self._min_total, self._stop_counts, self._stop_ids)
