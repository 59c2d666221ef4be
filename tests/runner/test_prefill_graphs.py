"""Which steps with prompts are graphs, and of what shape."""

from __future__ import annotations

from typing import Any

import pytest

from headway.kernels.sample import RANDOM
from headway.kernels.wide_linear.tiles import GRAPH_TOKENS
from headway.runner.prefill_graphs import FULL_ROWS, LARGEST_SMALL, SMALL, PrefillGraphs, prefill_shapes
from headway.sampling.sampler import Variant


def graphs(max_tokens: int, max_rows: int) -> PrefillGraphs:
    """Never captured."""
    nothing: Any = None
    return PrefillGraphs(nothing, nothing, nothing, prefill_shapes(max_tokens, max_rows), [])


def test_shapes_fit_the_engine() -> None:
    assert len(prefill_shapes(8192, 256)) == len(SMALL) + len(FULL_ROWS)
    assert prefill_shapes(8192, 256)[-4:] == [(8192, 16, 1024), (8192, 8, 2048), (8192, 4, 4096), (8192, 2, 8192)]
    for max_tokens, max_rows in ((8, 4), (64, 4), (1536, 200), (4096, 8)):
        shapes = prefill_shapes(max_tokens, max_rows)
        assert len(set(shapes)) == len(shapes)
        assert all(tokens <= max_tokens and rows <= max_rows and most <= tokens for tokens, rows, most in shapes)


def test_products_of_small_steps_end_where_small_graphs_do() -> None:
    assert GRAPH_TOKENS == LARGEST_SMALL + 1 == max(tokens for tokens, _ in SMALL) + 1


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        ((10, 1, 10), (16, 16, 16)),
        ((300, 17, 200), (512, 128, 512)),
        ((1100, 3, 500), (1536, 128, 1536)),
        ((2000, 3, 1000), None),
        ((7679, 8, 1000), None),
        ((7680, 8, 1024), (8192, 16, 1024)),
        ((8192, 8, 1024), (8192, 16, 1024)),
        ((8192, 8, 1025), (8192, 8, 2048)),
        ((8192, 1, 8192), (8192, 2, 8192)),
        ((8192, 3, 8000), None),
        ((8192, 17, 800), None),
    ],
)
def test_a_step_takes_the_first_shape_that_holds_it(
    step: tuple[int, int, int], shape: tuple[int, int, int] | None
) -> None:
    """(tokens, rows, longest row)."""
    assert graphs(8192, 256).shape_for(*step) == shape


def test_one_full_step_is_rehearsed() -> None:
    made = graphs(8192, 256)
    assert [shape for shape in made._rehearsed() if shape[0] == 8192] == [(8192, 16, 1024)]
    assert set(made.shapes) - set(made._rehearsed()) == {(8192, 8, 2048), (8192, 4, 4096), (8192, 2, 8192)}


def test_small_steps_of_few_rows_are_whole_graphs() -> None:
    made = graphs(8192, 256)
    whole = {shape for shape in made.shapes if made._whole_variants(shape)}
    assert whole == {(tokens, rows, tokens) for tokens, rows in SMALL if rows == 16}
    assert made._whole_variants((512, 16, 512)) == (Variant(), Variant(flags=RANDOM))
