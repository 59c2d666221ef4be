"""See ``option_walk``: a few draws in every run, many with ``-m soak``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.option_walk import play


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_a_few_draws(folder: Path) -> None:
    told = [play(seed, folder) for seed in range(24)]
    assert told.count("equal") >= 16, told


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_many_draws(folder: Path, part: int) -> None:
    for seed in range(1000 + 50 * part, 1050 + 50 * part):
        play(seed, folder)
