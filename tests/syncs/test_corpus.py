"""The labelled snippets, under the simulation here and under all detectors on CUDA."""

from __future__ import annotations

import pytest
import torch

from tests.syncs import run_corpus


def test_the_corpus_is_large_and_balanced() -> None:
    snippets = run_corpus.corpus()
    waiting = sum(snippet.waits for snippet in snippets)
    assert len(snippets) >= 60 and 0.4 <= waiting / len(snippets) <= 0.6


@pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
@pytest.mark.slow
@pytest.mark.parametrize("snippet", run_corpus.corpus(), ids=lambda snippet: snippet.name)
def test_simulation_agrees_with_the_label(snippet: run_corpus.Snippet) -> None:
    seen = run_corpus.judge(snippet, run_corpus.detectors()["simulation"])
    assert seen == ([snippet.kind] if snippet.waits else [])


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", run_corpus.corpus(), ids=lambda snippet: snippet.name)
def test_the_live_guard_agrees_with_the_label(snippet: run_corpus.Snippet) -> None:
    assert bool(run_corpus.judge(snippet, run_corpus.probes_log)) == snippet.waits
