"""The only things that cross between the API floor and the engine, in one process or between two.

Plain msgspec structs: they are encoded with msgpack when the engine runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from headway.core.automaton import Automaton
from headway.core.encode import EncoderItem, MediaRun
from headway.core.hearing import Alignment, HearingInfo, SpeechRules
from headway.core.histogram import Histogram
from headway.core.media import SoundInfo, VisionInfo
from headway.core.params import SamplingParams
from headway.core.pooling import PoolingInfo
from headway.core.task import Task


class AddRequest(msgspec.Struct, kw_only=True, array_like=True):
    """A validated request for one completion (``n`` is fanned out above the engine).

    Attributes:
        request_id: unique among open requests; made by us, never by a client.
        prompt_token_ids: at least one id, each below the vocabulary size.
        params: checked; ``max_tokens`` is set and prompt + max_tokens <= max_model_len. Nobody changes them from here on.
        seed: 64-bit seed of this completion's random draws.
        eos_token_ids: the model's end-of-sequence tokens (empty with ignore_eos).
        bad_words_token_ids: ``params.bad_words`` as token sequences.
        cache_salt: requests with different salts never share prefix-cache blocks.
        automaton: ``params.structured_outputs``, compiled.
        host_grammar: the same for the matcher on the host, when no automaton holds it; at most one of the two is set.
        task: what is wanted. Requests that pool generate nothing: of ``params`` nothing is read, and the prompt may be as
            long as the context.
        token_type_range: (start, end): prompt tokens at these positions are of type 1, the others of type 0. The second of a
            pair of texts, for models with ``PoolingInfo.num_token_types`` of 2.
        adapter: which of the model's adapters it runs with, counted from 1 (``PoolingInfo.adapters``); 0: none.
        raw: vectors are wanted as they are, neither normalised nor activated.
        pool_start: tokens before this position take no part in a mean, a maximum, or what is told token by token.
        media: what an encoder must have read before tokens are computed that read it.
        runs: prompt tokens that outputs of ``media`` stand in for, rising.
        speech: the rules of a transcript.
        align: it is wanted when the prompt's tokens are heard.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: list[int]
    bad_words_token_ids: list[list[int]] = []
    cache_salt: str | None = None
    automaton: Automaton | None = None
    host_grammar: str | None = None
    task: Task = Task.GENERATE
    token_type_range: tuple[int, int] = (0, 0)
    pool_start: int = 0
    raw: bool = False
    media: list[EncoderItem] = []
    runs: list[MediaRun] = []
    speech: SpeechRules | None = None
    adapter: int = 0
    align: Alignment | None = None


class TokenLogprobsRow(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: index 0 is the sampled (or prompt) token, the rest as asked for."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of entry 0 among the whole vocabulary, 1-based."""


class RequestUpdate(msgspec.Struct, kw_only=True, array_like=True):
    """What one step brought for one request. Concatenating all updates gives the request's whole output.

    ``finish_reason`` is None while it runs; ``stop_token_id`` is set when a ``stop_token_ids`` entry ended it.
    ``queue_seconds``, in the first update: from arrival at the engine to the first step with the request.
    ``error_parameter``: the request's field that makes ``error`` its own fault and not the engine's.
    ``pooled``: the vector of a request that pools, float32 in native byte order; it comes with the end ("stop"). For tasks by
    token the vectors of all tokens from ``AddRequest.pool_start`` on, one behind the other.
    ``aligned``, in the first update: the encoder output with which each token behind ``AddRequest.align.first`` begins.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobsRow] | None = None
    new_prompt_logprobs: list[TokenLogprobsRow] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    queue_seconds: float | None = None
    error_parameter: str | None = None
    pooled: bytes | None = None
    aligned: list[int] | None = None


class PooledBatch(msgspec.Struct, array_like=True):
    """The ends of many requests that pool, in one object: the columns of ``StepUpdates``.

    Attributes:
        vectors: float32 [n, width], in native byte order.
    """

    request_ids: list[str]
    vectors: bytes
    width: int
    queue_seconds: list[float | None] = []


Update = RequestUpdate | PooledBatch
"""What clients of an engine are handed."""


def ended_by(update: Update) -> list[str]:
    """The requests that are over with it."""
    if isinstance(update, PooledBatch):
        return update.request_ids
    return [update.request_id] if update.finish_reason is not None else []


class StepUpdates(msgspec.Struct, array_like=True, eq=False):
    """The updates of one step, in order. Most rows get one token and nothing else: what they get is two columns, and an
    object only for who iterates. Compares like a list of updates.

    Attributes:
        request_ids: the request of each update.
        token_ids: the one token it brought; meaningless where ``more`` has an entry.
        more: place -> an update that says more than a token, or something else.
        vectors, width: of a step that pools, float32 [n, width] in native byte order: the first n requests have ended with one
            each, but for those in ``more``; their ``token_ids`` mean nothing. With width 0 there are none.
        queue_seconds: of those n, in the same order; see ``RequestUpdate``.
    """

    request_ids: list[str] = []
    token_ids: list[int] = []
    more: dict[int, RequestUpdate] = {}
    vectors: bytes = b""
    width: int = 0
    queue_seconds: list[float | None] = []

    def add(self, updates: Sequence[RequestUpdate]) -> None:
        """Append some. The columns may be shared with others, so they are replaced."""
        if updates:
            self.more.update(enumerate(updates, len(self)))
            self.request_ids = self.request_ids + [each.request_id for each in updates]
            self.token_ids = self.token_ids + [0] * len(updates)

    def __len__(self) -> int:
        return len(self.request_ids)

    def parts(self) -> list[Update]:
        """The same, with vectors of requests that bring nothing else left together."""
        if not self.width or self.more:
            return list(self)
        return [PooledBatch(self.request_ids, self.vectors, self.width, self.queue_seconds)]

    def _pooled(self) -> Iterator[RequestUpdate]:
        size, seconds = 4 * self.width, self.queue_seconds
        for place, request_id in enumerate(self.request_ids):
            found = self.more.get(place)
            if found is None:
                vector = self.vectors[place * size : (place + 1) * size]
                found = RequestUpdate(request_id=request_id, new_token_ids=[], finish_reason="stop", pooled=vector)
                found.queue_seconds = seconds[place] if seconds else None
            yield found

    def __iter__(self) -> Iterator[RequestUpdate]:
        if self.width:
            yield from self._pooled()
            return
        more = self.more
        for place, (request_id, token) in enumerate(zip(self.request_ids, self.token_ids, strict=True)):
            found = more.get(place) if more else None
            yield RequestUpdate(request_id=request_id, new_token_ids=[token]) if found is None else found

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, StepUpdates | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class ModelInfo(msgspec.Struct, kw_only=True):
    """What the API floor must know of a running engine to validate requests; fixed at start-up.

    Attributes:
        eos_token_ids: tokens that end generation unless ignore_eos.
        generation_defaults: sampling fields taken from the model's generation_config.json (temperature, top_k, ...).
        num_kv_tokens: capacity of the KV cache in tokens.
        tasks: what requests may want; "generate", or some that pool.
        pooling: what these give; None where the engine generates.
        vision: how pictures are prepared; None: the model sees none.
        sound: how recordings in prompts are prepared; None: the model hears none there.
        hearing: what transcribing needs to know; None: the model does not hear.
        encoder: what its decoder's cross-attention reads, "audio" or "text"; "" for other models.
        decoder_start: tokens that its decoder begins with where the caller names none.
        max_encoder_tokens: most outputs of the encoder.
        notes: what the engine does without, and why (for example "no pinned memory: copies block").
    """

    model: str
    architecture: str
    dtype: str
    kv_cache_dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    eos_token_ids: list[int]
    generation_defaults: dict[str, float]
    num_kv_tokens: int
    notes: list[str]
    tasks: tuple[Task, ...] = (Task.GENERATE,)
    pooling: PoolingInfo | None = None
    vision: VisionInfo | None = None
    sound: SoundInfo | None = None
    hearing: HearingInfo | None = None
    encoder: str = ""
    decoder_start: list[int] = []
    max_encoder_tokens: int = 0


class StepTrace(msgspec.Struct, array_like=True):
    """One finished step on the host's and the device's time line, in microseconds.

    Attributes:
        begun: host's monotonic clock, seconds, when scheduling it began; the other places are offsets from here.
        schedule_us, launch_us, apply_us: time the host took; the launch follows scheduling at once.
        submitted_us: offset of its first work reaching the device's queue.
        wait_begun_us, wait_us: when the host asked for the result, and how long it waited. Applying follows.
        replayed: it ran as a captured graph.
        headway_us, idle_us, busy_us: see ``device.step_clock``; None where they were not measured. On the device it began at
            submitted_us + headway_us.
    """

    step: int
    rows: int
    tokens: int
    replayed: bool
    begun: float
    schedule_us: float
    launch_us: float
    submitted_us: float
    wait_begun_us: float = 0.0
    wait_us: float = 0.0
    apply_us: float = 0.0
    headway_us: float | None = None
    idle_us: float | None = None
    busy_us: float | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters and gauges since start-up; cheap to read at any time, no device access.

    Attributes:
        run_ahead: steps that may be in flight when a result is awaited.
        num_in_flight: steps launched and not applied.
        num_graph_steps: steps that ran as a captured graph; the others were launched kernel by kernel.
        waits, wait_seconds: by reason; how often and how long the loop waited for the device, as it may.
        schedule_seconds, launch_seconds, apply_seconds: the host's own work.
        has_device_clock: the five figures below are measured.
        device_busy_seconds: the device worked on steps.
        device_idle_seconds: it had nothing to do although there were requests.
        num_timed_steps, num_dry_steps: steps whose lead was measured; those of them that found the device idle.
        headway_seconds: work that was queued on the device when a step was submitted.
        device_step_seconds: a step's time on the device.
        host_step_seconds: the host's own work for a step.
        recent_steps: the latest steps, oldest first.
        host_waits: unsanctioned host waits by kind, back-pressure left out; None where they are not counted.
        num_drafts: rows of drafts that were verified; num_draft_tokens their drafts, num_accepted_tokens those that became
            tokens, num_accepted_tokens_per_pos the same by place, empty where nothing is drafted.
        draft_saved_seconds: what drafts saved, by the times of steps without; below zero where they cost more. Only measured
            where their number adapts.
        replicas: of several engines behind one door each one's own figures; those above are of all together.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    back_pressure_waits: int = 0
    back_pressure_seconds: float = 0.0
    run_ahead: int = 0
    num_in_flight: int = 0
    num_graph_steps: int = 0
    waits: dict[str, int] = {}
    wait_seconds: dict[str, float] = {}
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    apply_seconds: float = 0.0
    rows_per_step: Histogram = msgspec.field(default_factory=Histogram)
    tokens_per_step: Histogram = msgspec.field(default_factory=Histogram)
    host_step_seconds: Histogram = msgspec.field(default_factory=Histogram)
    has_device_clock: bool = False
    device_busy_seconds: float = 0.0
    device_idle_seconds: float = 0.0
    num_timed_steps: int = 0
    num_dry_steps: int = 0
    headway_seconds: Histogram = msgspec.field(default_factory=Histogram)
    device_step_seconds: Histogram = msgspec.field(default_factory=Histogram)
    recent_steps: list[StepTrace] = []
    host_waits: dict[str, int] | None = None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    draft_saved_seconds: float = 0.0
    replicas: list[EngineStats] = []
