"""The labelled snippets, under the simulation here and under all detectors on CUDA."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from headway import syncs
from tests.syncs import run_corpus


def test_the_corpus_is_large_and_balanced() -> None:
    snippets = run_corpus.corpus()
    waiting = sum(snippet.waits for snippet in snippets)
    assert len(snippets) >= 60 and 0.4 <= waiting / len(snippets) <= 0.6


@pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
@pytest.mark.slow
@pytest.mark.parametrize("snippet", run_corpus.corpus(), ids=lambda snippet: snippet.name)
def test_simulation_agrees_with_the_label(snippet: run_corpus.Snippet) -> None:
    with run_corpus.detectors()["simulation"]() as detector:
        seen = run_corpus.judge(snippet, detector)
    assert seen == ([snippet.kind] if snippet.waits else [])


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", run_corpus.corpus(), ids=lambda snippet: snippet.name)
def test_the_live_guard_agrees_with_the_label(snippet: run_corpus.Snippet) -> None:
    assert bool(run_corpus.judge(snippet, run_corpus.probes_log)) == snippet.waits


def test_a_detector_that_breaks_loses_nothing_of_the_others() -> None:
    (snippet, *_) = run_corpus.corpus()

    def blind() -> run_corpus.Made:
        raise syncs.ProbeError("taken")

    def breaks() -> contextlib.AbstractContextManager[list[str]]:
        raise RuntimeError("in the middle")

    assert run_corpus.run([snippet], blind) == {"failed": "ProbeError: taken"}
    line = run_corpus.run([snippet], lambda: contextlib.nullcontext(breaks))
    assert line["errors"] == {snippet.name: "RuntimeError: in the middle"} and line["snippets"] == 0
    run_corpus.show("blind", {"failed": "x"})
    run_corpus.show("broken", line)


def test_labels_are_held_against_the_driver() -> None:
    waits, innocent, query = (
        run_corpus.Snippet(Path(name), kind != "none", kind)
        for name, kind in (("a", "read"), ("b", "none"), ("q", "query"))
    )
    seen = {"a": ["read"], "b": [], "q": []}
    snippets = [waits, innocent, query]
    assert run_corpus.label_errors(snippets, {"cupti": {"seen": seen}}) == []
    assert run_corpus.label_errors(
        snippets, {"cupti": {"failed": "x"}, "profiler": {"seen": {"a": [], "b": ["read"]}}}
    ) == [
        "a",
        "b",
    ]
    assert run_corpus.label_errors(snippets, {"live": {"seen": {"a": []}}}) == []
    line = run_corpus.score(snippets, seen)
    assert (line["precision"], line["recall"], line["missed"]) == (1.0, 0.5, ["q"])
