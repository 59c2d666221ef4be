"""CUDA graphs of steps that hold prompts: launching their kernels one by one takes the host as long as running them, or longer.

A ``SplitStep`` for each of some shapes, so many that every step finds one whose padding costs less than launches would. Rows
that decode beside prompts run on the decode kernel; their number is read on the device, and a shape has a bound of it. Where
rows are few they are treated as prompts of one token: a prompt that is alone shall not wait for a kernel without work.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from headway.device.base import Device
from headway.kernels.sample import RANDOM
from headway.runner.graphs import WHOLE_STEP_VARIANTS, StepGraphs, StepLogits
from headway.runner.launch import LaunchShape
from headway.runner.split_step import MOST_LOGPROBS, SampleAndAdvance
from headway.sampling.draw import ALL_PATHS
from headway.sampling.logprobs import NOT_ASKED
from headway.sampling.sampler import Variant

FEW_ROWS, SOME_ROWS, MANY_ROWS = 16, 64, 128
"""Rows of small steps, of which there are also some of as many rows as there can be: logits are computed for all of them."""
SMALL = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1536)
"""Tokens of small steps of few rows."""
SMALL_SOME = (512, 640, 768, 1024)
"""Tokens of small steps of some rows, all of them prompts or treated as such: 7 us a layer faster than with the decode kernel
for 20 rows of 700 tokens, even at 60."""
SMALL_MANY = (512, 640, 768, 1024, 1536)
SMALL_MOST = (256, 512, 640, 768, 1024, 1536)
"""Tokens of small steps of many rows, and of as many as there can be: a prompt, or a few, that join rows which decode."""
LARGE = (2048, 2560, 3072, 4096, 5120, 6144, 8192, 10240, 12288, 16384, 20480, 24576)
"""Tokens of larger steps; full ones come after them."""
FEW_PROMPTS, MORE_PROMPTS = 16, 64
"""Rows beside those on the decode kernel, in small steps of many rows and in larger ones: the more, the longer is the
attention's grid."""
LONG_PROMPTS = (1, 2, 4, 8, 16)
"""Rows of full steps; beside rows that decode there may be the least and the largest of these numbers. Their product with the
longest prompt in the step is bounded: the attention of such steps has a grid of both, whose programs without work would take
time: beside 400 rows that decode, 7600 tokens of a context of 15000 take 1.44 ms a layer with a bound of one prompt, 1.59 with
one of two, and 1.82 in tiles that need none."""
LONG = 4096
"""Tokens from which on larger steps of few rows are for a long prompt, too."""
MANY_PROMPTS = (1024, 4096)
"""Tokens of steps of any number of prompts, before full ones."""
LEAST_FULL = 15 / 16
"""Share of a shape's tokens that a step must have where padding costs more than launches do."""
FAR = 3072
"""Context of a row that decodes from which on it is not treated as a prompt, where there is another shape. Beside 500 tokens
five rows of 3000 take 38 us a layer either way, of 6000 72 us as prompts and 54 on the decode kernel, of 16000 186 and 110."""


def prefill_shapes(max_tokens: int, max_rows: int, max_model_len: int, width: int = 1) -> list[LaunchShape]:
    """In order of preference, for all steps of up to ``max_tokens`` x ``max_rows``, of rows of up to ``max_model_len`` tokens.

    Left out is what no step fills beyond the tokens of smaller shapes. Where rows have drafts (``width`` > 1) nothing runs on
    the decode kernel: rows that decode are prompts of so many tokens.
    """
    found = {
        _shape(tokens, min(rows, max_rows), others, min(longest, max_model_len))
        for tokens, rows, others, longest in _sizes(max_tokens, max_rows)
        if tokens <= max_tokens
    }
    tiers = sorted({shape.tokens for shape in found})
    below = dict(zip(tiers, [0, *tiers], strict=False))
    filled = [shape for shape in found if shape.most_tokens > below[shape.tokens]]
    if width > 1:
        filled = [shape._replace(width=width) for shape in filled if not shape.decode_rows]
    return sorted(filled, key=lambda shape: (shape.tokens, shape.rows, -shape.decode_rows, shape.longest))


def _sizes(full: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(tokens, rows, rows beside those on the decode kernel, longest row), rows where there are so many."""
    for tokens in SMALL:
        yield tokens, FEW_ROWS, FEW_ROWS, tokens
    for tokens in SMALL_SOME:
        yield tokens, SOME_ROWS, SOME_ROWS, tokens
    for tokens in SMALL_MANY:
        yield tokens, MANY_ROWS, FEW_PROMPTS, tokens
    for tokens in SMALL_MOST:
        yield tokens, most, FEW_PROMPTS, tokens
    for tokens in LARGE:
        rows = FEW_ROWS if tokens < LONG else LONG_PROMPTS[0]
        yield tokens, rows, rows, tokens
    if full <= SMALL[-1]:
        yield full, FEW_ROWS, FEW_ROWS, full
    for prompts in LONG_PROMPTS if full > SMALL[-1] else ():
        yield full, prompts, prompts, 2 * full // prompts
        if prompts in (LONG_PROMPTS[0], LONG_PROMPTS[-1]):
            yield full, most, prompts, 2 * full // prompts
    for tokens in (*LARGE, full):
        yield tokens, most, MORE_PROMPTS, tokens
    for tokens in (*MANY_PROMPTS, full):
        yield tokens, most, most, tokens


def _shape(tokens: int, rows: int, others: int, longest: int) -> LaunchShape:
    rows = min(rows, tokens)
    return LaunchShape(tokens, rows, max(rows - others, 0), min(longest, tokens))


MEDIA = ((512, FEW_ROWS), (512, 0), (1024, 0), (2048, 0), (4096, FEW_ROWS))
"""Tokens and rows (0: as many as there can be) of steps with pictures whose tokens see each other. Their attention is another
kernel, so steps of text alone have graphs of their own. Longer steps hide their launches."""


def media_shapes(max_tokens: int, max_rows: int, max_model_len: int) -> list[LaunchShape]:
    """Of steps with tokens that see later ones, in order of preference."""
    found = {
        _shape(
            min(tokens, max_tokens), min(rows or max_rows, max_rows), min(FEW_PROMPTS, rows or max_rows), max_model_len
        )
        for tokens, rows in MEDIA
    }
    return sorted(found, key=lambda shape: (shape.tokens, shape.rows, -shape.decode_rows))


_NEWCOMERS, _EDITS_EACH, _BLOCK_TOKENS = 16, 24, 16


def max_edits(num_tokens: int, num_rows: int, num_decode_rows: int) -> int:
    """Edits of slots that the graph of a shape applies: newcomers' without prefix hits or long tables, each block one."""
    return _EDITS_EACH * min(num_rows, _NEWCOMERS) + num_tokens // _BLOCK_TOKENS + num_decode_rows


class PrefillGraphs(StepGraphs):
    """Captured steps with prompts.

    Args:
        shapes: of ``prefill_shapes``.
        whole: variants with a graph of the whole step, of small steps of few rows: greedy and random ones.
        hidden_from: tokens from which on the device takes longer for a step than the host for launching its kernels one by one.
    """

    def __init__(
        self,
        device: Device,
        front: StepLogits,
        back: SampleAndAdvance,
        shapes: Sequence[LaunchShape],
        tails: Sequence[Variant],
        hidden_from: int = sys.maxsize,
        whole: Sequence[Variant] = WHOLE_STEP_VARIANTS[:2],
        *,
        hands_on: bool = False,
    ) -> None:
        super().__init__(device, front, back, shapes, tails, hands_on=hands_on)
        self._whole = whole
        self._hidden_from = hidden_from
        self._ordered, self._tokens = list(shapes), [shape.tokens for shape in shapes]

    def shape_for(
        self,
        num_tokens: int,
        num_rows: int,
        num_decode_rows: int,
        max_query_len: int,
        context_bound: int = 0,
        width: int = 1,
    ) -> LaunchShape | None:
        """The first shape that holds the step: all shapes together hold every step of the engine. None where launches are
        hidden and it would be padded by much.

        Args:
            context_bound: of the rows that decode. When it is long they get the decode kernel, if a shape not much larger has
                it.
            width: tokens of the rows that decode: where there are drafts more than 1 (see ``Planner``), and no more than the
                shapes have, which hold narrower rows, too.
        """
        step = (num_rows, num_decode_rows if width == 1 else 0, max_query_len)
        fitting = (each for each in self._ordered[bisect_left(self._tokens, num_tokens) :] if each.holds(*step))
        found = next(fitting, None)
        if found is not None and not found.decode_rows and context_bound > FAR:
            near = max(2 * found.tokens, SMALL_MOST[0])
            found = next((each for each in fitting if each.decode_rows and each.tokens <= near), found)
        if found is not None and num_tokens >= self._hidden_from and num_tokens < LEAST_FULL * found.tokens:
            return None
        return found

    def _whole_variants(self, shape: LaunchShape) -> Sequence[Variant]:
        """Of the first kind: a lone prompt waits for the gap between two graphs."""
        return self._whole if shape.tokens <= SMALL[-1] and shape.rows <= FEW_ROWS else ()

    def _tail_variants(self, shape: LaunchShape) -> Sequence[Variant]:
        """Fewer behind long steps, where one that does too much costs little."""
        if shape.tokens <= SMALL[-1]:
            return self._tails
        kinds = (0, RANDOM, ALL_PATHS), (NOT_ASKED, MOST_LOGPROBS)
        return [each for each in self._tails if each.flags in kinds[0] and each.max_logprobs in kinds[1]]
