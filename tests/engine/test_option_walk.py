"""See ``option_walk``: a few draws in every run, many with ``-m soak``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Answer, request, run
from tests.engine.option_walk import engine, play
from tests.engine.test_depths import close
from tests.models.tiny import TINY, hf_model, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_a_few_draws(folder: Path) -> None:
    told = [play(seed, folder) for seed in range(24)]
    assert told.count("equal") >= 12, told


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_many_draws(folder: Path, part: int) -> None:
    for seed in range(1000 + 50 * part, 1050 + 50 * part):
        play(seed, folder)


@pytest.mark.parametrize(("name", "longest"), [("llama-dynamic", 64), ("llama-longrope", 40)])
def test_drafts_do_not_stretch_rotations(folder: Path, name: str, longest: int) -> None:
    """Rows of drafts have positions behind the longest sequence; frequencies follow the sequence, not those."""
    model = folder / f"{name}-{longest}"
    save(hf_model(TINY[name]), model)

    def answers(**options: Any) -> dict[str, Answer]:
        made = [request(f"r{n}", [3 + n, 7] * 3, temperature=0.0, max_tokens=8, logprobs=2) for n in range(2)]
        with engine(model, {"max_model_len": longest, **options}) as core:
            return run(core, made)

    plain = answers()
    drafted = answers(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    for request_id, answer in drafted.items():
        close(answer, plain[request_id])
