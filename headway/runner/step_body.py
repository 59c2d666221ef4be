"""The device's part of a step: edits, unpack, forward, logits, sampling, slot update. What graphs capture and steps run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch

from headway.core.chunks import most_chunks
from headway.core.hearing import AlignedRow
from headway.core.plan import Bound
from headway.kernels.apply_edits import apply_edits
from headway.kernels.masked_write import masked_write_
from headway.kernels.media_places import media_places
from headway.kernels.slot_advance import slot_advance
from headway.models.interface import ALL_TOKENS, LAST_TOKENS, AligningModel, Model
from headway.parallel.turns import Turns
from headway.pooling.pooler import Pooler
from headway.runner.batch_buffers import BatchBuffers
from headway.runner.border import Border
from headway.runner.config import RunnerConfig
from headway.runner.halves import Halves
from headway.runner.launch import TOKEN_VECTORS, Launch, LaunchShape, PromptPositions
from headway.runner.prefill_graphs import max_edits
from headway.runner.prompt_logprobs import gather_entries
from headway.runner.results import Part, record_ints
from headway.sampling.sampler import GRAMMAR_EDIT, Sampler, Variant
from headway.speculative.base import Drafter
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool
from headway.state.media import MEDIA, MEDIA_ROWS
from headway.state.packed_step import ROW_INTS, ROWS_AT
from headway.state.slots import SlotArena
from headway.state.token_types import ADAPTER, TOKEN_TYPES, slots_of_tokens, token_types


class StepBody:
    """The kernels of a step. Everything they read and write has an address of its own for the engine's life.

    Args:
        arena: slot tables; the sampler's and the core ones.
        caches: the model's.
        drafter: guesses the next tokens, where ``config.width`` is more than 1.
        pooler: takes vectors from the hidden states; such a body computes no logits and samples nothing.
        turns: overlaps the halves of a step; None: they run one after the other.

    Attributes:
        packed: int32 [P], the packed step on the device.
        caches: the model's.
        border: exchanges with other stages, before and behind each step; None: there are none.
        pools: it pools, and generates nothing.
        vector, token_vector: numbers of a row's and of a token's vector; 0 where they have none.
        results: int32 [max_in_flight, max_num_seqs, record_ints(width)], what steps report.
    """

    def __init__(
        self,
        device: torch.device,
        model: Model,
        sampler: Sampler,
        arena: SlotArena,
        caches: CachePool,
        config: RunnerConfig,
        drafter: Drafter | None = None,
        pooler: Pooler | None = None,
        turns: Turns | None = None,
    ) -> None:
        assert (drafter is None) == (config.width == 1), "rows of drafts need a drafter, and a drafter such rows"
        self.model, self.sampler, self.config = model, sampler, config
        self._halves = Halves(model, caches, turns)
        self.border: Border | None = None
        if model.spec.stage is not None:
            watched = () if drafter is None else drafter.auxiliary
            handed = model.spec.hidden_size * model.spec.streams
            self.border = Border(model.spec.stage, config, handed, model.dtype, device, watched)
        self._relay = None if self.border is None else self.border.relay
        self._arena, self.caches, self._drafter, self._pooler = arena, caches, drafter, pooler
        self._layers: tuple[int, ...] | None = None  # that steps run; None: all
        rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
        edits = config.edits_per_row * (5 * rows + 3 * tokens)
        num_ints = ROWS_AT + ROW_INTS * rows + edits + config.max_upload_ints
        if model.spec.vision is not None:
            num_ints += 4 * tokens
        if config.has_states:
            num_ints += 2 * most_chunks(tokens, rows, tokens) + 4 * rows
        self.packed = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self.results = torch.zeros(
            config.max_in_flight, rows, record_ints(config.width), dtype=torch.int32, device=device
        )
        # What is learned later goes into records that nobody reads: those of its step may be on their way to the host.
        self._unread = torch.zeros_like(self.results) if self._relay is not None else self.results
        self._buffers = BatchBuffers(
            arena, tokens, rows, config.block_size, model.spec.cache, config.width, caches.replays > 0
        )
        self.pools = pooler is not None
        gives = pooler is not None and not self.hands_on
        self.vector, self.token_vector = (pooler.width, pooler.token_width) if pooler is not None and gives else (0, 0)
        self._has_types = model.spec.num_token_types > 1
        self._aligner = cast(AligningModel, model).aligner(config.alignment) if config.alignment else None
        # Rows that go on behind an outcome: the next outcome reads one of the two, and writes the other.
        self._going_on = torch.zeros(2, rows, dtype=torch.int32, device=device)

    @property
    def hands_on(self) -> bool:
        """Whether a later stage draws the tokens or takes the vectors, and has the results."""
        return self._relay is not None

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether no token of a prompt may be skipped because its keys are cached."""
        return self._pooler is not None and self._pooler.wants_all

    def apply_edits(self, num_edits: int) -> None:
        """Apply the packed step's edits, at most ``num_edits``."""
        if num_edits:
            apply_edits(self._arena.ints, self.packed, num_edits)

    def edit_first(self, num_edits: int) -> None:
        """Apply the step's edits ahead of the rest, as counts to rebuild or too many for a graph want it."""
        self.apply_edits(num_edits)
        self.packed[:1].zero_()  # a graph shall find none

    def rebuild_counts(self, position: int, number: int) -> None:
        """Recount the tokens of ``number`` slots that are listed in the packed step."""
        if number:
            self.sampler.penalties.rebuild(self.packed[position : position + number], self.config.max_model_len)

    def row_slots(self, number: int) -> torch.Tensor:
        """int32 [number], slots of the rows of the step that was unpacked last."""
        return self._buffers.row_slots(number)

    def runs_in_halves(self, launch: Launch) -> bool:
        """Whether a step runs as two micro-batches: not one whose tokens see later ones. What other replicas run with this one
        is halved as all of them together want it."""
        tokens, decodes = launch.most_tokens or launch.shape.tokens, launch.shape.only_decode
        return self._wants_halves(tokens, launch.all_decode if launch.most_tokens else decodes, launch.media)

    def _wants_halves(self, tokens: int, only_decode: bool, media: bool = False) -> bool:
        vision = self.model.spec.vision
        sees_later = media and vision is not None and bool(vision.sees)
        return self.config.halves(tokens, only_decode=only_decode) and not sees_later

    def unpack(
        self,
        shape: LaunchShape,
        max_seq_len_bound: Bound,
        counted: bool = True,
        media: bool = False,
        halved: bool | None = None,
    ) -> StepBatch:
        """Expand the packed step into a batch of this (padded) shape; see ``BatchBuffers.unpack`` and ``StepPlan.media``.

        Args:
            halved: it will run as two micro-batches, each of which must know how many of its rows decode, so that these are not
                counted; None: as a step of this exact shape does.
        """
        halved = self._wants_halves(shape.tokens, shape.only_decode, media) if halved is None else halved
        batch = self._buffers.unpack(
            self.packed,
            num_tokens=shape.tokens,
            num_rows=shape.rows,
            num_decode_rows=shape.decode_rows if shape.width == 1 else 0,
            max_query_len=shape.longest,
            max_seq_len_bound=max_seq_len_bound,
            counted=counted and not halved,
            width=shape.width,
            max_prompts=shape.rows - shape.decode_rows,
        )
        if self._has_types:
            batch.token_types = token_types(batch, self._arena.view(TOKEN_TYPES))
        if self.model.spec.adapters:
            batch.adapters = self._arena.view(ADAPTER).index_select(0, slots_of_tokens(batch))
        self._place_media(batch, media)
        batch.halved = halved
        if self.border is not None:
            batch.entering = self.border.entering(shape.tokens)
        return batch

    def _place_media(self, batch: StepBatch, media: bool) -> None:
        """What tokens are within pictures, once for all layers; steps without any pay for nothing but rotations by place."""
        vision = self.model.spec.vision
        if vision is None or not (media or vision.rotates_by_place):
            return
        tables = self._arena.view(MEDIA), self._arena.view(MEDIA_ROWS)
        found = media_places(batch.positions, batch.query_start, batch.row_slots, *tables, vision.sees == "spans")
        if vision.rotates_by_place:
            batch.places = found[2:]
        if media:
            batch.media_rows = found[0]
            batch.ends = found[1] if vision.sees else None

    def front(self, shape: LaunchShape, media: bool = False) -> tuple[StepBatch, torch.Tensor]:
        """The front half of a step of a graph's shape, padded: edits, unpack, ``outcome_states``; ``media``: see the plan."""
        self.apply_edits(self.config.edits_per_row * (shape.rows if shape.only_decode else max_edits(*shape[:3])))
        # Contexts, and cached prefixes, may be of any length. A graph of steps with prompts does not know how many rows decode
        # beside them, which halves must.
        batch = self.unpack(
            shape, Bound(self.config.longest_row), media=media, halved=None if shape.only_decode else False
        )
        return batch, self.outcome_states(batch)

    def eager(self, launch: Launch, variant: Variant, counted: bool) -> tuple[list[Part], PromptPositions | None]:
        """A whole step but its edits, kernel by kernel; gives its log-probability parts, those of prompts last.

        Args:
            counted: as in ``BatchBuffers.unpack``.
        """
        prompt, aligned = launch.prompt, [each for _, each in launch.aligned]
        batch = self.unpack(launch.shape, launch.max_seq_len_bound, counted, launch.media, self.runs_in_halves(launch))
        batch.prefix_bound, batch.most_tokens = launch.prefix_bound, launch.most_tokens
        if self._relay is not None:
            return self.back(batch, self.outcome_states(batch), variant), None
        if prompt is None and not aligned:
            return self.back(batch, self.outcome_states(batch), variant), None
        starts: list[Part] = []
        if aligned:
            hidden, found = self.align(batch, aligned)
            starts.append((found,))
        else:
            hidden = self.forward(batch, only_rows=False)
        parts = self.back(batch, self.row_logits(batch, hidden), variant)
        if prompt is not None:
            most = self.config.prompt_logits_chunk
            parts.append(gather_entries(self.packed, prompt, hidden, self.whole_logits, self.sampler.logprobs, most))
        return parts + starts, prompt

    def align(self, batch: StepBatch, rows: Sequence[AlignedRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, hidden], and int32 [all the rows' tokens] the encoder output with which each token begins."""
        assert self._aligner is not None, "such requests are refused where the model cannot do it"
        forward = self.model.forward(batch, self.caches, replace(ALL_TOKENS, auxiliary=self._aligner.layers))
        return forward.hidden, self._aligner(forward.auxiliary, batch, rows, self.caches)

    def rehearse_alignment(self, num_tokens: int) -> None:
        """``align`` with the most that a row can have. Start-up only."""
        encoder = self.model.spec.encoder
        if self._aligner is not None and encoder is not None:
            count = min(num_tokens, self.config.max_model_len - 1)
            batch = self.unpack(LaunchShape(count, 1, 0, count), Bound(count))
            self.align(batch, [AlignedRow(0, 0, count, 0, encoder.longest)])

    def forward(self, batch: StepBatch, *, only_rows: bool) -> torch.Tensor:
        """Hidden states, [R, hidden] of each row's last token with ``only_rows``, else [T, hidden]."""
        drafter = self._drafter
        watched = drafter is not None and (drafter.reads_hidden or bool(drafter.auxiliary))
        want = LAST_TOKENS if only_rows and not watched else ALL_TOKENS
        if drafter is not None and drafter.auxiliary:
            want = replace(want, auxiliary=drafter.auxiliary)
        if self._layers is not None:
            want = replace(want, layers=tuple(sorted({*self._layers, *want.auxiliary})))
        forward = self._halves.forward(batch, want) if batch.halved else self.model.forward(batch, self.caches, want)
        if drafter is not None and watched:
            if self.border is not None:
                forward = self.border.joined(forward)
            drafter.observe(batch, forward)
        whole = watched or batch.halved
        return forward.hidden.index_select(0, batch.logit_indices) if only_rows and whole else forward.hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, V], or of this rank's part of the vocabulary."""
        return self.model.logits(hidden)

    def whole_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, V]."""
        return self.sampler.whole(self.model.logits(hidden))

    def outcome_states(self, batch: StepBatch) -> torch.Tensor:
        """What the back half needs of the forward pass: logits [W R, V] of all outcomes that the step can have, outcome by
        outcome (W = 1: after each row's last token); with a pooler hidden states, of all tokens or of each row's last."""
        if self._pooler is not None and not self.hands_on:
            return self.forward(batch, only_rows=not self._pooler.wants_all)
        if batch.width > 1 or self._relay is not None:
            return self.row_logits(batch, self.forward(batch, only_rows=False))
        return self.logits(self.forward(batch, only_rows=batch.num_decode_rows < len(batch.row_slots)))

    def row_logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """The same from hidden states of all tokens; these themselves where they are handed on."""
        if self.border is not None and self._relay is not None:
            return self.border.keep(hidden)
        if batch.num_decode_rows < len(batch.row_slots):
            hidden = hidden.index_select(0, batch.logit_indices)
        return self.logits(hidden)

    def back(self, batch: StepBatch, states: torch.Tensor, variant: Variant) -> list[Part]:
        """The back half of a step: choose tokens, append them to the slots, evaluate stop conditions, record results; or pool.

        Rows of drafts are verified outcome by outcome: a row goes on while its request lives and what was drawn is the draft.
        So each draw sees the slot exactly as it would without drafts (penalties, grammars, minimum lengths, the draw's
        position, stops) and gives the same token.

        Args:
            states: of ``outcome_states``.

        Returns:
            log-probabilities of each outcome, in order, empty when none were asked for; or the vectors.
        """
        if self._pooler is not None:
            parts: list[Part] = [] if self.hands_on else [self._vectors(self._pooler, batch, states, variant)]
            self._advance(batch.row_slots, batch.row_slots, variant, ())  # rows that pool draw nothing
            return parts
        if self._relay is not None:
            if len(batch.row_slots) > batch.num_decode_rows:
                self._relay.pass_chunks(self, batch)
            return []
        rows = len(batch.row_slots)
        parts = []
        slots = batch.row_slots
        for offset in range(batch.width):
            run, judge = self._run(offset, rows, batch.width), None
            if run:
                assert self._drafter is not None, "rows of drafts have a drafter"
                judge = self._drafter.judge(batch, slots, offset, variant.flags)
            logits = states[offset * rows : (offset + 1) * rows]
            token_ids, logprobs = self.sampler(logits, slots, variant, judge)
            if self.border is not None:
                self.border.drew(token_ids, offset, batch.width)
            self._advance(slots, token_ids, variant, run)
            parts += [] if logprobs is None else [logprobs]
            slots = self._going_on[offset % 2, :rows]
        self.draft(batch, variant)
        return parts

    @staticmethod
    def _vectors(pooler: Pooler, batch: StepBatch, states: torch.Tensor, variant: Variant) -> Part:
        """Of rows, and of tokens where some row wants them."""
        found: Part = (pooler(states, batch),) if pooler.width else ()
        if pooler.token_width and variant.covers(TOKEN_VECTORS):
            found += (pooler.tokens(states, batch),)
        return found

    def _run(self, offset: int, rows: int, width: int) -> tuple[object, ...]:
        """What ``slot_advance`` is told of rows with drafts."""
        if width == 1:
            return ()
        return self._drafts, self._going_on[offset % 2, :rows], offset

    @property
    def _drafts(self) -> torch.Tensor:
        """int32 [S, K], where there are any."""
        return self._arena.view("drafts").view(-1, self.config.width - 1)

    def draft(self, batch: StepBatch, variant: Variant) -> None:
        """Guess what follows the step's outcomes."""
        if self._drafter is not None:
            self._drafter.propose(batch, variant.flags)
            if self.border is not None and batch.width > 1:
                self.border.guessed(self._drafts, batch.row_slots, batch.width)

    def take_drafts(self, slots: torch.Tensor, drafts: Sequence[torch.Tensor]) -> None:
        """Where tokens are drawn elsewhere: the drafts of ``slots`` (int32 [R], -1: none) are these, int32 [R] each."""
        if drafts:
            table = self._drafts
            place = slots[:, None] * table.shape[1] + torch.arange(len(drafts), device=slots.device)
            masked_write_(table, place, torch.stack(list(drafts), 1), (slots >= 0)[:, None].expand_as(place))

    def settle(self, unsettled: int) -> None:
        """Where tokens are drawn elsewhere: all that precedes a step that can do without those of the ``unsettled`` before
        it."""
        if self._relay is not None:
            self._relay.settle(self, unsettled)

    def advance(
        self,
        slots: torch.Tensor,
        token_ids: torch.Tensor,
        variant: Variant,
        packed: torch.Tensor,
        offset: int,
        width: int,
    ) -> torch.Tensor:
        """Append ``token_ids``, outcome ``offset`` of ``width``, to ``slots`` (int32 [R], -1: none) of the step of ``packed``;
        gives the slots that have a further one."""
        self._advance(slots, token_ids, variant, self._run(offset, len(slots), width), packed)
        return self._going_on[offset % 2, : len(slots)]

    def _advance(
        self,
        slots: torch.Tensor,
        token_ids: torch.Tensor,
        variant: Variant,
        run: tuple[object, ...],
        packed: torch.Tensor | None = None,
    ) -> None:
        view, penalties = self._arena.view, self.sampler.penalties
        advanced = (
            self.packed if packed is None else packed,
            slots,
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
            self.sampler.grammar.advance(advanced, (self._unread, *run))
        else:
            slot_advance(*advanced, self._unread, *run)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside, steps run a few layers only, but use every kernel there is. Start-up only."""
        self._layers = self.model.spec.rehearsed_layers()
        try:
            yield
        finally:
            self._layers = None
