"""One step of the engine as plain numbers: the scheduler and the runner meet only here.

Naming: ``_bound`` marks a host number that is proven >= the device's; the others are exact.
R is the number of rows in the step (one row = the tokens of one request in this step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from headway.core.encode import EncodeJob
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


class StepLimit(NamedTuple):
    """What a step may hold that other replicas run in the same size.

    Attributes:
        tokens: at most.
        only_decode: no prompts.
    """

    tokens: int
    only_decode: bool


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
class Texts:
    """Whole texts that begin and end with their step: row r runs in slot r, whatever was there before.

    Attributes:
        request_ids: R.
        tokens: int32 [T], the rows' token ids, one row behind the other.
        pool_starts, raw, adapters: int32 [R], ``AddRequest``'s.
        type_ranges: int32 [R, 2], ``AddRequest.token_type_range``.
    """

    request_ids: list[str]
    tokens: Int32s
    pool_starts: Int32s
    raw: Int32s
    type_ranges: Int32s
    adapters: Int32s


@dataclass(slots=True)
class StepPlan:
    """What one step runs. Rows with one token that continue a generation come first ("decode rows").

    Attributes:
        step: consecutive number, from 0.
        slots: int32 [R], row -> slot. The very array of the step before says that the step has the same rows of the same
            requests, all of them decode rows.
        query_lens: int32 [R], tokens of the row in this step, >= 1.
        starts_bound: int32 [R], position of the row's first token: exact on rows inside their known tokens (prefill),
            a bound on decode rows (the device may already have ended them, or have rejected drafts).
        samples: bool [R], whether the row's last token is followed by a sampled one or, in a step that pools, ends its text.
        num_decode_rows: rows [0, num_decode_rows) are decode rows: query_len ``width``, or 1 where nothing is guessed for the
            request; samples true.
        admissions: slots to initialise, each for a row of this step.
        block_edit_rows, block_edit_indices, block_edit_ids: int32 [E] each:
            block_tables[row, index] = block id, row = group * number of slots + slot, applied before the rows run
            and after the admissions.
        masks: (slot, int32 words) of rows that sample under a grammar on the host: the tokens they may draw, bit t % 32 of
            word t // 32.
        owners: per row, an opaque token the scheduler uses in ``apply`` (never read by the runner).
        width: most tokens of a decode row: the last known one, and drafts. Such a row brings 1 to as many tokens as it has,
            unless its request has ended; any other row that samples brings one.
        pools: the step's requests generate nothing: their outcome is a vector when their text ends.
        token_vectors: some row wants a vector for each of its tokens.
        state_loads, state_saves: (source, destination) slots of states that are copied before the rows run, and after it;
            there are none in steps of decode rows alone.
        media_rows: (slot, run of its prompt, row of the encoder cache with its first token's features), before the rows run.
        media: some row has tokens that are no ids, or that see later ones.
        encodes: what encoders do before the rows run; never in steps of decode rows alone.
        texts: of a step of whole texts all of its rows, in place of ``admissions``.
    """

    step: int
    slots: Int32s
    query_lens: Int32s
    starts_bound: Int32s
    samples: Bools
    num_decode_rows: int
    admissions: list[Admission] = field(default_factory=list)
    block_edit_rows: Int32s = field(default_factory=lambda: NO_INTS)
    block_edit_indices: Int32s = field(default_factory=lambda: NO_INTS)
    block_edit_ids: Int32s = field(default_factory=lambda: NO_INTS)
    masks: list[tuple[int, Int32s]] = field(default_factory=list)
    owners: Sequence[object] = ()
    width: int = 1
    pools: bool = False
    token_vectors: bool = False
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    encodes: list[EncodeJob] = field(default_factory=list)
    media_rows: list[tuple[int, int, int]] = field(default_factory=list)
    media: bool = False
    texts: Texts | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        rows = len(self.slots)
        return rows if rows == self.num_decode_rows and self.width == 1 else int(self.query_lens.sum())


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
    """What the device reports of one step; rows as in the plan. W is the plan's width, or that of a graph for wider rows.

    Attributes:
        counts: int32 [R], tokens that the row brought, 0..W; 0 for rows inside their prompt and for zombie rows (ended on the
            device earlier).
        token_ids: int32 [R, W]; valid are the first ``counts`` of each row.
        finish: int32 [R], a ``Finish`` code, of the row's last token; nonzero only where there is one.
        logprobs: over R * W positions, W for each row, None when no row asked; counts are 0 for those that brought none.
        prompt_logprobs: row -> log-probabilities of the prompt tokens that FOLLOW each token of the row
            (position start+1 up to start+query_len, cut at the prompt's end).
        vectors: float32 [R, width of the pooler], of a step that pools; valid where the row ends its text. Counts are 0 then.
        token_vectors: float32 [T, width of the pooler's tokens], of a step whose plan wants them.
        aligned: row -> int32, see ``RequestUpdate.aligned``.
    """

    counts: Int32s
    token_ids: Int32s
    finish: Int32s
    logprobs: LogprobsResult | None = None
    prompt_logprobs: dict[int, LogprobsResult] = field(default_factory=dict)
    vectors: Floats | None = None
    token_vectors: Floats | None = None
    aligned: dict[int, Int32s] = field(default_factory=dict)
