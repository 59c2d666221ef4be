"""Log-probabilities of the raw logits: of the most likely tokens, of chosen ids, of prompt tokens."""

from __future__ import annotations

import numpy as np
import torch

from headway.core.messages import AddRequest
from headway.core.params import MAX_LOGPROB_TOKEN_IDS
from headway.core.plan import Int32s
from headway.kernels.gather_logprobs import gather_logprobs
from headway.sampling.feature import SlotEdit, Tables, ints
from headway.state.slots import Table

LogprobTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""ids int32 [N, 1 + K], logprobs float32 [N, 1 + K], ranks int32 [N], counts int32 [N]."""

NOT_ASKED = -1


class Logprobs:
    """Gathers log-probabilities. Host mirrors hold how many entries each slot asks for (-1: none)."""

    def __init__(self, at: Tables) -> None:
        self._entries = np.full(at.num_slots, NOT_ASKED, np.int32)
        self._prompt_entries = np.full(at.num_slots, NOT_ASKED, np.int32)
        view = at.arena.view
        self._num, self._num_prompt = view("num_logprobs"), view("num_prompt_logprobs")
        self._id_counts, self._ids = view("lp_counts"), view("lp_ids")
        self._no_ids = torch.zeros(at.num_slots, dtype=torch.int32, device=at.arena.ints.device)

    @staticmethod
    def tables(vocab_size: int) -> list[Table]:
        """Slot tables of the feature."""
        names = ("num_logprobs", "num_prompt_logprobs", "lp_counts")
        return [*(Table(name) for name in names), Table("lp_ids", MAX_LOGPROB_TOKEN_IDS)]

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """Numbers asked for and the chosen ids."""
        params = request.params
        chosen = params.logprob_token_ids or []
        number = params.logprobs if params.logprobs is not None else (0 if chosen else NOT_ASKED)
        prompt = NOT_ASKED if params.prompt_logprobs is None else params.prompt_logprobs
        edits = [
            SlotEdit("num_logprobs", ints(number)),
            SlotEdit("num_prompt_logprobs", ints(prompt)),
            SlotEdit("lp_counts", ints(len(chosen))),
        ]
        if chosen:
            edits.append(SlotEdit("lp_ids", ints(*chosen)))
        return edits

    def admit(self, slot: int, request: AddRequest) -> None:
        """Remember how many entries the slot's rows give."""
        params = request.params
        if params.logprob_token_ids:
            self._entries[slot] = len(params.logprob_token_ids)
        else:
            self._entries[slot] = NOT_ASKED if params.logprobs is None else params.logprobs
        self._prompt_entries[slot] = NOT_ASKED if params.prompt_logprobs is None else params.prompt_logprobs

    @staticmethod
    def wanted(request: AddRequest) -> bool:
        """Whether the request asks for any at its sampled tokens."""
        return request.params.logprobs is not None or bool(request.params.logprob_token_ids)

    def max_entries(self, slots: Int32s) -> int:
        """Most entries any row asks for; -1 when none asks."""
        return int(self._entries[slots].max(initial=NOT_ASKED))

    def prompt_entries(self, slots: Int32s) -> Int32s:
        """Per row, entries asked for each prompt token; -1 when not asked."""
        return self._prompt_entries[slots]

    def gather(
        self, logits: torch.Tensor, token_ids: torch.Tensor, slots: torch.Tensor, max_entries: int
    ) -> LogprobTensors:
        """For sampled tokens ``token_ids`` int32 [N] of raw ``logits`` [N, V]."""
        gathered: LogprobTensors = gather_logprobs(
            logits, token_ids, slots, self._num, self._id_counts, self._ids, max_entries
        )
        return gathered

    def gather_prompt(
        self, logits: torch.Tensor, token_ids: torch.Tensor, slots: torch.Tensor, max_entries: int
    ) -> LogprobTensors:
        """For prompt tokens ``token_ids`` int32 [N] that follow the positions of ``logits`` [N, V]."""
        gathered: LogprobTensors = gather_logprobs(
            logits, token_ids, slots, self._num_prompt, self._no_ids, self._ids, max_entries
        )
        return gathered
