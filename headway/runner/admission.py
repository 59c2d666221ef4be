"""Writes a new request's state into its slot, as edits of the packed step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headway.core.automaton import MAX_TABLE_INTS
from headway.core.log import logger
from headway.core.messages import AddRequest
from headway.core.params import MAX_STOP_TOKEN_IDS
from headway.core.plan import NO_INTS, Admission, Int32s, Texts
from headway.kernels.suffix_draft import OFF, OWN, SHARED
from headway.runner.pooled_admission import PooledAdmissions
from headway.sampling.feature import SlotEdit, ints
from headway.sampling.sampler import Sampler
from headway.state.media import MEDIA, media_row
from headway.state.packed_step import EDIT_INTS, PackedStep, segment_ints
from headway.state.slots import DRAFT_SCOPE, ENCODER_LEN, SlotArena

MAX_EOS_IDS = 16
MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + MAX_EOS_IDS
"""Width of the device's stop table: end-of-sequence tokens first, then the request's own."""


_AT_ADMISSION = (SlotEdit("num_tokens", ints(0)), SlotEdit("num_computed", ints(0)))
"""What only the admission knows: the first of the single values, which ``write`` fills in."""


class Prepared(NamedTuple):
    """Edits of one request.

    Attributes:
        tables: those of which one value is written.
        values: int32, these values.
        rows: the other edits.
    """

    tables: tuple[str, ...]
    values: Int32s
    rows: list[SlotEdit]


class AdmissionWriter:
    """Stages admissions.

    Args:
        arena: where the slot tables are.
        sampler: adds its own tables' edits; requests that pool need none.
        sees_prompt: tokens of a prompt see all of it.

    Attributes:
        narrow_layers: see ``ModelSpec``; requests that turn that off for their steps are told in the log.
    """

    narrow_layers = 0

    def __init__(self, arena: SlotArena, sampler: Sampler, *, sees_prompt: bool = False) -> None:
        self._arena, self._sampler, self._sees_prompt = arena, sampler, sees_prompt
        self._pooled = PooledAdmissions(arena)
        self._prepared: dict[str, Prepared] = {}
        self._places: dict[tuple[str, ...], tuple[Int32s, Int32s]] = {}

    def prepare(self, request: AddRequest) -> int:
        """Work out the slot edits of ``request``: all that can go wrong with one request goes wrong here, before it shares
        a step with others.

        Returns:
            ints of the packed step that admitting it takes, its tokens and KV blocks left out.

        Raises:
            InvalidRequestError: it does not fit the slot tables.
        """
        if request.task.pools:
            return self._pooled.check(request)
        if request.params.prompt_logprobs is not None and self.narrow_layers:
            logger.warning(
                "request %s asks for prompt_logprobs: steps with its prompt run the upper %d layers on every token",
                request.request_id,
                self.narrow_layers,
            )
        edits = [*_AT_ADMISSION, *_core_edits(request), *self._sampler.stage(request)]
        if self._arena.has(ENCODER_LEN):
            edits.append(SlotEdit(ENCODER_LEN, ints(sum(item.rows for item in request.media))))
        if self._arena.has(DRAFT_SCOPE):
            edits.append(SlotEdit(DRAFT_SCOPE, ints(_draft_scope(request))))
        if self._arena.has(MEDIA):
            edits.append(SlotEdit(MEDIA, media_row(request.runs, self._prompt_seen(request))))
        single = [edit for edit in edits if len(edit.values) == 1]
        rows = [edit for edit in edits if len(edit.values) != 1]
        runs = len(request.runs)
        values = np.concatenate([edit.values for edit in single])
        self._prepared[request.request_id] = Prepared(tuple([edit.table for edit in single]), values, rows)
        mask = segment_ints(self._arena.stride("allowed_bits")) if request.host_grammar is not None else 0
        mask += segment_ints(1) * runs
        begun = sum(segment_ints(len(edit.values)) for edit in self._sampler.restart(request, NO_INTS))
        return mask + begun + segment_ints(1) * len(single) + sum(segment_ints(len(edit.values)) for edit in rows)

    def _prompt_seen(self, request: AddRequest) -> int:
        return len(request.prompt_token_ids) if self._sees_prompt else 0

    @property
    def num_prepared(self) -> int:
        """Requests whose edits are kept: those that are open."""
        return len(self._prepared)

    def forget(self, request_id: str) -> None:
        """The request is over. Unknown ids are ignored."""
        self._prepared.pop(request_id, None)

    def write_pooled(self, packed: PackedStep, admissions: Sequence[Admission]) -> None:
        """``write`` for all requests of a step that pools."""
        self._pooled.write(packed, admissions)

    def write_texts(self, packed: PackedStep, lens: Int32s, texts: Texts) -> None:
        """``write`` for a step of whole texts."""
        self._pooled.write_texts(packed, lens, texts)

    def write(self, packed: PackedStep, admission: Admission) -> None:
        """Add the edits that make ``admission.slot`` belong to its (prepared) request, and update the host mirrors."""
        request, slot = admission.request, admission.slot
        tables, values, rows = self._prepared[request.request_id]
        values[0] = len(admission.token_ids)  # in the order of _AT_ADMISSION
        values[1] = admission.num_computed
        base, stride = self._places.get(tables) or self._find_places(tables)
        packed.scatter(base + stride * slot, values)
        packed.write(self._arena.position("history", slot), admission.token_ids)
        for table, row in (
            *rows,
            *self._sampler.restart(request, admission.token_ids[len(request.prompt_token_ids) :]),
        ):
            packed.write(self._arena.position(table, slot), row)
        self._sampler.admit(slot, request)

    def _find_places(self, tables: tuple[str, ...]) -> tuple[Int32s, Int32s]:
        """Where the first slot's rows of tables lie, and the distance to the next. There are as many lists of tables as
        mixtures of features."""
        base = np.array([self._arena.position(table, 0) for table in tables], np.int32)
        found = base, np.array([self._arena.stride(table) for table in tables], np.int32)
        self._places[tables] = found
        return found


def _draft_scope(request: AddRequest) -> int:
    """Requests with a salt share nothing with others: neither prefixes nor, by the time that guesses save, answers."""
    if request.params.disable_spec_decode or request.host_grammar is not None:
        return OFF
    return SHARED if request.cache_salt is None else OWN


def _core_edits(request: AddRequest) -> list[SlotEdit]:
    params, prompt_len = request.params, len(request.prompt_token_ids)
    assert params.max_tokens is not None, "max_tokens is resolved at the door"
    stop_ids: Int32s = np.array([*request.eos_token_ids, *(params.stop_token_ids or [])], np.int32)
    edits = [
        SlotEdit("prompt_len", ints(prompt_len)),
        SlotEdit("alive", ints(1)),
        SlotEdit("min_total", ints(prompt_len + params.min_tokens)),
        SlotEdit("max_total", ints(prompt_len + params.max_tokens)),
        SlotEdit("stop_counts", ints(len(request.eos_token_ids), len(stop_ids))),
    ]
    if len(stop_ids):
        edits.append(SlotEdit("stop_ids", stop_ids))
    return edits


def max_upload_ints(num_tokens: int, num_blocks: int, vocab_size: int) -> int:
    """Ints that the largest possible admission takes: a bound on what one request may ask of every table."""
    tables = 2 * 1024 + 2048 + 257 + 128 + vocab_size // 32 + 2 + MAX_STOP_IDS + 64
    tables += segment_ints(MAX_TABLE_INTS)
    descriptors = 64 * EDIT_INTS
    return segment_ints(num_tokens) + num_blocks * (1 + EDIT_INTS) + tables + descriptors
