"""Sizes of passes through a tower: every picture has a size that holds it, and the captured ones are few."""

from __future__ import annotations

import random

import pytest

from headway.core.media import Grid, VisionInfo
from headway.models.registry import read_config
from headway.models.vision.passes import (
    MOST_GRAPHS,
    MOST_UNITS,
    PassShape,
    exact_shape,
    largest_shape,
    pass_shapes,
)
from headway.models.vision.spec import VisionSpec
from headway.multimodal.layout import lay_out
from tests.multimodal.tiny_configs import CONFIGS
from tests.multimodal.tiny_sight import FAMILIES


def tower_of(name: str) -> tuple[VisionSpec, bool]:
    """Its description, and whether all pictures are of one size."""
    family, values = CONFIGS[name]
    read = read_config({"architectures": [f"{family}ForConditionalGeneration"], "eos_token_id": 2, **values})
    sight = read.sight  # type: ignore[attr-defined]
    return sight.vision, sight.one_size > 0


def test_every_picture_fits_the_largest_size() -> None:
    """However narrow: windows are most then."""
    spec, _ = tower_of("qwen2.5")
    info = VisionInfo(patch=spec.patch, group=spec.group, window=spec.window, token=1)
    rng, side = random.Random(1), 24
    most = largest_shape(lay_out(info, Grid(1, side * spec.group, side * spec.group))[0], spec)
    for _ in range(300):
        rows = rng.randrange(1, side * side + 1)
        columns = rng.randrange(1, side * side // rows + 1)
        layout, _ = lay_out(info, Grid(1, rows * spec.group, columns * spec.group))
        exact = exact_shape(layout, has_first=False)
        assert most.holds(exact), (rows, columns)
        assert layout.longest_window <= most.longest_window
        fitting = [each for each in pass_shapes(most, spec, one_size=False) if each.holds(exact)]
        assert fitting, "the largest is among them"
        assert fitting[0].units <= max(exact.units * 4 / 3 + spec.group**2, 2 * 64) or exact.windows > 1


@pytest.mark.parametrize("name", FAMILIES)
def test_few_sizes_are_captured(name: str) -> None:
    spec, one_size = tower_of(name)
    for most in (PassShape(1, 100), PassShape(64 if one_size else 1, 1024), PassShape(1, 2**16)):
        shapes = pass_shapes(most, spec, one_size=one_size)
        assert shapes and len(shapes) * spec.num_layers <= MOST_GRAPHS
        assert [each.units for each in shapes] == sorted({each.units for each in shapes})
        assert all(each.units <= MOST_UNITS for each in shapes[1:])


def test_which_passes_a_size_holds() -> None:
    assert PassShape(1, 100).holds(PassShape(1, 90)) and not PassShape(1, 90).holds(PassShape(1, 100))
    assert PassShape(4, 50).holds(PassShape(3, 50)) and not PassShape(4, 60).holds(PassShape(3, 50))
    assert not PassShape(1, 100, 3).holds(PassShape(1, 90, 4))


def test_sizes_that_are_captured_end_where_they_are_told_to() -> None:
    spec, _ = tower_of(FAMILIES[0])
    most = PassShape(1, 2**16)
    everything = pass_shapes(most, spec, one_size=False, most_units=2**17, most_graphs=10**6)
    assert everything[-1].holds(most), "nothing is left out"
    few = pass_shapes(most, spec, one_size=False, most_units=2**17, most_graphs=2 * spec.num_layers)
    assert few == everything[:2], "the largest are left out first"
    small = pass_shapes(most, spec, one_size=False, most_units=everything[2].units, most_graphs=10**6)
    assert small == everything[:3]
    assert pass_shapes(most, spec, one_size=False, most_units=1) == everything[:1], (
        "the smallest is there whatever it takes"
    )
