"""What continuous integration asks: new lines, annotations, SARIF, a first allow list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headway.syncs import Kind, Log, Site, Wait, ci
from headway.syncs.allowlist import AllowList
from headway.syncs.cli import FAILED, main
from headway.syncs.report import Run, to_dict
from headway.syncs.sim import backend

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
LIBRARY = "/venv/lib/python3.11/site-packages/lib/loop.py"


def example() -> Run:
    log = Log()
    own = Site("/home/me/train.py", 12, "step")
    log.add(Wait(own, Kind.READ, "Tensor.item", stack=(f"{LIBRARY}:7 log", "/home/me/train.py:12 step")))
    log.add(
        Wait(Site("/home/me/train.py", 20, "end"), Kind.DEVICE, "torch.cuda.synchronize", reason="once, at the end")
    )
    return Run(["python", "train.py"], "simulation", log, 1.0)


@no_cuda
def test_only_new_lines_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, base = tmp_path / "train.py", tmp_path / "base.json"
    script.write_text('import torch\nx = torch.ones(2, device="cuda")\nfor _ in range(3):\n    x.tolist()\n')
    assert main(["--simulate", "--json", str(base), "--", str(script)]) == 0
    again = ["--simulate", "--baseline", str(base), "--fail-on-new", "--", str(script)]
    script.write_text("# moved down\n" + script.read_text())
    assert main(again) == 0, "the line has moved, no more"
    script.write_text(script.read_text() + "y = x.sum().item()\n")
    assert main(again) == FAILED
    assert "1 of the findings are not in the baseline" in capsys.readouterr().err
    assert main(["--simulate", "--fail-on-new", "--", str(script)]) == 2
    assert main(["--simulate", "--baseline", str(tmp_path / "absent.json"), "--", str(script)]) == 2


@no_cuda
def test_what_one_run_asked_in_vain_is_not_held_against_the_next(tmp_path: Path) -> None:
    script = tmp_path / "quiet.py"
    script.write_text('import torch\ntorch.ones(2, device="cuda").add_(1)\n')
    backend.STATE.unserved.append("of a run that ended before its check")
    assert main(["--simulate", "--", str(script)]) == 0


def test_lines_are_counted_not_repeats() -> None:
    log = Log()
    for line in (3, 3, 3, 4):
        log.add(Wait(Site("a.py", line, "f"), Kind.READ, "Tensor.item"))
    assert (log.count, log.lines) == (4, 2)


def test_annotations_for_github() -> None:
    run = example()
    run.unproven.append("lost: 100 %\nsecond line")
    text = ci.github_annotations(run)
    assert "::error file=/home/me/train.py,line=12,title=host wait::Tensor.item waits for the GPU (read, 1x)." in text
    assert "Through" in text and "loop.py:7 log" in text and "line=20" not in text
    assert "lost: 100 %25%0Asecond line" in text and len(text.splitlines()) == 2
    assert ci.github_annotations(run, []).startswith("::notice")


def test_sarif_holds_places_and_suppressions() -> None:
    made = ci.sarif(example())
    (run,) = made["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert made["version"] == "2.1.0" and {result["ruleId"] for result in run["results"]} <= rules
    (warning,) = [result for result in run["results"] if result["level"] == "warning"]
    assert warning["locations"][0]["physicalLocation"]["region"] == {"startLine": 12}
    (note,) = [result for result in run["results"] if "suppressions" in result]
    assert note["suppressions"][0]["justification"] == "once, at the end"
    json.dumps(made)


def test_a_written_allow_list_covers_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "allow.toml"
    run = example()
    path.write_text(ci.allow_file(run))
    allow = AllowList.load(path)
    assert all(allow.apply(wait).reason for wait in run.log.waits) and not allow.unused


@pytest.mark.parametrize(("at", "covers"), [("lib/loop.py", True), ("lib/loop.py:log", True), ("lib/loop.py:8", False)])
def test_any_frame_may_be_allowed(tmp_path: Path, at: str, covers: bool) -> None:
    path = tmp_path / "allow.toml"
    path.write_text(f'[[allow]]\nat = "{at}"\nreason = "the library logs"\n')
    (wait, _) = example().log.waits
    assert bool(AllowList.load(path).apply(wait).reason) is covers


def test_a_librarys_line_means_its_caller() -> None:
    (read, _) = to_dict(example())["findings"]
    assert (read["line"], read["via"], read["package"]) == (12, "lib/loop.py:7 log", "lib")
    assert read["stack"] == ["lib/loop.py:7 log", "/home/me/train.py:12 step"]


@no_cuda
def test_start_up_is_told_from_steady_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "train.py", tmp_path / "o.json"
    lines = [
        "x = torch.ones(2).cuda()",
        "for n in range(5):",
        "    syncs.step()",
        "    if n == 0:",
        "        x.tolist()",
    ]
    script.write_text("\n".join(["import torch", "from headway import syncs", *lines, "    x.sum().item()", ""]))
    assert main(["--simulate", "--json", str(out), "--", str(script)]) == 0
    data = json.loads(out.read_text())
    assert data["steps"] == 5
    assert {finding["line"]: finding["when"] for finding in data["findings"]} == {
        3: "start-up: before the first step",
        7: "start-up: 1x in step 1 and never after",
        8: "steady state: in 4 steps after the first, 1x each",
    }
    assert "steady state" in capsys.readouterr().err
