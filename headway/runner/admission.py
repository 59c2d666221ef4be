"""Writes a new request's state into its slot, as edits of the packed step."""

from __future__ import annotations

import numpy as np

from headway.core.automaton import MAX_TABLE_INTS
from headway.core.messages import AddRequest
from headway.core.params import MAX_STOP_TOKEN_IDS
from headway.core.plan import Admission, Int32s
from headway.sampling.feature import SlotEdit, ints
from headway.sampling.sampler import Sampler
from headway.state.packed_step import EDIT_INTS, PackedStep, segment_ints
from headway.state.slots import SlotArena

MAX_EOS_IDS = 16
MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + MAX_EOS_IDS
"""Width of the device's stop table: end-of-sequence tokens first, then the request's own."""


class AdmissionWriter:
    """Stages admissions.

    Args:
        arena: where the slot tables are.
        sampler: adds its own tables' edits.
    """

    def __init__(self, arena: SlotArena, sampler: Sampler) -> None:
        self._arena, self._sampler = arena, sampler
        self._prepared: dict[str, list[SlotEdit]] = {}

    def prepare(self, request: AddRequest) -> int:
        """Work out the slot edits of ``request``: all that can go wrong with one request goes wrong here, before it shares
        a step with others.

        Returns:
            ints of the packed step that admitting it takes, its tokens and KV blocks left out.

        Raises:
            InvalidRequestError: it does not fit the slot tables.
        """
        edits = [*_core_edits(request), *self._sampler.stage(request)]
        self._prepared[request.request_id] = edits
        mask = segment_ints(self._arena.stride("allowed_bits")) if request.host_grammar is not None else 0
        return mask + sum(segment_ints(len(edit.values)) for edit in edits)

    @property
    def num_prepared(self) -> int:
        """Requests whose edits are kept: those that are open."""
        return len(self._prepared)

    def forget(self, request_id: str) -> None:
        """The request is over. Unknown ids are ignored."""
        self._prepared.pop(request_id, None)

    def write(self, packed: PackedStep, admission: Admission) -> None:
        """Add the edits that make ``admission.slot`` belong to its (prepared) request, and update the host mirrors."""
        request, slot = admission.request, admission.slot
        edits = [
            SlotEdit("num_tokens", ints(len(admission.token_ids))),
            SlotEdit("num_computed", ints(admission.num_computed)),
            *self._prepared[request.request_id],
            *self._sampler.restart(request, admission.token_ids[len(request.prompt_token_ids) :]),
        ]
        positions, singles = [], []
        for table, values in edits:
            position = self._arena.position(table, slot)
            if len(values) == 1:
                positions.append(position)
                singles.append(values[0])
            else:
                packed.write(position, values)
        packed.scatter(np.array(positions, np.int32), np.array(singles, np.int32))
        packed.write(self._arena.position("history", slot), admission.token_ids)
        self._sampler.admit(slot, request)


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
