"""The host's half of a step: a plan becomes a ``Launch``. No tensor, no device."""

from __future__ import annotations

import numpy as np

from headway.core.encode import pack_jobs
from headway.core.hearing import AlignedRow
from headway.core.latents import short_row
from headway.core.plan import NO_INTS, Bound, Int32s, StepLimit, StepPlan
from headway.runner.admission import AdmissionWriter
from headway.runner.config import RunnerConfig
from headway.runner.launch import TOKEN_VECTORS, Launch, LaunchShape, PromptPositions
from headway.runner.prompt_logprobs import choose_positions
from headway.sampling.sampler import Sampler, Variant
from headway.state.media import MEDIA_ROWS
from headway.state.packed_step import HEADER_INTS, ROWS_AT, PackedRows, PackedStep, fits_before_rows
from headway.state.slots import SlotArena

NO_LIST = (0, 0)
"""(position, length)"""


class Packer:
    """Packs plans, in the order in which they run: what lies on the device already is not sent again.

    Args:
        arena: says where slot tables are; its memory is not touched.
        sampler: its host mirrors say which features a step needs; its device tensors are not touched.

    Attributes:
        admissions: prepares and writes requests' slot edits.
        decode_bound: context that steps of decode rows are launched for, where that is fixed because graphs of them are;
            None: each step's own.
    """

    def __init__(self, arena: SlotArena, sampler: Sampler, config: RunnerConfig) -> None:
        self._arena, self._sampler, self._config = arena, sampler, config
        self.admissions = AdmissionWriter(arena, sampler, sees_prompt=config.sees == "prompt")
        self.decode_bound: Bound | None = None
        self._prompts: list[Int32s] = [NO_INTS] * config.max_num_seqs  # of each slot's request
        self._packed = 0
        self._last_slots: Int32s | None = None  # of these are the next three
        self._head: PackedRows
        self._shape: LaunchShape
        self._variant = Variant()
        self._launches = 0
        self._drew = np.zeros(config.max_num_seqs + 1, np.int64)
        """Of several stages: the launch that last drew for each slot."""

    def empty(self, ints: Int32s, limit: StepLimit) -> Launch:
        """A step without rows, padded to one: what a replica runs that has nothing to do while others have."""
        index = self._next_index()
        ints[:HEADER_INTS] = 0
        ints[4], ints[5] = ROWS_AT, index
        longest, shape = self.decode_bound or Bound(1), LaunchShape(1, 1, 1, 1)
        found = Launch(ints[:HEADER_INTS], shape, Variant(), index, 0, False, *NO_LIST, longest, Bound(0), Bound(0))
        found.most_tokens, found.all_decode = limit
        return found

    def _next_index(self) -> int:
        self._packed += 1
        return self._packed % self._config.max_in_flight

    def pack(self, plan: StepPlan, ints: Int32s, limit: StepLimit | None = None) -> Launch:
        """Write the packed step into ``ints``, int32 [P], large enough for any; ``Launch.ints`` is a view of it.

        ``launched`` must follow when the step has been sent.
        """
        changed = plan.slots is not self._last_slots or plan.width != self._shape.width
        if changed:
            self._head, self._last_slots = PackedRows(plan), None  # until the device has the rows
            self._shape = _exact_shape(plan, self._head.num_tokens)
        only_decode = self._shape.only_decode
        few = only_decode and not plan.admissions and not plan.masks and fits_before_rows(len(plan.block_edit_ids))
        index = self._next_index()
        packed = PackedStep(ints, self._head, index, sent=few and not changed)
        counted_at, num_counted = self._write_admissions(packed, plan) if plan.admissions else NO_LIST
        if plan.texts is not None:
            self.admissions.write_texts(packed, plan.query_lens, plan.texts)
        if len(plan.block_edit_ids):
            stride = self._arena.stride("block_table")
            base = self._arena.position("block_table", 0)
            packed.scatter(base + plan.block_edit_rows * stride + plan.block_edit_indices, plan.block_edit_ids)
        if plan.media_rows:
            changed_rows = np.array(plan.media_rows, np.int32)
            places = self._arena.position(MEDIA_ROWS, 0) + changed_rows[:, 0] * self._arena.stride(MEDIA_ROWS)
            packed.scatter(places + changed_rows[:, 1], changed_rows[:, 2])
        for slot, words in plan.masks:
            packed.write(self._arena.position("allowed_bits", slot), words)
        if self._config.has_states and not only_decode:
            packed.chunks(plan.query_lens, self._config.width)
            packed.copies(plan.state_loads, plan.state_saves)
        prompt = None if only_decode else self._prompt_positions(packed, plan)
        if changed:
            self._variant = self._sampler.variant(plan.slots)
        if plan.pools:
            self._variant = TOKEN_VECTORS if plan.token_vectors else Variant()
        longest_bound = self.decode_bound if only_decode else None
        if longest_bound is None:
            longest_bound = Bound(int((plan.starts_bound + plan.query_lens).max()))
        decodes = 0 if only_decode else plan.num_decode_rows
        encodings = pack_jobs(plan.encodes) if plan.encodes else ((), NO_INTS)
        return Launch(
            ints[: packed.finish()],
            self._shape,
            self._variant,
            index,
            packed.num_edits,
            bool(plan.masks or num_counted),
            counted_at,
            num_counted,
            longest_bound,
            Bound(int(plan.starts_bound[:decodes].max()) if decodes else 0),
            _prefix_bound(plan) if self._config.has_latents and not only_decode else Bound(0),
            prompt,
            *encodings,
            plan.media,
            self._unsettled(plan) if self._config.num_stages > 1 else 0,
            0 if limit is None else limit.tokens,
            limit is not None and limit.only_decode,
            _aligned_rows(plan),
        )

    def launched(self, plan: StepPlan) -> None:
        """The step that was packed last is on its way: the device has its rows."""
        self._last_slots = plan.slots
        if self._config.num_stages > 1:
            self._launches += 1
            self._drew[plan.slots[plan.samples]] = self._launches

    def _unsettled(self, plan: StepPlan) -> int:
        """How many of the latest steps, at most one less than stages, drew for no slot of this one."""
        latest = int(self._drew[plan.slots].max(initial=0))
        return min(self._launches - latest, self._config.num_stages - 1)

    def _write_admissions(self, packed: PackedStep, plan: StepPlan) -> tuple[int, int]:
        """Stage all admissions; returns (position, number) of the list of slots whose token counts must be rebuilt."""
        if plan.pools:
            self.admissions.write_pooled(packed, plan.admissions)
            return NO_LIST
        for admission in plan.admissions:
            self.admissions.write(packed, admission)
            self._prompts[admission.slot] = admission.token_ids[: len(admission.request.prompt_token_ids)]
        wanted = self._sampler.penalties.wanted
        counted = [admission.slot for admission in plan.admissions if wanted(admission.request)]
        return packed.list_at(np.array(counted, np.int32)), len(counted)

    def _prompt_positions(self, packed: PackedStep, plan: StepPlan) -> PromptPositions | None:
        asked = self._sampler.logprobs.prompt_entries(plan.slots)
        return choose_positions(packed, plan, asked, self._prompts)


def _exact_shape(plan: StepPlan, num_tokens: int) -> LaunchShape:
    rows, decodes, width = plan.num_rows, plan.num_decode_rows, plan.width
    return LaunchShape(num_tokens, rows, decodes, width if decodes == rows else int(plan.query_lens.max()), width)


def _aligned_rows(plan: StepPlan) -> tuple[tuple[int, AlignedRow], ...]:
    """(row, what is done for it) of the requests that are admitted with this step and want it: their prompts run whole."""
    wanted = {each.slot: each.request for each in plan.admissions if each.request.align is not None}
    found = []
    for row in np.flatnonzero(np.isin(plan.slots, list(wanted))) if wanted else ():
        slot, end = int(plan.slots[row]), int(plan.query_lens[: row + 1].sum())
        request, begin = wanted[slot], end - int(plan.query_lens[row])
        assert request.align is not None and end - begin == len(request.prompt_token_ids), "such a prompt is not cut"
        found.append((int(row), AlignedRow(slot, begin, end, request.align.first, request.align.frames)))
    return tuple(found)


def _prefix_bound(plan: StepPlan) -> Bound:
    """Tokens before this step of the rows that make keys and values of cached latents: exact, unless decode rows are among
    them."""
    long = plan.query_lens > short_row(plan.width)
    return Bound(int(plan.starts_bound[long].sum()))
