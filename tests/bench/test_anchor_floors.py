"""Floors of decode steps: states among the bytes, and cards that nobody has written figures of."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from headway.cli.bench.anchors import command, context, floors, generation
from headway.cli.bench.anchors.context import spec_of
from headway.cli.bench.anchors.table import Table, known_figures, markdown
from headway.cli.main import app
from tests.bench.test_anchors import by_name, full_bench, measure
from tests.recurrent.tiny_hybrids import folder_of

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def test_states_are_read_and_written(tmp_path: Path) -> None:
    """Of a gated delta net 18 layers of 32 float32 matrices; of Mamba-2 48 layers of 48 in 16 bits, or in 32."""
    window = 18 * 4 * (2 * 16 + 32) * 128 * 2
    delta = full_bench("gdn_08b", tmp_path)
    assert floors.state_bytes(delta, spec_of(delta)) == 2 * 18 * 32 * 128 * 128 * 4 + window
    window = 48 * 4 * (48 * 64 + 2 * 128) * 2
    for name, size in (("mamba2_780m", 2), ("mamba2_780m_float32", 4)):
        bench = full_bench(name, tmp_path)
        assert floors.state_bytes(bench, spec_of(bench)) == 2 * 48 * 48 * 64 * 128 * size + window


def test_a_ring_writes_states_seldom(tmp_path: Path) -> None:
    """With drafts of which 2.5 tokens a step come: a state is read every step, written once in eight tokens."""
    bench = full_bench("gdn_08b_ngram", tmp_path)
    state, window = 18 * 32 * 128 * 128 * 4, 18 * 4 * 64 * 128 * 2
    inputs = 18 * (16 * 128 + 32 * 128 + 32) * 4
    found = floors.state_bytes(bench, spec_of(bench))
    assert found == pytest.approx(state * (1 + 2.5 / 8) + inputs * (4.5 + 3) + window)
    speed = floors.bandwidth(H200)
    assert speed is not None
    step = floors.step_bytes(bench, 8, 288) / speed * 1e3
    assert floors.of_steps(bench, speed)["itl_ms_short_bs8"] == pytest.approx(step / 2.5), "a token, not a step"


@pytest.mark.parametrize("name", ["gdn_08b", "llama32_1b", "qwen25_15b", "qwen3_4b", "gemma3_1b"])
def test_floors_that_are_written_down_follow_from_the_bytes(name: str, tmp_path: Path) -> None:
    speed = floors.bandwidth(H200)
    assert speed is not None
    found = floors.of_steps(full_bench(name, tmp_path), speed)
    for rows in (1, 8, 64, 256):
        floor = known_figures(name, H200)[f"itl_ms_short_bs{rows}"]["floor"]
        assert found[f"itl_ms_short_bs{rows}"] == pytest.approx(floor, rel=0.05), rows


def test_another_card_has_floors_of_its_own_and_no_goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "bandwidth", lambda card: {H200: 4.44e12, H100: 2.22e12}[card])
    rows = {}
    for card in (H200, H100):
        args = command.AnchorArgs(device="cuda")
        table = Table("gdn_08b", (), known_figures("gdn_08b", card))
        bench = command.make_bench(args, "gdn_08b", table, card, tmp_path)
        floors.measure(bench, card)
        generation.announce(bench)
        rows[card] = {row.name.partition(".")[2]: row for row in table.rows()}
    here, there = (rows[card]["itl_ms_short_bs256"] for card in (H200, H100))
    assert (here.goal, here.anchor, here.floor) == (4.2, 8.0, 4.8), "what is written down stays"
    assert (there.goal, there.anchor) == (None, None)
    computed = rows[H200]["floor_ms_with_states_bs256"].ours
    assert computed is not None and computed == pytest.approx(5.017, rel=1e-3)
    assert there.floor == pytest.approx(2 * computed) == rows[H100]["floor_ms_with_states_bs256"].ours
    assert "2.22 TB/s, measured just now; no goals" in command.compared(H100)


def test_a_report_says_what_it_stands_beside(tmp_path: Path) -> None:
    result, report = measure(folder_of("mamba2"), tmp_path, "--only", "floor*")
    assert result.exit_code == 0, result.output
    said = "bandwidth for floors not known; no goals: those there are are another card's"
    assert f"CPU, {platform.machine()}: {said}" in result.stderr
    assert (report["compared"], report["bytes_per_second"]) == (said, None)
    assert {row["status"] for row in by_name(report).values()} == {"not served"}
    assert said in markdown(report)


@pytest.mark.gpu
def test_a_card_that_nobody_knows_is_measured() -> None:
    speed = floors.bandwidth(torch.cuda.get_device_name())
    assert speed is not None and 1e11 < speed < 2e13


def test_the_command_names_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured, so that a wrong card is seen at once."""
    monkeypatch.setattr(command, "card_name", lambda device: H100)
    monkeypatch.setattr(floors, "bandwidth", lambda card: 3.0e12)
    result = CliRunner().invoke(app, ["bench", "anchors", "--model", "nothing-like-it", "--out", str(tmp_path)])
    assert f"{H100}: bandwidth for floors 3.00 TB/s, measured just now; no goals" in result.stderr


@pytest.mark.parametrize("card", [False, True])
def test_a_closed_engines_memory_goes_back_to_the_card(card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was frozen is collected, too, and only then the allocator lets go."""
    done: list[str] = []
    steps = {name: (lambda name=name: done.append(name)) for name in ("unfreeze", "collect")}
    monkeypatch.setattr(context, "gc", SimpleNamespace(**steps))
    monkeypatch.setattr("torch.cuda.is_available", lambda: card)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: done.append("emptied"))
    context.free_memory()
    assert done == ["unfreeze", "collect", *(["emptied"] if card else [])]
