"""Which steps with prompts are graphs, and of what shape."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.kernels.sample import RANDOM
from headway.runner.launch import LaunchShape
from headway.runner.prefill_graphs import FAR, FEW_PROMPTS, LARGE, SMALL, PrefillGraphs, prefill_shapes
from headway.runner.split_step import tail_variants
from headway.sampling.sampler import Variant

EVERY_EDIT = 31


def graphs(max_tokens: int, max_rows: int, max_model_len: int = 40960) -> PrefillGraphs:
    """Never captured."""
    nothing: Any = None
    shapes = prefill_shapes(max_tokens, max_rows, max_model_len)
    return PrefillGraphs(nothing, nothing, nothing, shapes, [Variant(), *tail_variants(EVERY_EDIT)])


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "max_model_len"),
    [
        (8, 4, 64),
        (64, 4, 64),
        (1000, 200, 4096),
        (1536, 200, 300),
        (4096, 8, 40960),
        (8192, 512, 4096),
        (8192, 1, 2048),
    ],
)
def test_shapes_fit_the_engine(max_tokens: int, max_rows: int, max_model_len: int) -> None:
    shapes = prefill_shapes(max_tokens, max_rows, max_model_len)
    assert len(set(shapes)) == len(shapes) <= 50
    for tokens, rows, decode_rows, longest, _ in shapes:
        assert tokens <= max_tokens and 0 < rows <= min(max_rows, tokens) and longest <= min(tokens, max_model_len)
        assert 0 <= decode_rows < rows  # else the step would be taken for one of decode rows alone


@given(data=st.data())
def test_every_step_has_a_shape(data: st.DataObject) -> None:
    max_rows = data.draw(st.sampled_from([1, 7, 64, 256, 512]))
    full = data.draw(st.sampled_from([512, 1000, 2048, 5000, 8192, 16384]))
    max_model_len = data.draw(st.sampled_from([100, 2048, 40960]))
    made = graphs(full, max_rows, max_model_len)
    rows = data.draw(st.integers(1, max_rows))
    decode_rows = data.draw(st.integers(0, rows - 1))
    longest = data.draw(st.integers(1, min(max_model_len, full - rows + 1)))
    tokens = data.draw(st.integers(longest + rows - 1, min(full, decode_rows + longest * (rows - decode_rows))))
    shape = made.shape_for(tokens, rows, decode_rows, longest)
    assert shape is not None and shape.tokens >= tokens and shape.rows >= rows and shape.longest >= longest
    assert shape.rows - shape.decode_rows >= rows - min(decode_rows, shape.decode_rows)
    if tokens <= LARGE[-1] and rows - decode_rows <= FEW_PROMPTS:
        assert shape.tokens <= 2 * max(tokens, rows, 128)


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        ((10, 1, 0, 10), (16, 16, 0, 16)),
        ((512, 1, 0, 512), (512, 16, 0, 512)),
        ((300, 17, 16, 200), (512, 64, 0, 512)),
        ((812, 301, 300, 512), (1024, 512, 496, 1024)),
        ((540, 29, 28, 512), (640, 64, 0, 640)),
        ((577, 66, 65, 512), (640, 128, 112, 640)),
        ((812, 128, 100, 512), (1024, 512, 0, 1024)),  # more prompts than go beside a hundred rows
        ((200, 180, 179, 21), (256, 256, 240, 256)),
        ((200, 180, 0, 21), (1024, 512, 0, 1024)),
        ((1100, 3, 0, 500), (1536, 16, 0, 1536)),
        ((2000, 1, 0, 2000), (2048, 16, 0, 2048)),
        ((4000, 1, 0, 4000), (4096, 1, 0, 4096)),
        ((2000, 3, 1, 1000), (2048, 16, 0, 2048)),
        ((7000, 1, 0, 7000), (8192, 1, 0, 8192)),
        ((7000, 2, 0, 4000), (8192, 2, 0, 8192)),
        ((7680, 8, 0, 1024), (8192, 8, 0, 2048)),
        ((8192, 16, 0, 1024), (8192, 16, 0, 1024)),
        ((8192, 3, 2, 8190), (8192, 512, 511, 8192)),
        ((8192, 401, 400, 7792), (8192, 512, 511, 8192)),
        ((8192, 402, 400, 4000), (8192, 512, 448, 8192)),
        ((8192, 416, 400, 512), (8192, 512, 496, 1024)),
        ((8192, 417, 400, 512), (8192, 512, 448, 8192)),
        ((8192, 512, 510, 7000), (8192, 512, 448, 8192)),
        ((8192, 512, 511, 7681), (8192, 512, 511, 8192)),
        ((8192, 512, 0, 16), (8192, 512, 0, 8192)),
    ],
)
def test_a_step_takes_the_first_shape_that_holds_it(
    step: tuple[int, int, int, int], shape: tuple[int, int, int, int]
) -> None:
    """(tokens, rows, rows that decode, longest row)."""
    assert graphs(8192, 512).shape_for(*step) == LaunchShape(*shape)


def test_small_steps_of_few_rows_are_whole_graphs() -> None:
    made = graphs(8192, 256)
    whole = {shape for shape in made.shapes if made._whole_variants(shape)}
    assert whole == {LaunchShape(tokens, 16, 0, tokens) for tokens in SMALL}
    assert made._whole_variants(LaunchShape(512, 16, 0, 512)) == (Variant(), Variant(flags=RANDOM))


def test_long_steps_have_fewer_tails_that_cover_as_much() -> None:
    made = graphs(8192, 256)
    few, all_of_them = made._tail_variants(made.shapes[-1]), made._tail_variants(made.shapes[0])
    assert len(few) < len(all_of_them)
    assert all(any(one.covers(other) for one in few) for other in all_of_them)


def test_what_covers_a_step_gives_all_that_was_asked_and_no_log_probabilities_that_were_not() -> None:
    sizes = [Variant(*each) for each in product((0, 1, 3), (0, 2, 6), (-1, 0, 3))]
    for mine, asked in product(sizes, sizes):
        wanted = asked.edits & ~mine.edits == 0 and asked.flags & ~mine.flags == 0
        if asked.max_logprobs < 0:
            wanted = wanted and mine.max_logprobs < 0
        else:
            wanted = wanted and mine.max_logprobs >= asked.max_logprobs
        assert mine.covers(asked) == wanted, (mine, asked)


def test_rows_of_long_contexts_get_the_decode_kernel() -> None:
    made = graphs(8192, 512)
    assert made.shape_for(500, 6, 5, 495, FAR) == LaunchShape(512, 16, 0, 512)
    assert made.shape_for(500, 6, 5, 495, FAR + 1) == LaunchShape(512, 128, 112, 512)
    assert made.shape_for(20, 6, 5, 15, FAR + 1) == LaunchShape(256, 256, 240, 256)
    assert graphs(8192, 16).shape_for(500, 6, 5, 495, FAR + 1) == LaunchShape(512, 16, 0, 512)  # there is no other


def test_without_shapes_there_is_none() -> None:
    nothing: Any = None
    assert PrefillGraphs(nothing, nothing, nothing, [], []).shape_for(5, 1, 0, 5) is None


def test_where_launches_are_hidden_nothing_is_padded_by_much() -> None:
    nothing: Any = None
    graphs = PrefillGraphs(nothing, nothing, nothing, prefill_shapes(8192, 256, 40960), [], hidden_from=700)
    assert graphs.shape_for(699, 3, 0, 600) is not None
    assert graphs.shape_for(1100, 3, 0, 600) is None, "1536 tokens would take longer than launching does"
    assert graphs.shape_for(1500, 3, 0, 600) is not None and graphs.shape_for(8000, 8, 0, 1000) is not None


def test_shapes_that_no_step_fills_are_left_out() -> None:
    many, lone = prefill_shapes(8192, 512, 4096), prefill_shapes(8192, 1, 2048)
    assert LaunchShape(8192, 1, 0, 4096) not in many and LaunchShape(8192, 2, 0, 4096) in many
    assert max(shape.tokens for shape in lone) == 2048
