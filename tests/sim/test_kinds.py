"""Every sampling feature on every kind of model: all of them in one batch, run ahead, in chunks, behind hits, preempted,
against the plain engine, and against what the features mean on transformers' logits. What a kind refuses it refuses by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.test_depths import FEATURES
from tests.sim.kinds import KINDS, check, known, options, refusals

PAGE = Path(__file__).parents[2] / "docs" / "proof.md"
REFUSED: dict[str, dict[str, str]] = {
    "states alone": {
        "a draft model": "no layer of the model keeps every token, so there are no blocks for a drafter's keys",
        "8-bit keys and values": "Mamba2ForCausalLM caches no keys and values",
    },
    "sight": {"a draft model": "sees pictures, and a draft model does not"},
    "hearing": {
        "drafts by n-grams": "has an encoder, and drafts beside one are not made",
        "a draft model": "has an encoder, and drafts beside one are not made",
        "pooling": "generates, and cannot pool",
    },
}
"""Of ``options``, with why; what is not here is served."""


@pytest.fixture(autouse=True, scope="module")
def prepared() -> Iterator[None]:
    """Tiny operations: threads only cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with known():
        yield
    torch.set_num_threads(before)


SELDOM = ("fast prefill, drafts",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SELDOM else name for name in KINDS]
)
def test_all_features_together(name: str) -> None:
    kind = KINDS[name]
    seen = check(kind)
    assert seen.judged.tokens > 5 * len(FEATURES) and seen.judged.close_calls <= 1 + seen.judged.tokens // 50
    assert bool(seen.preemptions) != (name == "states alone"), "the pool was meant to be too small"
    # Recordings differ, and one checkpoint is overwritten too soon: tests/recurrent/test_prefixes.py hits those of Mamba-2.
    assert bool(seen.hits) != (name in ("hearing", "states alone")), "prompts were meant to begin alike"
    assert bool(seen.graph_steps) != bool(kind.changes.get("enforce_eager"))
    assert bool(seen.accepted) == ("speculative_config" in kind.changes)
    assert len(seen.told) == 2 * name.startswith("fast prefill"), (
        "who asks for what turns fast prefill off is named, nobody else"
    )


@pytest.mark.parametrize("name", KINDS)
def test_what_is_refused_is_named(name: str) -> None:
    """Nothing else is, and nothing is left out in silence."""
    expected = REFUSED.get(name, {})
    for option, message in refusals(KINDS[name]).items():
        assert (message is None) == (option not in expected), (option, message)
        assert message is None or expected[option] in message
    assert {*expected} <= {*options()}


def test_the_page_has_a_row_for_each() -> None:
    """Written by ``bench/proof_simulation.py --kinds`` and ``bench/proof_pages.py``."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    told = {row[0]: row[-1] for row in rows}
    for name, kind in KINDS.items():
        refused = ", ".join(option for option in options() if option in REFUSED.get(name, {}))
        assert told[kind.what] == refused
