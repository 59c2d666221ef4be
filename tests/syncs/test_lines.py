"""bench/syncs_lines.py counts lines, and the programs of bench/programs/syncs_published are a regression test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import syncs_lines, syncs_sweep
from headway.syncs.allowlist import AllowList
from headway.syncs.session import watch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
PROGRAMS = """
import torch


def _asked(x):
    return x.item()  # waits


def reads(device):
    x = torch.ones(2, device=device)
    _asked(x.sum())
    return x + 1


def asks_for_nothing(device):
    x = torch.ones(2, device=device)
    return [float(part) for part in x]


def never_comes_to_it(device):
    x = torch.ones(2, device=device)
    if device == "cuda":
        raise KeyError("only there")
    return x.sum().item()  # waits
"""


def test_lines_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(PROGRAMS)
    wanted = syncs_lines.chosen([], tmp_path)
    assert list(wanted) == ["some/reads", "some/asks_for_nothing", "some/never_comes_to_it"]
    read, results = {"file": "some.py", "line": 6}, {"file": "syncs_sweep.py", "line": 1}
    found: list[list[dict[str, Any]]] = [[read, results], [{"file": "some.py", "line": 17}], []]
    verdicts = "same", "same", "crash"
    lines: list[dict[str, Any]] = [
        {"name": name, "verdict": verdict, "why": "KeyError", "findings": findings}
        for name, verdict, findings in zip(wanted, verdicts, found, strict=True)
    ]
    made = syncs_lines.report(lines, wanted, tmp_path)
    assert (made["programs"], made["lines"], made["precision"], made["recall"]) == (3, 2, 0.5, 0.5)
    assert made["missed"] == ["some.py:24 never_comes_to_it"]
    assert made["false_alarms"] == ["some.py:17 asks_for_nothing"]
    assert list(made["ended_otherwise"]) == ["some/never_comes_to_it"]
    assert "alone" not in made
    for line, live in zip(lines, ([], [], [read]), strict=True):
        line |= {"live": live, "cupti": line["findings"]}
    alone = syncs_lines.report(lines, wanted, tmp_path)["alone"]
    assert (alone["live"]["precision"], alone["live"]["recall"], alone["live"]["false_alarms"]) == (1.0, 0.5, [])
    assert alone["cupti"]["false_alarms"] == made["false_alarms"]
    part = syncs_lines.report(lines[:1], list(wanted)[:1], tmp_path)  # of what was left out no mark counts
    assert (part["lines"], part["missed"], part["false_alarms"]) == (1, [], [])


def test_a_machine_without_a_card_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["syncs_lines", "--card"])
    with pytest.raises(SystemExit):
        syncs_lines.main()
    assert "--card needs a CUDA device, and cupti-python" in capsys.readouterr().err
    assert list(syncs_lines.chosen(["bandit"], files=["loops"])) == []
    assert list(syncs_lines.chosen(["bandit"], files=["choosing"])) == ["choosing/bandit_that_grows_curious"]


@pytest.mark.filterwarnings("ignore")
def test_lines_that_wait_are_named_and_no_others() -> None:
    """All programs in one process, so quickly; in the soak each has its own, and has to end as on the CPU."""
    wanted = syncs_lines.chosen([])

    def work() -> int:
        for program in wanted.values():
            syncs_sweep.seeded(program, "cuda")
        return 0

    run = watch(work, ["published"], AllowList(), simulate=True)
    assert run.exit_status == 0 and run.unproven == []
    found = [{"file": Path(each.site.file).name, "line": each.site.line} for each in run.log.findings]
    lines = [{"name": name, "verdict": "same", "findings": found} for name in wanted]
    made = syncs_lines.report(lines, wanted)
    assert len(wanted) > 280 and made["lines"] > 225
    assert (made["missed"], made["false_alarms"]) == ([], [])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_published_programs_end_as_on_the_cpu() -> None:
    wanted = syncs_lines.chosen([])
    made: dict[str, Any] = syncs_lines.report(syncs_sweep.sweep(wanted), wanted)
    assert (made["missed"], made["false_alarms"], made["ended_otherwise"]) == ([], [], {})
