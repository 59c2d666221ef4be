"""Shapes of captured steps that pool: every step finds one, the smallest that holds it."""

from __future__ import annotations

import random

import pytest

from headway.runner.pooled_graphs import pooled_shapes
from headway.runner.prefill_graphs import PrefillGraphs

SIZES = [(8192, 256, 512), (8192, 256, 8192), (64, 4, 60), (48, 3, 48), (512, 16, 512), (1000, 64, 300)]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_step_finds_a_shape(sizes: tuple[int, int, int]) -> None:
    tokens, rows, length = sizes
    shapes = pooled_shapes(*sizes)
    graphs = PrefillGraphs(None, None, None, shapes, ())  # type: ignore[arg-type]
    rng = random.Random(1)
    assert len({*shapes}) == len(shapes) <= 120
    for _ in range(500):
        count = rng.randint(1, rows)
        longest = rng.randint(1, min(length, tokens))
        lens = [longest] + [rng.randint(1, longest) for _ in range(count - 1)]
        while sum(lens) > tokens:
            lens.pop()
        found = graphs.shape_for(sum(lens), len(lens), 0, longest)
        assert found is not None and found.tokens >= sum(lens) and found.rows >= len(lens) and found.longest >= longest
        smaller = [each for each in shapes if each.tokens >= sum(lens) and each.holds(len(lens), 0, longest)]
        assert found == min(smaller, key=lambda shape: (shape.tokens, shape.rows, shape.longest))


def test_steps_of_long_texts_are_launched_for_few_rows() -> None:
    graphs = PrefillGraphs(None, None, None, pooled_shapes(8192, 256, 512), ())  # type: ignore[arg-type]
    for num_rows, length, most in [(16, 510, 32), (32, 512, 32), (33, 512, 256), (64, 128, 256)]:
        found = graphs.shape_for(min(num_rows * length, 8192), num_rows, 0, length)
        assert found is not None and (found.rows, found.longest) == (most, 512 if length > 128 else 128)
