"""One step of the engine as plain numbers: the scheduler and the runner meet only here.

Naming: ``_bound`` marks a host number that is proven >= the device's; the others are exact.
R is the number of rows in the step (one row = the tokens of one request in this step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

from headway.core.messages import AddRequest

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

NO_INTS: Final[Int32s] = np.empty(0, np.int32)

Exact = NewType("Exact", int)
"""A host number equal to the device's."""
Bound = NewType("Bound", int)
"""A host number >= the device's. Sizes and grids may use it; nothing that needs the truth may."""


class Finish(IntEnum):
    """Why the device ended a row's request; 0 while it runs."""

    NONE = 0
    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    NO_TOKEN = 4
    """No token was left that the request's demands (grammar, allowed and banned tokens, minimum length) allow together."""


@dataclass(slots=True)
class Admission:
    """A slot is (re)initialised before this step's rows run.

    Attributes:
        slot: row of the device's slot tables the request owns until its end or preemption.
        request: parameters and prompt.
        token_ids: every known token: the prompt, then, for a resumed request, what it had generated.
        num_computed: tokens whose KV is already in the cache (prefix hit).
    """

    slot: int
    request: AddRequest
    token_ids: Int32s
    num_computed: int


@dataclass(slots=True)
class StepPlan:
    """What one step runs. Rows with one token that continue a generation come first ("decode rows").

    Attributes:
        step: consecutive number, from 0.
        slots: int32 [R], row -> slot. The very array of the step before says that the step has the same rows of the same
            requests, all of them decode rows.
        query_lens: int32 [R], tokens of the row in this step, >= 1.
        starts_bound: int32 [R], position of the row's first token: exact on rows inside their known tokens (prefill),
            a bound on decode rows (the device may already have ended them).
        samples: bool [R], whether the row's last token is followed by a sampled one.
        num_decode_rows: rows [0, num_decode_rows) are decode rows: query_len 1, samples true.
        admissions: slots to initialise, each for a row of this step.
        block_edit_slots, block_edit_indices, block_edit_ids: int32 [E] each:
            block_table[slot, index] = block id, applied before the rows run and after the admissions.
        masks: (slot, int32 words) of rows that sample under a grammar on the host: the tokens they may draw, bit t % 32 of
            word t // 32.
        owners: per row, an opaque token the scheduler uses in ``apply`` (never read by the runner).
    """

    step: int
    slots: Int32s
    query_lens: Int32s
    starts_bound: Int32s
    samples: Bools
    num_decode_rows: int
    admissions: list[Admission] = field(default_factory=list)
    block_edit_slots: Int32s = field(default_factory=lambda: NO_INTS)
    block_edit_indices: Int32s = field(default_factory=lambda: NO_INTS)
    block_edit_ids: Int32s = field(default_factory=lambda: NO_INTS)
    masks: list[tuple[int, Int32s]] = field(default_factory=list)
    owners: Sequence[object] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        rows = len(self.slots)
        return rows if rows == self.num_decode_rows else int(self.query_lens.sum())


@dataclass(slots=True)
class LogprobsResult:
    """Log-probabilities of some positions. Entry 0 of each is the sampled (or prompt) token.

    Attributes:
        token_ids: int32 [N, 1 + K]; entries past ``counts`` are meaningless.
        logprobs: float32 [N, 1 + K].
        ranks: int32 [N], 1-based rank of entry 0.
        counts: int32 [N], valid entries per position, entry 0 included.
    """

    token_ids: Int32s
    logprobs: Floats
    ranks: Int32s
    counts: Int32s


@dataclass(slots=True)
class StepResult:
    """What the device reports of one step; rows as in the plan.

    Attributes:
        sampled: bool [R]; False for rows inside their prompt and for zombie rows (ended on the device earlier).
        token_ids: int32 [R]; valid where ``sampled``.
        finish: int32 [R], a ``Finish`` code; nonzero only where ``sampled``.
        logprobs: over the R rows, None when no row asked; counts are 0 for rows that did not.
        prompt_logprobs: row -> log-probabilities of the prompt tokens that FOLLOW each token of the row
            (position start+1 up to start+query_len, cut at the prompt's end).
    """

    sampled: Bools
    token_ids: Int32s
    finish: Int32s
    logprobs: LogprobsResult | None = None
    prompt_logprobs: dict[int, LogprobsResult] = field(default_factory=dict)
