"""Every fault of the catalogue still fits the file it is meant for, and the tool runs on a file that somebody else wrote."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planted-faults.md"

FOREIGN = """
[checks]
syntax = ["compileall", "-q", "headway/core/ints.py"]

[[fault]]
name = "not-python"
file = "headway/core/ints.py"
old = "return -(-a // b)"
new = "return -(-a // b"
what = "a parenthesis is missing"
expect = ["SyntaxError"]

[[fault]]
name = "another-rounding"
file = "docs/thresholds.md"
old = "# Thresholds"
new = "# Threshold"
what = "rounds down, which a look at the syntax does not tell"
uncaught = "Only running it would."
"""


def tool() -> Any:
    """tools/planted_faults.py, which is a script and no module of a package."""
    spec = importlib.util.spec_from_file_location("planted_faults", ROOT / "tools" / "planted_faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


FAULTS, CHECKS = tool().load()


def test_there_are_faults_with_distinct_names() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 40 and CHECKS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_line_and_leaves_python(fault: Any) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    planted = fault.planted(text)
    assert planted != text
    ast.parse(planted)


def test_the_page_lists_every_fault() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [fault.name for fault in FAULTS if fault.name not in text]
    assert not missing, "run tools/planted_faults.py with --markdown"


def test_a_catalogue_of_somebody_elses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    catalogue, outcomes, page = tmp_path / "faults.toml", tmp_path / "outcomes.json", tmp_path / "page.md"
    catalogue.write_text(FOREIGN)
    before = (ROOT / "headway/core/ints.py").read_text()
    written = ["--json", str(outcomes), "--markdown", str(page)]
    status = tool().main(
        ["--faults", str(catalogue), *written, "--jobs", "1", "--budget", "0"]
    )  # the first check runs anyway
    assert status == 1
    found = {each["fault"]: each for each in json.loads(outcomes.read_text())}
    assert found["not-python"]["caught"] and found["not-python"]["as_meant"]
    assert found["not-python"]["check"] == "syntax" and "SyntaxError" in found["not-python"]["error"]
    assert not found["another-rounding"]["caught"]
    assert "1 of 2 caught, 1 as meant" in capsys.readouterr().out
    text = page.read_text()
    assert "**1 of 2 caught**" in text and "rounds down, which a look at the syntax does not tell. Only running" in text
    assert (ROOT / "headway/core/ints.py").read_text() == before, "the tree itself is left alone"
    assert tool().main(["not-python", "--faults", str(catalogue), "--from", str(outcomes)]) == 0
    assert tool().main(["not-pyhton", "--faults", str(catalogue), "--from", str(outcomes)]) == 2
    assert "has no fault not-pyhton" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (('old = "return -(-a // b)"', 'old = "return 7"'), "0 lines of headway/core/ints.py"),
        (('name = "not-python"', 'name = "not-python"\ncheck = "none"'), "there is no check 'none'"),
        (('file = "headway/core/ints.py"', 'file = "headway/core/nowhere.py"'), "nowhere.py"),
        (('["compileall"', '["headway.nowhere"'), "'syntax' fails on the clean tree"),
    ],
    ids=["line", "check", "file", "clean tree"],
)
def test_a_catalogue_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: tuple[str, str], words: str
) -> None:
    catalogue = tmp_path / "faults.toml"
    catalogue.write_text(FOREIGN.replace(*edit))
    assert tool().main(["--faults", str(catalogue)]) == 2
    assert words in capsys.readouterr().out


def test_a_catalogue_without_checks_takes_ours(tmp_path: Path) -> None:
    catalogue = tmp_path / "faults.toml"
    catalogue.write_text(FOREIGN.partition("[[fault]]")[2].join(["[[fault]]", ""]))
    faults, checks = tool().load(catalogue)
    assert [fault.name for fault in faults] == ["not-python", "another-rounding"] and checks == CHECKS


def test_the_check_that_is_meant_to_catch_it_comes_first() -> None:
    fault = next(fault for fault in FAULTS if fault.check)
    names = [name for name, _ in tool().ordered(fault, CHECKS)]
    floor = Path(fault.file).parts[1]
    assert names[0] == fault.check and {*CHECKS} < {*names}
    assert f"tests/{floor}" in names or floor in ("sampling", "runner"), "what CI sees of its floor follows"
    mine = [name for name, _ in tool().ordered(dataclasses.replace(fault, check=""), CHECKS, folders_first=True)]
    assert mine[0].startswith("tests/") and {*mine} == {*names}


BATCHES = sorted((ROOT / "tests" / "planted" / "batches").glob("*.toml"))


@pytest.mark.parametrize("batch", BATCHES, ids=lambda path: path.stem)
def test_a_batch_fits_the_tree_and_is_on_the_page_with_its_first_run(batch: Path) -> None:
    faults, _ = tool().load(batch)
    assert len({fault.name for fault in faults}) == len(faults) and all(fault.round != "grown" for fault in faults)
    for fault in faults:
        planted = fault.planted((ROOT / fault.file).read_text(encoding="utf-8"))
        if fault.file.endswith(".py"):
            ast.parse(planted)
    run = batch.with_suffix(".json")
    if not run.exists():  # it waits for its first run
        return
    first = {each["fault"]: each["caught"] for each in json.loads(run.read_text(encoding="utf-8"))}
    assert {*first} <= {fault.name for fault in faults}
    page = PAGE.read_text(encoding="utf-8")
    assert f"{sum(first.values())} of {len(first)}" in page
    assert all(fault.cure and fault.cure in page for fault in faults if not first.get(fault.name, True)), (
        "what nothing caught has a cure"
    )


def test_faults_are_drawn_by_chance_and_again_by_the_same_seed() -> None:
    spec = importlib.util.spec_from_file_location("draw_faults", ROOT / "tools" / "draw_faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = [*module.drawn(7, 3, ["scheduler", "state"])]
    assert drawn == [*module.drawn(7, 3, ["scheduler", "state"])] != [*module.drawn(8, 3, ["scheduler", "state"])]
    assert len({(each.file, each.old) for each in drawn}) == len(drawn) == 6
    catalogue = module.as_toml(iter(drawn), "x")
    for each in tool().tomllib.loads(catalogue)["fault"]:
        planted = tool().Fault(**each).planted((ROOT / each["file"]).read_text(encoding="utf-8"))
        ast.parse(planted)
