"""``Launch``: what the host decided about one step, as plain numbers: all that whoever executes the step needs to be told.

The packer makes it from a plan, the executor runs it. It holds no tensor, no request and no reference to the scheduler, and
``encode`` turns it into bytes, so executors in other processes (tensor parallelism) can run the same step from these alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headway.core.encode import Encoding
from headway.core.hearing import AlignedRow
from headway.core.plan import NO_INTS, Bound, Int32s
from headway.sampling.sampler import Variant

TOKEN_VECTORS = Variant(flags=1)
"""Of a step that pools: some row wants a vector for each of its tokens. Nothing is sampled there, so the flags are free."""


class LaunchShape(NamedTuple):
    """Sizes of a step: exact in a ``Launch``, padded where they are the key of a captured graph.

    Attributes:
        tokens, rows: of the step.
        decode_rows: leading rows that continue a generation with ``width`` tokens each. In a key: most rows that the decode
            kernel takes; rows that are prompts, or beyond those, have the room that is left.
        longest: most tokens of a row; with the number of prompts it sizes the grid of their attention.
        width: tokens of a decode row.
    """

    tokens: int
    rows: int
    decode_rows: int
    longest: int
    width: int = 1

    @property
    def only_decode(self) -> bool:
        """Whether all rows are decode rows."""
        return self.decode_rows == self.rows

    @property
    def most_tokens(self) -> int:
        """What the rows of a key can have."""
        return self.decode_rows * self.width + (self.rows - self.decode_rows) * self.longest

    def holds(self, rows: int, decode_rows: int, longest: int) -> bool:
        """Whether a step of exactly so many fits this key, but for its tokens."""
        others = rows - min(decode_rows, self.decode_rows)
        return others <= self.rows - self.decode_rows and longest <= self.longest


class PromptPositions(NamedTuple):
    """Prompt tokens whose log-probabilities a step reports; offsets are into the packed step.

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


@dataclass(slots=True)
class Launch:
    """One step.

    Attributes:
        ints: int32 [n], the packed step (``state.packed_step``) as far as it is used. Where the packer was handed a staging
            buffer it is a view of that buffer.
        shape: exact sizes.
        variant: what its sampling needs.
        index: entry of the result ring that it writes.
        num_edits: edits in ``ints``.
        edits_first: apply these ahead of everything else: more work of this step depends on them.
        counted_at, num_counted: the list, in ``ints``, of slots whose token counts must be rebuilt.
        max_seq_len_bound: >= every row's context, this step's tokens included.
        context_bound: >= the context of the rows that decode beside prompts; 0 without any.
        prefix_bound: >= the tokens before this step of all rows that make keys and values of cached latents; 0 for models
            without.
        prompt: prompt log-probabilities to report.
        encodings: what encoders do ahead of everything else.
        encoder_ints: int32 [m], their inputs, see ``core.encode``.
        media: see ``StepPlan``.
        unsettled: of so many of the latest steps no token is needed, for ranks that do not draw them.
        most_tokens: see ``StepBatch``.
        all_decode: no replica that runs this step has prompts in it.
        aligned: rows whose tokens are placed in a recording, with their numbers; one rank alone does that.
    """

    ints: Int32s
    shape: LaunchShape
    variant: Variant
    index: int
    num_edits: int
    edits_first: bool
    counted_at: int
    num_counted: int
    max_seq_len_bound: Bound
    context_bound: Bound
    prefix_bound: Bound
    prompt: PromptPositions | None = field(default=None)
    encodings: tuple[Encoding, ...] = ()
    encoder_ints: Int32s = field(default_factory=lambda: NO_INTS)
    media: bool = False
    unsettled: int = 0
    most_tokens: int = 0
    all_decode: bool = False
    aligned: tuple[tuple[int, AlignedRow], ...] = ()

    def encode(self) -> bytes:
        """Everything as int32 words, native byte order: the length of what stands before ``ints``, then that, then ``ints`` and
        ``encoder_ints``."""
        assert not self.aligned, "models on several ranks place no tokens in recordings"
        variant, prompt = self.variant, self.prompt
        encodings = [word for each in self.encodings for word in _encoding_words(each)]
        words = [
            *self.shape, variant.edits, variant.flags, variant.max_logprobs, self.index, self.num_edits,
            int(self.edits_first), self.counted_at, self.num_counted, self.max_seq_len_bound, self.context_bound,
            self.unsettled, self.prefix_bound, self.most_tokens, int(self.all_decode),
            int(self.media), len(encodings), len(self.encoder_ints),
        ]  # fmt: skip
        if prompt is not None:
            lists = (prompt.indices_at, prompt.targets_at, prompt.slots_at, prompt.entries)
            words += [*lists, *itertools.chain.from_iterable(prompt.rows)]
        words += encodings
        head = np.array([len(words), *words], np.int32)
        return head.tobytes() + self.ints.tobytes() + self.encoder_ints.tobytes()

    @classmethod
    def decode(cls, data: bytes) -> Launch:
        """The inverse of ``encode``; ``ints`` is a view of ``data``.

        Raises:
            ValueError: no launch was encoded so.
        """
        words = np.frombuffer(data, np.int32)
        size = int(words[0]) if len(words) else 0
        counts = words[_HEAD_WORDS - 1 : _HEAD_WORDS + 1].tolist()  # host: host memory
        num_encodings, num_encoder_ints = counts if len(counts) == 2 else (0, 0)
        prompt_words = size - _HEAD_WORDS - num_encodings
        is_whole = prompt_words == 0 or (prompt_words > _PROMPT_WORDS and not (prompt_words - _PROMPT_WORDS) % 2)
        if prompt_words < 0 or not is_whole or num_encodings < 0 or not 0 <= num_encoder_ints <= len(words) - 1 - size:
            raise ValueError(f"{len(data)} bytes that are no launch")
        head, ints = words[1 : 1 + size].tolist(), words[1 + size : len(words) - num_encoder_ints]  # host: host memory
        shape, rest = LaunchShape(*head[:_SHAPE_WORDS]), iter(head[_SHAPE_WORDS:_HEAD_WORDS])
        variant = Variant(next(rest), next(rest), next(rest))
        (
            index,
            num_edits,
            first,
            counted_at,
            num_counted,
            longest,
            context,
            unsettled,
            prefix,
            most,
            decode,
            media,
            *_,
        ) = rest
        prompt = None
        if prompt_words:
            told = head[_HEAD_WORDS : _HEAD_WORDS + prompt_words]
            lists, pairs = told[:_PROMPT_WORDS], told[_PROMPT_WORDS:]
            prompt = PromptPositions(list(zip(pairs[::2], pairs[1::2], strict=True)), *lists)
        return cls(
            ints,
            shape,
            variant,
            index,
            num_edits,
            bool(first),
            counted_at,
            num_counted,
            Bound(longest),
            Bound(context),
            Bound(prefix),
            prompt,
            _encodings_of(head[_HEAD_WORDS + prompt_words :]),
            words[len(words) - num_encoder_ints :],
            bool(media),
            unsettled,
            most,
            bool(decode),
        )


def _encoding_words(encoding: Encoding) -> list[int]:
    rows, sizes, *others = encoding
    return [rows, *map(int, others), len(sizes), *sizes]


def _encodings_of(words: list[int]) -> tuple[Encoding, ...]:
    """Raises ValueError: they are cut short."""
    found, at = [], 0
    while at < len(words):
        behind = at + len(Encoding._fields)  # the sizes stand behind their number
        if behind > len(words) or words[behind - 1] < 0 or behind + words[behind - 1] > len(words):
            raise ValueError(f"{len(words)} words that are no encodings")
        rows, data_at, num_words, places_at, first, end, is_last, num_sizes = words[at:behind]
        at = behind + num_sizes
        sizes = tuple(words[behind:at])
        found.append(Encoding(rows, sizes, data_at, num_words, places_at, first, end, bool(is_last)))
    return tuple(found)


_SHAPE_WORDS = len(LaunchShape._fields)
_HEAD_WORDS = _SHAPE_WORDS + 17
_PROMPT_WORDS = 4
