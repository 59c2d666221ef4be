"""``ModelRunner.launch``: THE device loop's body. One step, from plan to readback, without a host wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headway.core.automaton import Vocabulary
from headway.core.ints import cdiv
from headway.core.plan import NO_INTS, Int32s, StepPlan, StepResult
from headway.device.base import Device
from headway.device.readback import Readback, Ticket
from headway.device.staging import StagingRing
from headway.device.step_clock import StepClock, StepEvents
from headway.device.waits import WaitCounter
from headway.kernels.apply_edits import apply_edits
from headway.kernels.sample import RANDOM
from headway.kernels.slot_advance import slot_advance
from headway.runner.admission import AdmissionWriter
from headway.runner.batch_buffers import BatchBuffers
from headway.runner.graphs import DecodeGraphs, Shape, StepGraphs
from headway.runner.prefill_graphs import PrefillGraphs, max_edits
from headway.runner.results import RESULT_INTS, ResultLayout, logprob_ints, pack_results, unpack_results
from headway.runner.split_step import Replayed
from headway.sampling.draw import ALL_PATHS
from headway.sampling.logprobs import LogprobTensors
from headway.sampling.sampler import BIAS_EDIT, GRAMMAR_EDIT, Sampler, Variant
from headway.state.batch import StepBatch
from headway.state.kv_pool import KVPool
from headway.state.packed_step import ROW_INTS, ROWS_AT, PackedRows, PackedStep, fits_before_rows
from headway.state.slots import SlotArena

NO_LIST = (0, 0)  # position, length
BACK_PRESSURE, UNPINNED_COPY = "back_pressure", "unpinned_copy"
PROMPT_LOGITS_CHUNK = 256
"""Prompt positions whose logits exist at once: bounds the memory that prompt_logprobs takes."""
SHORT_PROMPT = 1024
"""Tokens; a rehearsal fills a step with such prompts as well as with a single one."""


class Model(Protocol):
    """What the runner asks of a model."""

    def __call__(self, batch: StepBatch, kv: KVPool, *, only_rows: bool = False) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm; ``only_rows``: [R, hidden], of each row's last token."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, V]."""

    def launches_hidden_from(self) -> int:
        """Tokens from which on a step takes a GPU longer than launching its kernels one by one takes the host."""

    def shortened(self) -> AbstractContextManager[list[int]]:
        """Inside, a call runs the layers of this list alone, and wants a pool of these: all kernels, in less time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    """Sizes the runner allocates for. ``max_in_flight`` is the most steps launched and not yet collected."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int
    max_logprobs: int
    max_upload_ints: int
    max_in_flight: int


@dataclass(slots=True)
class InFlight:
    """A launched step: its plan, where its result will arrive, and the events that time it (None without a device clock)."""

    plan: StepPlan
    ticket: Ticket
    layout: ResultLayout
    events: StepEvents | None


@dataclass(slots=True)
class PromptPositions:
    """Prompt tokens whose log-probabilities a step reports; offsets are into the packed step on the device.

    Attributes:
        rows: (row, positions) per reporting row.
        indices_at: list of the tokens (of the batch) whose logits predict them.
        targets_at: list of the prompt tokens themselves.
        slots_at: list of their slots.
        entries: most entries any row asks for.
    """

    rows: list[tuple[int, int]]
    indices_at: int
    targets_at: int
    slots_at: int
    entries: int

    @property
    def total(self) -> int:
        """Positions over all rows."""
        return sum(count for _, count in self.rows)


class ModelRunner:
    """Owns the device side of an engine: slot tables, batch buffers, KV pool, staging and readback.

    Args:
        arena: slot tables; the sampler's and the core ones.
        kv: the cache.

    Attributes:
        clock: times the steps.
        num_replays: steps that ran as a captured graph, wholly or up to their logits.
    """

    def __init__(
        self, device: Device, model: Model, sampler: Sampler, arena: SlotArena, kv: KVPool, config: RunnerConfig
    ) -> None:
        self.device, self.config = device, config
        self._model, self._sampler, self._arena, self._kv = model, sampler, arena, kv
        self.admissions = AdmissionWriter(arena, sampler)
        self._prompts: list[Int32s] = [NO_INTS] * config.max_num_seqs  # of each slot's request
        rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
        num_ints = ROWS_AT + ROW_INTS * rows + 5 * rows + 3 * tokens + config.max_upload_ints
        self._packed = torch.zeros(num_ints, dtype=torch.int32, device=device.torch_device)
        self.clock, self.num_replays = StepClock(device), 0
        self._staging = StagingRing(device, self._packed)
        self._buffers = BatchBuffers(arena, tokens, rows, config.block_size, kv.num_kv_heads)
        self._results = torch.zeros(
            config.max_in_flight, rows, RESULT_INTS, dtype=torch.int32, device=device.torch_device
        )
        self._result_ring = self._results.view(config.max_in_flight, -1).unbind(0)
        most_entries = max(config.max_logprobs, 128)
        packet = rows * RESULT_INTS + logprob_ints(rows, most_entries) + logprob_ints(tokens, config.max_logprobs)
        self.readback = Readback(device, packet)
        self._vocabulary_source: torch.Tensor | None = None
        self._num_in_flight = 0
        self._inference = torch.inference_mode()
        self._last_slots: Int32s | None = None  # of these are the two below
        self._head: PackedRows
        self._variant = Variant()
        self._graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None

    @property
    def every_edit(self) -> int:
        """``Variant.edits`` of a step that uses all of the sampler's features."""
        return self._sampler.every_edit

    @property
    def launches_hidden_from(self) -> int:
        """The model's."""
        return self._model.launches_hidden_from()

    def use_graphs(self, decode: DecodeGraphs, prefill: PrefillGraphs) -> None:
        """Replay ``decode`` on decode steps and ``prefill`` on steps with prompts from now on."""
        self._graphs, self._prefill_graphs = decode, prefill

    def learn(self, vocabulary: Vocabulary) -> None:
        """Send the bytes of the vocabulary's tokens to the device, without waiting. Only the first call does anything."""
        grammar = self._sampler.grammar
        if grammar.knows_tokens:
            return
        values = grammar.learn(vocabulary)
        self._vocabulary_source = self.device.host_ints(len(values))  # kept, and never written again
        self._vocabulary_source.numpy()[:] = values  # host: host memory
        with self.device.main.active(), torch.inference_mode():
            grammar.vocabulary.view(-1).copy_(self._vocabulary_source, non_blocking=True)

    def launch(self, plan: StepPlan) -> InFlight:
        """Queue one step on the device and return at once.

        The results of at most ``max_in_flight`` steps may be outstanding; a further launch is the caller's bug.
        """
        assert self._num_in_flight < self.config.max_in_flight, "collect a step before launching another"
        staging = self._staging.acquire()
        changed = plan.slots is not self._last_slots
        if changed:
            self._head, self._last_slots = PackedRows(plan), None  # until the device has the rows
        only_decode = plan.num_decode_rows == plan.num_rows
        few = only_decode and not plan.admissions and not plan.masks and fits_before_rows(len(plan.block_edit_ids))
        index = plan.step % self.config.max_in_flight
        packed = PackedStep(staging.ints, self._head, index, sent=few and not changed)
        new_counted = self._write_admissions(packed, plan) if plan.admissions else NO_LIST
        if len(plan.block_edit_ids):
            stride = self._arena.stride("block_table")
            base = self._arena.position("block_table", 0)
            packed.scatter(base + plan.block_edit_slots * stride + plan.block_edit_indices, plan.block_edit_ids)
        for slot, words in plan.masks:
            packed.write(self._arena.position("allowed_bits", slot), words)
        prompt = None if only_decode else self._prompt_positions(packed, plan)
        if changed:
            self._variant = self._sampler.variant(plan.slots)
        variant = self._variant
        layout = ResultLayout(plan.num_rows, plan.num_rows, variant.max_logprobs)
        with self.device.main.active(), self._inference:
            events = self.clock.submit()
            self._staging.send(staging, packed.finish())
            self._last_slots = plan.slots
            num_edits = packed.num_edits
            if plan.masks or new_counted[1]:
                num_edits = self._edit_first(num_edits)
                self._rebuild_counts(new_counted)
            packet = self._run(plan, packed.num_tokens, num_edits, variant, prompt, layout)
            ticket = self.readback.start(packet, None if events is None else events.ended)
        self._num_in_flight += 1
        return InFlight(plan, ticket, layout, events)

    def release(self) -> None:
        """Drop the graphs, which refer back to the runner: its memory is then freed with its last user, not whenever the
        garbage collector finds the cycle."""
        self._graphs = self._prefill_graphs = None

    def collect(self, step: InFlight) -> StepResult:
        """The step's result. Blocks until it has arrived: the engine's only wait."""
        result = unpack_results(step.ticket.wait(), step.layout)
        step.ticket.release()
        self._num_in_flight -= 1
        return result

    def waits(self) -> dict[str, WaitCounter]:
        """Every wait for the device there can be in a step, by reason: the oldest result was not there yet, or a copy blocked
        for want of pinned memory. The staging ring grows instead of waiting."""
        up, down = self._staging.unpinned, self.readback.unpinned
        copies = WaitCounter(up.waits + down.waits, up.seconds + down.seconds)
        return {BACK_PRESSURE: self.readback.back_pressure, UNPINNED_COPY: copies}

    def _write_admissions(self, packed: PackedStep, plan: StepPlan) -> tuple[int, int]:
        """Stage all admissions; returns (position, number) of the list of slots whose token counts must be rebuilt."""
        for admission in plan.admissions:
            self.admissions.write(packed, admission)
            self._prompts[admission.slot] = admission.token_ids[: len(admission.request.prompt_token_ids)]
        wanted = self._sampler.penalties.wanted
        counted = [admission.slot for admission in plan.admissions if wanted(admission.request)]
        return packed.list_at(np.array(counted, np.int32)), len(counted)

    def _prompt_positions(self, packed: PackedStep, plan: StepPlan) -> PromptPositions | None:
        """Lists for the rows whose prompt log-probabilities were asked for."""
        asked = self._sampler.logprobs.prompt_entries(plan.slots)
        if asked.max(initial=-1) < 0:
            return None
        starts = np.cumsum(plan.query_lens) - plan.query_lens
        rows: list[tuple[int, int]] = []
        indices: list[Int32s] = []
        targets: list[Int32s] = []
        for row in np.flatnonzero(asked >= 0):
            prompt = self._prompts[plan.slots[row]]
            first = int(plan.starts_bound[row])
            count = min(first + int(plan.query_lens[row]), len(prompt) - 1) - first
            if count > 0:
                rows.append((int(row), count))
                indices.append(np.arange(starts[row], starts[row] + count, dtype=np.int32))
                targets.append(prompt[first + 1 : first + 1 + count])
        if not rows:
            return None
        slots = np.repeat(plan.slots[[row for row, _ in rows]], [count for _, count in rows])
        entries = int(asked[[row for row, _ in rows]].max())
        return PromptPositions(
            rows=rows,
            indices_at=packed.list_at(np.concatenate(indices)),
            targets_at=packed.list_at(np.concatenate(targets)),
            slots_at=packed.list_at(slots.astype(np.int32)),
            entries=entries,
        )

    def _apply_edits(self, num_edits: int) -> None:
        if num_edits:
            apply_edits(self._arena.ints, self._packed, num_edits)

    def _edit_first(self, num_edits: int) -> int:
        """Apply the step's edits ahead of the rest, as counts to rebuild or too many for a graph want it; how many are left."""
        self._apply_edits(num_edits)
        self._packed[:1].zero_()  # a graph shall find none
        return 0

    def _rebuild_counts(self, counted: tuple[int, int]) -> None:
        position, number = counted
        if number:
            self._sampler.penalties.rebuild(self._packed[position : position + number], self.config.max_model_len)

    def _run(
        self,
        plan: StepPlan,
        num_tokens: int,
        num_edits: int,
        variant: Variant,
        prompt: PromptPositions | None,
        layout: ResultLayout,
    ) -> torch.Tensor:
        """Queue the step's kernels, replayed or eager; returns the packet to read back. ``num_edits`` are still to apply."""
        ring = self._result_ring[plan.step % self.config.max_in_flight]
        if prompt is None:
            replayed = self._replay(plan, num_tokens, num_edits, variant)
            if replayed is not None:
                done, layout.padded_rows = replayed
                layout.logprob_entries = done.variant.max_logprobs
                self.num_replays += 1
                return pack_results(ring, layout.padded_rows, done.parts)
        self._apply_edits(num_edits)
        batch = self._buffers.unpack(
            self._packed,
            num_tokens=num_tokens,
            num_rows=plan.num_rows,
            num_decode_rows=plan.num_decode_rows,
            max_query_len=int(plan.query_lens.max()),
            max_seq_len_bound=int((plan.starts_bound + plan.query_lens).max()),
            counted=self.device.compiles_kernels,  # as graphs do, so that fewer kernels are compiled; a reference would do more
        )
        hidden = self._model(batch, self._kv, only_rows=prompt is None)
        logits = self._model.logits(hidden) if prompt is None else self.row_logits(batch, hidden)
        parts = self.sample_and_advance(batch, logits, variant)
        if prompt is not None:
            layout.prompt_rows, layout.prompt_entries = prompt.rows, prompt.entries
            parts.append(self._prompt_logprobs(hidden, prompt))
        return pack_results(ring, plan.num_rows, parts)

    def _replay(self, plan: StepPlan, num_tokens: int, num_edits: int, variant: Variant) -> tuple[Replayed, int] | None:
        """Run the step as graphs, if some fit: what they gave, and padded rows."""
        decode, prefill = self._graphs, self._prefill_graphs
        if decode is None or prefill is None:
            return None
        graphs: StepGraphs
        shape: Shape | None
        if plan.num_decode_rows == plan.num_rows:
            graphs, shape = decode, decode.shape_for(plan.num_rows, num_edits)
        else:
            decodes, longest = plan.num_decode_rows, int(plan.query_lens.max())
            context = int(plan.starts_bound[:decodes].max()) if decodes else 0
            graphs, shape = prefill, prefill.shape_for(num_tokens, plan.num_rows, decodes, longest, context)
            if shape is not None and num_edits > max_edits(*shape[:3]):
                self._edit_first(num_edits)
        return None if shape is None else (graphs.replay(shape, variant), shape[1])

    def decode_logits(self, num_rows: int, max_edits: int) -> tuple[StepBatch, torch.Tensor]:
        """The front half of a decode step of ``num_rows`` padded rows, as graphs capture it: edits, unpack, forward, logits."""
        self._apply_edits(max_edits)
        batch = self._buffers.unpack(
            self._packed,
            num_tokens=num_rows,
            num_rows=num_rows,
            num_decode_rows=num_rows,
            max_query_len=1,
            max_seq_len_bound=self.config.max_model_len,
        )
        return batch, self._model.logits(self._model(batch, self._kv))

    def prefill_logits(
        self, num_tokens: int, num_rows: int, num_decode_rows: int, max_query_len: int
    ) -> tuple[StepBatch, torch.Tensor]:
        """The front half of a step of a ``PrefillShape``, padded: edits, unpack, forward, logits."""
        self._apply_edits(max_edits(num_tokens, num_rows, num_decode_rows))
        batch = self._buffers.unpack(
            self._packed,
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decode_rows=num_decode_rows,
            max_query_len=max_query_len,
            max_seq_len_bound=self.config.max_model_len,  # a cached prefix may be of any length
        )
        return batch, self._model.logits(self._model(batch, self._kv, only_rows=True))

    def row_logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """[R, V] logits after each row's last token, from hidden states of all tokens."""
        if batch.num_decode_rows < len(batch.row_slots):
            hidden = hidden.index_select(0, batch.logit_indices)
        return self._model.logits(hidden)

    def sample_and_advance(self, batch: StepBatch, logits: torch.Tensor, variant: Variant) -> list[LogprobTensors]:
        """The back half of a step: choose tokens, append them to the slots, evaluate stop conditions, record results."""
        token_ids, logprobs = self._sampler(logits, batch.row_slots, variant)
        view, penalties = self._arena.view, self._sampler.penalties
        advanced = (
            self._packed,
            batch.row_slots,
            token_ids,
            view("history"),
            view("num_tokens"),
            view("num_computed"),
            view("alive"),
            penalties.counts,
            penalties.count_on,
            *[view(name) for name in ("min_total", "max_total", "stop_counts", "stop_ids")],
        )
        if variant.edits & GRAMMAR_EDIT:
            self._sampler.grammar.advance(advanced, self._results)
        else:
            slot_advance(*advanced, self._results)
        return [] if logprobs is None else [logprobs]

    def _prompt_logprobs(self, hidden: torch.Tensor, prompt: PromptPositions) -> LogprobTensors:
        def listed(position: int) -> torch.Tensor:
            return self._packed[position : position + prompt.total]

        indices, targets, slots = listed(prompt.indices_at), listed(prompt.targets_at), listed(prompt.slots_at)
        chunks = []
        for start in range(0, prompt.total, PROMPT_LOGITS_CHUNK):
            part = slice(start, start + PROMPT_LOGITS_CHUNK)
            logits = self._model.logits(hidden.index_select(0, indices[part]))
            chunks.append(self._sampler.logprobs.gather_prompt(logits, targets[part], slots[part], prompt.entries))
        ids, logprobs, ranks, counts = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
        return ids, logprobs, ranks, counts

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside, steps run a few layers only, but use every kernel there is. Start-up only."""
        kv = self._kv
        with self._model.shortened() as layers:
            self._kv = kv.of_layers(layers)
            try:
                yield
            finally:
                self._kv = kv

    def rehearse(self, num_tokens: int, num_rows: int) -> None:
        """Run the largest step there can be on padding only, to load kernels and to measure memory. Start-up only."""
        self.device.wait_idle()  # tables, cache and weights were filled on the default stream, which main does not follow
        with self.device.main.active(), torch.inference_mode():
            self._packed.zero_()
            self._apply_edits(1)
            mixed = min(num_rows, num_tokens) - 1  # decode rows beside a prompt
            short = min(num_tokens, SHORT_PROMPT)
            few = min(num_rows, cdiv(num_tokens, short))
            # Long prompts may run on other kernels than short ones, many more than few, and those beside decode rows on more.
            kinds = ((1, 0, num_tokens), (few, 0, short), (num_rows, mixed, num_tokens), (num_rows, 0, num_tokens))
            for rows, decode_rows, longest in dict.fromkeys(kinds):
                batch = self._buffers.unpack(
                    self._packed,
                    num_tokens=num_tokens,
                    num_rows=rows,
                    num_decode_rows=decode_rows,
                    max_query_len=longest,
                    max_seq_len_bound=num_tokens,
                )
                if rows == 1:  # where prompt log-probabilities are wanted; no step takes more memory
                    self.row_logits(batch, self._model(batch, self._kv))
                logits = self._model.logits(self._model(batch, self._kv, only_rows=True))
            most = Variant(self._sampler.every_edit, ALL_PATHS, self.config.max_logprobs)
            masks = Variant(self._sampler.every_edit & ~BIAS_EDIT, RANDOM)
            for variant in (Variant(), Variant(flags=ALL_PATHS), masks, most):
                pack_results(self._result_ring[0], num_rows, self.sample_and_advance(batch, logits, variant))
            self._sampler.penalties.rebuild(batch.row_slots, self.config.max_model_len)
        self.device.wait_idle()
