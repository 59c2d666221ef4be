"""What the scheduler keeps of one request, outside the per-slot tables."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from headway.core.errors import InvalidRequestError
from headway.core.messages import AddRequest, TokenLogprobsRow
from headway.core.plan import Exact, Floats, Int32s
from headway.scheduler.cache.encoder import Range


class Status(IntEnum):
    """Where a request is.

    WAITING: in the queue, owns nothing; after a preemption some of its rows may still be in flight.
    RUNNING: owns a slot and blocks.
    DRAINING: every row it will ever need has been launched; slot and blocks are given back, results still come.
    FINISHED: over; whatever still comes for it is ignored.
    """

    WAITING = 0
    RUNNING = 1
    DRAINING = 2
    FINISHED = 3


class Request:
    """One open request.

    Attributes:
        tokens: int32, every known token; current only while the request owns no slot (the slot's history is then).
        max_total: prompt + max_tokens, clamped to the model length; the prompt alone where the request pools.
        upload: int32 values its first admission sends.
        slot: the slot it owns, -1 for none.
        blocks: per group of layers the blocks it holds, in order of position; ``NULL_BLOCK`` for those it has given back.
        first_kept: per group the number of those.
        cross: the blocks that hold the outputs of its encoder item, for cross-attention.
        marks: what of its prompt means more than the tokens, for the names of blocks; see ``MediaPlanner.marks``.
        held: rows of the encoder cache that it is about to read, by item.
        salt: requests with different ones share no prefix: the caller's, and what an encoder has read.
        digests: chained digest of its first full blocks, as far as computed; valid for the request's whole life.
        num_registered: leading blocks already offered to the prefix index (or found there) in this incarnation.
        in_flight: rows launched and not applied; current only while it owns no slot.
        prompt_rows: prompt log-probabilities collected so far, None when not asked for.
        cached_tokens: tokens that the first admission found in the prefix cache, None before it.
        reported: whether an update has been issued.
        drafts: tokens may be guessed ahead for it.
        lags: a grammar on the host must see each token before the next may be drawn.
        pools: it generates nothing, and ends with its prompt.
        by_token: it pools, and each token has a vector.
        pooled: vectors of its tokens so far, f32 [tokens of a step, width] each.
        whole: its prompt runs in one step, because its tokens are placed in a recording.
        aligned: where they are; None until that step's result has come.
        says_more: its updates are not a mere token for the loop: they carry log-probabilities, or a matcher must see them.
        mask: of a request that lags: the tokens it may draw next; None until they are known, and once a row has used them.
        admitted: how many admissions came before its present one.
        junction: tokens of a cached prefix behind which there was no checkpoint of states; 0: none.
    """

    __slots__ = (
        "admitted",
        "aligned",
        "blocks",
        "by_token",
        "cached_tokens",
        "cross",
        "digests",
        "drafts",
        "first_kept",
        "held",
        "in_flight",
        "junction",
        "lags",
        "marks",
        "mask",
        "max_total",
        "message",
        "num_registered",
        "pooled",
        "pools",
        "prompt_len",
        "prompt_rows",
        "reported",
        "request_id",
        "salt",
        "says_more",
        "slot",
        "status",
        "tokens",
        "upload",
        "wants_logprobs",
        "whole",
    )

    def __init__(self, message: AddRequest, max_model_len: int, upload: int) -> None:
        """Raises InvalidRequestError when the request can never run."""
        params = message.params
        self.message = message
        self.request_id = message.request_id
        self.tokens: Int32s = np.asarray(message.prompt_token_ids, dtype=np.int32)
        self.prompt_len = len(self.tokens)
        if self.prompt_len == 0:
            raise InvalidRequestError("the prompt has no tokens; send at least one", "prompt")
        self.pools, self.by_token = message.task.pools, message.task.by_token
        self.pooled: list[Floats] = []
        room = max_model_len - self.prompt_len
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if self.pools:
            max_tokens = 0
        if not (0 if self.pools else 1) <= max_tokens <= room:
            raise InvalidRequestError(
                f"prompt ({self.prompt_len} tokens) + max_tokens ({max_tokens}) exceeds the context of "
                f"{max_model_len}; shorten the prompt or lower max_tokens",
                "prompt" if self.pools else "max_tokens",
            )
        self.max_total = Exact(self.prompt_len + max_tokens)
        self.upload = upload
        self.status = Status.WAITING
        self.slot = -1
        self.blocks: list[list[int]] = []
        self.first_kept: list[int] = []
        self.cross: list[int] = []
        self.salt = _salt(message)
        self.marks: list[tuple[int, int, bytes]] = []
        self.held: dict[int, Range] = {}
        self.digests: list[bytes] = []
        self.num_registered = 0
        self.in_flight = 0
        self.wants_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        self.prompt_rows: list[TokenLogprobsRow] | None = None if params.prompt_logprobs is None else []
        self.whole = message.align is not None
        self.aligned: list[int] | None = None
        self.cached_tokens: int | None = None
        self.reported = False
        self.lags = message.host_grammar is not None
        self.drafts = not (self.lags or params.disable_spec_decode)
        self.says_more = self.wants_logprobs or self.lags
        self.mask: Int32s | None = None
        self.admitted = 0
        self.junction = Exact(0)

    @property
    def upload_now(self) -> int:
        """int32 values an admission sends now: a resumed request brings its generated tokens too."""
        return self.upload + len(self.tokens) - self.prompt_len


def _salt(message: AddRequest) -> str | None:
    """The same tokens mean something else behind another recording or picture."""
    keys = ",".join(item.key.hex() for item in message.media if item.first < 0)
    if not keys:
        return message.cache_salt
    return f"media:{keys}:{message.cache_salt!r}"
