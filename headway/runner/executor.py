"""The device's half of a step: a ``Launch`` becomes work on the device and, later, a packet on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.core.automaton import Vocabulary
from headway.core.ints import cdiv
from headway.core.latents import absorbs_all
from headway.core.plan import Int32s, StepResult
from headway.device.base import Device
from headway.device.readback import Readback, Ticket
from headway.device.staging import Staging, StagingRing
from headway.device.step_clock import StepClock, StepEvents
from headway.device.waits import WaitCounter
from headway.runner.config import RunnerConfig
from headway.runner.encoder import EncoderRunner
from headway.runner.encoder_passes import PassRunner
from headway.runner.graphs import DecodeGraphs, StepGraphs
from headway.runner.launch import TOKEN_VECTORS, Launch, LaunchShape
from headway.runner.prefill_graphs import PrefillGraphs, max_edits
from headway.runner.results import Part, ResultLayout, logprob_ints, pack_results, record_ints, unpack_results
from headway.runner.step_body import StepBody
from headway.sampling.logprobs import NOT_ASKED

BACK_PRESSURE, UNPINNED_COPY = "back_pressure", "unpinned_copy"


@dataclass(slots=True)
class Running:
    """A launched step: where its result will arrive, and the events that time it (None without a device clock)."""

    ticket: Ticket
    layout: ResultLayout
    events: StepEvents | None


class Executor:
    """Runs launches in order, on graphs where some fit.

    Attributes:
        body: the kernels, and the memory they use.
        clock: times the steps.
        encoder: the model's; None without, and where another stage has it.
        num_replays: steps that ran as a captured graph, wholly or up to their logits.
    """

    def __init__(self, device: Device, body: StepBody, config: RunnerConfig) -> None:
        self.device, self.body, self._config = device, body, config
        self.clock, self.num_replays = StepClock(device), 0
        self._staging = StagingRing(device, body.packed)
        self._ring = body.results.view(config.max_in_flight, -1).unbind(0)
        rows, tokens, most_entries = config.max_num_seqs, config.max_num_batched_tokens, max(config.max_logprobs, 128)
        outcomes = rows * config.width
        packet = rows * record_ints(config.width) + logprob_ints(outcomes, most_entries)
        packet += logprob_ints(tokens, config.max_logprobs) + rows * body.vector + tokens * bool(config.alignment)
        self.readback = Readback(device, packet)
        # Large, and seldom asked for: buffers of its own, made when a step wants them.
        self._token_readback = Readback(device, packet + tokens * body.token_vector)
        self._vocabulary_source: torch.Tensor | None = None
        self._num_in_flight, self._record_ints = 0, record_ints(config.width)
        self._inference = torch.inference_mode()
        self._graphs: tuple[DecodeGraphs, PrefillGraphs, PrefillGraphs | None] | None = None
        self.encoder: EncoderRunner | None = None
        if body.model.spec.encoder is not None and body.model.spec.encodes:
            self.encoder = EncoderRunner(device, body.model, body.caches, config)

    def use_graphs(self, decode: DecodeGraphs, prefill: PrefillGraphs, media: PrefillGraphs | None) -> None:
        """Replay ``decode`` on decode steps, ``prefill`` on steps with prompts and ``media`` on those with pictures from now
        on; None: these run kernel by kernel."""
        self._graphs = decode, prefill, media

    @property
    def passes(self) -> PassRunner | None:
        """What runs the model's encoder block by block; None: nothing does."""
        return None if self.encoder is None else self.encoder.passes

    def release(self) -> None:
        """Drop the graphs, which refer back to the body: its memory is then freed with its last user, not whenever the garbage
        collector finds the cycle."""
        self._graphs = None
        if self.passes is not None:
            self.passes.release()

    def learn(self, vocabulary: Vocabulary) -> Int32s | None:
        """Send the bytes of the vocabulary's tokens to the device, without waiting. Only the first call does anything: it gives
        the words that were sent."""
        grammar = self.body.sampler.grammar
        if grammar.knows_tokens:
            return None
        words = grammar.learn(vocabulary)
        self.learn_words(words)
        return words

    def learn_words(self, words: Int32s) -> None:
        """The same of words that another executor's ``learn`` gave."""
        grammar = self.body.sampler.grammar
        self._vocabulary_source = self.device.host_ints(len(words))  # kept, and never written again
        self._vocabulary_source.numpy()[:] = words  # host: host memory
        with self.device.main.active(), torch.inference_mode():
            grammar.vocabulary.view(-1).copy_(self._vocabulary_source, non_blocking=True)

    def acquire(self) -> Staging:
        """A host buffer that the next step may be packed into."""
        assert self._num_in_flight < self._config.max_in_flight, "collect a step before launching another"
        return self._staging.acquire()

    def run(self, launch: Launch, staging: Staging | None = None) -> Running:
        """Queue one step on the device and return at once.

        The results of at most ``max_in_flight`` steps may be outstanding; a further one is the caller's bug.

        Args:
            staging: the buffer, from ``acquire``, that ``launch.ints`` is a view of; None: it lies elsewhere and is copied.
        """
        if staging is None:
            staging = self.acquire()
            staging.ints[: len(launch.ints)] = launch.ints
        rows = launch.shape.rows
        entries = NOT_ASKED if self.body.hands_on else launch.variant.max_logprobs
        layout = ResultLayout(rows, rows, entries, launch.shape.width, self._record_ints)
        layout.vector = self.body.vector
        if launch.variant.covers(TOKEN_VECTORS) and self.body.token_vector:
            layout.token_vector, layout.num_tokens = self.body.token_vector, launch.shape.tokens
            layout.padded_tokens = launch.shape.tokens
        with self.device.main.active(), self._inference:
            events = self.clock.submit()
            if launch.encodings:
                self._encode(launch)
            self._staging.send(staging, len(launch.ints))
            self.body.settle(launch.unsettled)
            num_edits = launch.num_edits
            if launch.edits_first:
                self.body.edit_first(num_edits)
                self.body.rebuild_counts(launch.counted_at, launch.num_counted)
                num_edits = 0
            packet = self._queue(launch, num_edits, layout)
            readback = self._token_readback if layout.token_vector else self.readback
            ticket = readback.start(packet, None if events is None else events.ended)
        self._num_in_flight += 1
        return Running(ticket, layout, events)

    def collect(self, step: Running) -> StepResult:
        """The step's result. Blocks until it has arrived: the engine's only wait."""
        result = unpack_results(step.ticket.wait(), step.layout)
        step.ticket.release()
        self._num_in_flight -= 1
        return result

    def waits(self) -> dict[str, WaitCounter]:
        """Every wait for the device there can be in a step, by reason: the oldest result was not there yet, or a copy blocked
        for want of pinned memory. The staging ring grows instead of waiting."""
        readbacks = (self.readback, self._token_readback)
        rings = (self._staging,) if self.encoder is None else (self._staging, self.encoder.staging)
        copies = _added(*(each.unpinned for each in (*rings, *readbacks)))
        return {BACK_PRESSURE: _added(*(each.back_pressure for each in readbacks)), UNPINNED_COPY: copies}

    def _encode(self, launch: Launch) -> None:
        """Queue the launch's encodings, unless the encoder is on another stage."""
        if self.body.model.spec.encodes:
            assert self.encoder is not None, "a step with encodings needs a model with an encoder"
            self.encoder.run(launch)

    def _queue(self, launch: Launch, num_edits: int, layout: ResultLayout) -> torch.Tensor:
        """Queue the step's kernels, replayed or eager; returns the packet to read back. ``num_edits`` are still to apply."""
        found, border = self._graphs_for(launch, num_edits), self.body.border
        shape = launch.shape if found is None else found[1]
        if border is not None:
            border.begin(shape.tokens)
        parts = self._eager(launch, num_edits, layout) if found is None else self._replay(*found, launch, layout)
        if border is not None:
            border.end(self.body, shape, launch.variant)
        ring = self._ring[launch.index]
        return pack_results(ring, self._record_ints, shape.rows, parts)

    def _eager(self, launch: Launch, num_edits: int, layout: ResultLayout) -> list[Part]:
        """Queue a step kernel by kernel."""
        self.body.apply_edits(num_edits)
        # Decode rows are counted on the device as in graphs, so that fewer kernels are compiled; a reference would do more.
        parts, prompt = self.body.eager(launch, launch.variant, counted=self.device.compiles_kernels)
        if prompt is not None:
            layout.prompt_rows, layout.prompt_entries = prompt.rows, prompt.entries
        layout.aligned = [(row, each.num_placed) for row, each in launch.aligned]
        return parts

    def _replay(self, graphs: StepGraphs, shape: LaunchShape, launch: Launch, layout: ResultLayout) -> list[Part]:
        """Queue a step as graphs."""
        done = graphs.replay(shape, launch.variant)
        layout.padded_rows, layout.padded_tokens, layout.width = shape.rows, shape.tokens, shape.width
        layout.logprob_entries = done.variant.max_logprobs
        self.num_replays += 1
        return done.parts

    def _graphs_for(self, launch: Launch, num_edits: int) -> tuple[StepGraphs, LaunchShape] | None:
        """Graphs that fit the step, and the padded shape; None: there are none. Both follow from the launch, so all ranks come
        to the same."""
        if self._graphs is None or launch.prompt is not None or launch.aligned:
            return None
        decode, prompts, media = self._graphs
        prefill = media if launch.media else prompts
        step = launch.shape
        graphs: StepGraphs
        if launch.most_tokens:  # the others must come to the same graph, or to none
            if not launch.all_decode or self._config.width > 1:
                return None
            graphs, shape = decode, decode.shape_for(launch.most_tokens, 0)
            if shape is not None and num_edits > self._config.edits_per_row * shape.rows:
                self.body.edit_first(num_edits)
        elif step.only_decode:
            graphs, shape = decode, decode.shape_for(step.rows, cdiv(num_edits, self._config.edits_per_row), step.width)
        elif prefill is None or self.body.runs_in_halves(launch):
            return None  # halves must know how many of their rows decode
        else:
            graphs, shape = prefill, prefill.shape_for(*step[:4], launch.context_bound, step.width)
            # Graphs hold no piece of a context that becomes keys and values: they cannot know how many there will be.
            if shape is not None and launch.prefix_bound and not absorbs_all(*shape[:2], *shape[3:]):
                return None
            if shape is not None and num_edits > self._config.edits_per_row * max_edits(*shape[:3]):
                self.body.edit_first(num_edits)
        return None if shape is None else (graphs, shape)


def _added(*counters: WaitCounter) -> WaitCounter:
    return WaitCounter(sum(each.waits for each in counters), sum(each.seconds for each in counters))
