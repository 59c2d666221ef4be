"""Writes the state of new requests that pool into their slots: all of a step's together, since there are hundreds a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.errors import InvalidRequestError
from headway.core.messages import AddRequest
from headway.core.plan import Admission, Int32s, Texts
from headway.pooling.text import POOL_RAW, POOL_START
from headway.state.packed_step import PackedStep, segment_ints
from headway.state.slots import SlotArena
from headway.state.token_types import ADAPTER, TOKEN_TYPES


class PooledAdmissions:
    """Stages admissions of requests that pool.

    Args:
        arena: where the slot tables are.
    """

    def __init__(self, arena: SlotArena) -> None:
        self._arena = arena
        self._has_types = arena.has(TOKEN_TYPES)
        self._has_adapters = arena.has(ADAPTER)
        names = ["num_tokens", "num_computed", "alive"]
        self._pools_text = arena.has(POOL_START)
        if self._pools_text:
            names += [POOL_START, POOL_RAW]
        places = [(name, 0) for name in names] + ([(TOKEN_TYPES, 0), (TOKEN_TYPES, 1)] if self._has_types else [])
        self._bases = np.array([arena.position(name, 0, column) for name, column in places], np.int64)
        self._strides = np.array([arena.stride(name) for name, _ in places], np.int64)
        self._upload = segment_ints(1) * (len(places) + self._has_adapters)

    def check(self, request: AddRequest) -> int:
        """Ints of the packed step that admitting ``request`` takes, its tokens and KV blocks left out.

        Raises:
            InvalidRequestError: it does not fit the slot tables.
        """
        start, end = request.token_type_range
        length = len(request.prompt_token_ids)
        if not 0 <= start <= end <= length:
            raise InvalidRequestError(
                f"token_type_range ({start}, {end}) is not within the prompt's {length} tokens", "token_type_range"
            )
        if not 0 <= request.pool_start <= length:
            raise InvalidRequestError(
                f"pool_start {request.pool_start} is not within the prompt's {length} tokens", "pool_start"
            )
        if start < end and not self._has_types:
            raise InvalidRequestError(
                "this model knows one type of tokens; leave token_type_range out", "token_type_range"
            )
        if request.adapter and not self._has_adapters:
            raise InvalidRequestError("this model has no adapters; leave the task's name out", "task")
        return self._upload

    def write(self, packed: PackedStep, admissions: Sequence[Admission]) -> None:
        """Add the edits that make each admission's slot belong to its request."""
        slots = np.array([each.slot for each in admissions], np.int64)
        rows = []
        for each in admissions:
            request = each.request
            row = (len(each.token_ids), each.num_computed, 1, request.pool_start, int(request.raw))
            rows.append(row + request.token_type_range)
        values = np.array(rows, np.int32)[:, : len(self._bases)]
        packed.scatter((self._bases + slots[:, None] * self._strides).ravel(), values.ravel())
        history = self._arena.position("history", 0) + slots * self._arena.stride("history")
        tokens = [each.token_ids for each in admissions]
        packed.write_runs(history, np.array([len(each) for each in tokens], np.int32), np.concatenate(tokens))

    def write_texts(self, packed: PackedStep, lens: Int32s, texts: Texts) -> None:
        """Add the edits that make slot r belong to row r, of a step of whole texts. Slots lie side by side in each table."""
        rows, place = len(lens), self._arena.position
        packed.write(place("num_tokens", 0), lens)
        packed.write(place("num_computed", 0), np.zeros(rows, np.int32))
        packed.write(place("alive", 0), np.ones(rows, np.int32))
        if self._pools_text:
            packed.write(place(POOL_START, 0), texts.pool_starts)
            packed.write(place(POOL_RAW, 0), texts.raw)
        if self._has_types:
            packed.write(place(TOKEN_TYPES, 0), texts.type_ranges.reshape(-1))
        if self._has_adapters:
            packed.write(place(ADAPTER, 0), texts.adapters)
        history = place("history", 0) + np.arange(rows) * self._arena.stride("history")
        packed.write_runs(history, lens, texts.tokens)
