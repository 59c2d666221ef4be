"""The held-out snippets run under the simulation; what it says of them bench/syncs_heldout.py measures, no test asserts."""

from __future__ import annotations

import json

import pytest
import torch

from bench import syncs_heldout


@pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
def test_every_snippet_runs_to_its_end() -> None:
    found = syncs_heldout.measure(["simulation"])["simulation"]
    assert found["errors"] == {} and len(found["seen"]) >= 150


def test_the_score_counts_what_died_as_unseen() -> None:
    labels = {"a": ["read"], "b": [], "c": ["size"], "d": []}
    line = syncs_heldout.score({"a": ["read"], "b": ["read"], "d": []}, labels)
    assert (line["precision"], line["recall"]) == (0.5, 0.5)
    assert (line["missed"], line["false_alarms"]) == (["c"], ["b"])


@pytest.mark.skipif(
    not syncs_heldout.LABELS.exists(), reason="not labelled yet: python -m bench.syncs_heldout --label, on a card"
)
def test_each_label_has_its_snippet() -> None:
    assert set(json.loads(syncs_heldout.LABELS.read_text())["labels"]) <= set(syncs_heldout.snippets())
