"""Tokens with drafts and without: what counts as compared, and what as a tie."""

from __future__ import annotations

import json
from pathlib import Path

from bench import draft_ties
from tests.engine.tiny_llama import save_tiny_llama


def test_positions_count_up_to_the_first_difference() -> None:
    found = draft_ties.Compared()
    best = [{5: -0.1, 6: -2.0}, {7: -0.69, 8: -0.70}, {9: -0.2, 1: -1.0}]
    found.add([5, 7, 9], [5, 7, 9], best)
    assert (found.positions, found.differing, found.share) == (3, 0, 0.0) and found.are_ties(0.0)
    found.add([5, 7, 9], [5, 8, 1], best)
    assert (found.positions, found.differing) == (5, 1) and found.are_ties(0.05) and not found.are_ties(0.001)
    found.add([5, 7, 9], [4, 7, 9], best)
    assert found.differing == 2 and not found.are_ties(1.0), "a token that was not among the best two is no tie"


def test_a_tiny_model_with_drafts_and_without(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_tiny_llama(tmp_path / "model")
    out = tmp_path / "out.json"
    given = ["--model", str(tmp_path / "model"), "--device", "cpu", "--dtype", "float32", "--json", str(out)]
    assert draft_ties.main([*given, "--prompts", "3", "--tokens", "12", "--rows", "2"]) == 0
    result = json.loads(out.read_text())
    assert result["positions"] == 36 and result["differing"] == 0 and result["drafted"] > result["accepted"] > 0
