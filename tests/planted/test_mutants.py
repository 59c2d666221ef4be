"""The tools that make mistakes by chance and try them: what they change, which tests they choose, how they count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import mutants as tool
from tools import mutations as mutations_module
from tools.covered_tests import CoverageMap
from tools.draw_faults import candidates, drawn, sampled
from tools.mutants import OF_FLOOR, READ_SOURCES, Mutant, chosen, keep, kept, out_of_time, page, survivors, table
from tools.mutations import ROOT, Mutation, is_python, mutations
from tools.planted_floors import by_imports

SOURCE = '''"""A module."""
LIMIT = 3
IS_ON = True


def clip(values: list[int], low: int = 0, *, high_value: int = 9, low_value: int = 1) -> list[int]:
    """Some text with 3 in it."""
    kept = []
    for value in values[low : len(values)]:
        if value < low or value >= high_value:
            continue
        kept.append(min(value, high_value) + low_value)
        low += 1
    assert kept != 3
    return kept if IS_ON else list(map(clip, kept, low))
'''


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Mutation]:
    monkeypatch.setattr(mutations_module, "ROOT", tmp_path)
    path = tmp_path / "headway" / "state" / "clip.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return [*mutations(path)]


def test_each_changes_one_line(made: list[Mutation]) -> None:
    lines = SOURCE.splitlines()
    for each in made:
        assert each.file == "headway/state/clip.py" and lines[each.number - 1].strip() == each.old != each.new
        assert is_python(each)
    assert len({(each.number, each.new) for each in made}) == len(made)
    assert not is_python(made[0]._replace(new="LIMIT = ("))


@pytest.mark.parametrize(
    ("kind", "new"),
    [
        ("value", "LIMIT = 4"),
        ("value", "LIMIT = 2"),
        ("value", "IS_ON = False"),
        ("value", "for value in values[low : len(values) + 1]:"),
        ("value", "for value in values[low - 1 : len(values)]:"),
        ("operator", "if value <= low or value >= high_value:"),
        ("operator", "if value < low or value > high_value:"),
        ("operator", "if value < low and value >= high_value:"),
        ("operator", "if (not (value < low or value >= high_value)):"),
        ("operator", "low -= 1"),
        ("statement", "break"),
        ("statement", "pass"),
        ("name", "kept.append(max(value, high_value) + low_value)"),
        ("name", "kept.append(min(value, high_value) + high_value)"),
        ("name", "if value < low or value >= low_value:"),
        ("call", "return kept if IS_ON else list(map(kept, clip, low))"),
        ("statement", "return kept"),
    ],
)
def test_what_is_made(made: list[Mutation], kind: str, new: str) -> None:
    assert (kind, new) in {(each.kind, each.new) for each in made}


def test_what_is_left_alone(made: list[Mutation]) -> None:
    """Text, assertions, annotations, and arguments of min, whose order says nothing."""
    assert not {1, 7, 14} & {each.number for each in made}
    assert not any("min(high_value, value)" in each.new or "list[" in each.what for each in made)


def test_a_draw_depends_on_its_seed_alone() -> None:
    floors = ["scheduler", "state"]
    some = [*sampled(3, 20, floors)]
    assert some == [*sampled(3, 20, floors)] != [*sampled(4, 20, floors)]
    assert len(some) == 20 == len({(each.file, each.number) for each in some})
    lines = {floor: len(candidates(floor)) for floor in floors}
    share = 20 * lines["scheduler"] / sum(lines.values())
    assert abs(sum("/scheduler/" in each.file for each in some) - share) <= 1
    assert [each.file.split("/")[1] for each in drawn(3, 2, floors)] == ["scheduler"] * 2 + ["state"] * 2
    for each in some:
        assert sum(line.strip() == each.old for line in (ROOT / each.file).read_text().splitlines()) == 1


def test_files_by_a_pattern() -> None:
    found = {file for file, _ in candidates("kernels/*/reference.py")}
    assert len(found) > 40 and {file.rpartition("/")[2] for file in found} == {"reference.py"}


def test_tests_that_always_run() -> None:
    """They are there, and run for what they see."""
    for each in (*READ_SOURCES, *(name for names in OF_FLOOR.values() for name in names)):
        file, _, name = each.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}" in text


def test_the_tests_of_a_line(tmp_path: Path) -> None:
    """Those first that execute little else; what only an import executes is seen by those who execute its class or file; what
    failed sees nothing."""
    file = "headway/core/ints.py"
    text = (ROOT / file).read_text().splitlines()
    inside = next(i for i, line in enumerate(text, 1) if line.strip().startswith("return"))
    head = next(i for i, line in enumerate(text, 1) if line.startswith("from __future__"))
    data = {
        "tests": ["a.py::broad", "a.py::narrow", "a.py::failed", "a.py::slow"],
        "files": {file: {str(inside): [0, 1, 2, 3]}, "headway/core/log.py": {"3": [0]}},
        "seconds": {"a.py::broad": 0.1, "a.py::narrow": 0.5, "a.py::slow": 0.7},
    }
    (tmp_path / "map.json").write_text(json.dumps(data))
    covered = CoverageMap(tmp_path)
    assert covered.tests(file, inside) == covered.tests(file, head) == ["a.py::narrow", "a.py::slow", "a.py::broad"]
    assert covered.tests("headway/core/task.py", 1) == []
    data["files"] = {file: {str(head): [0]}}
    (tmp_path / "map.json").write_text(json.dumps(data))
    assert CoverageMap(tmp_path).tests(file, inside) == [], "no test runs the function"


def test_every_file_has_its_turn(tmp_path: Path) -> None:
    seconds = {f"a.py::{n}": 0.125 for n in range(9)} | {"b.py::1": 1.0, "c.py::1": 50.0}
    (tmp_path / "map.json").write_text(json.dumps({"tests": [], "files": {}, "seconds": seconds}))
    covered = CoverageMap(tmp_path)
    names = [*seconds]
    assert chosen(names, covered, 0.5) == names[:4], "what fits"
    assert chosen(names, covered, 1.5) == names[:9]
    assert chosen(names, covered, 2.0) == [*names[:8], "b.py::1"]
    assert chosen(["c.py::1"], covered, 1.0) == ["c.py::1"], "one runs in any case"


def test_files_that_the_map_knows_nothing_of(tmp_path: Path) -> None:
    """They come behind those that execute the line, the nearest first; a survivor is tried by all others, slow ones too."""
    file, mapped = "headway/server/sse.py", "tests/server/test_stream.py"
    text = (ROOT / file).read_text().splitlines()
    inside = next(i for i, line in enumerate(text, 1) if line.strip().startswith("return"))
    names = [f"{mapped}::test_{i}" for i in range(3)]
    data = {"tests": names, "files": {file: {str(inside): [0, 2]}}, "seconds": dict.fromkeys(names, 0.75)}
    (tmp_path / "map.json").write_text(json.dumps(data))
    covered = CoverageMap(tmp_path)
    near = tool.unmapped(file, covered)
    assert mapped not in near and near.index("tests/server/test_small_rules.py") < near.index("tests/cli/test_embed.py")
    mutation = Mutation(file, inside, "old", "new", "what", "call")
    tests = [each for each in tool.tests_of(mutation, covered, 1.0) if each.startswith("tests/")]
    assert tests == [names[0], *[*READ_SOURCES][1:], *near], "the other does not fit"
    assert not {*READ_SOURCES} & {*tool.tests_of(mutation._replace(kind="statement"), covered, 1.0)}
    rest, slow = tool.others_of(mutation, covered, 1.0, 5.0)
    assert rest[-1] == names[2] and "--session-timeout=5" in rest
    assert any(each.startswith("slow and not soak") for each in slow) and {mapped, *near} <= {*slow}
    unknown = [*tool.others_of(mutation._replace(file="headway/core/log.py"), covered, 1.0, 5.0)]
    assert len(unknown) == 2 and not any(each.startswith("slow") for each in unknown[1])


def test_imports_lead_to_tests() -> None:
    """Also those of helpers, inside functions, and of what a registry names."""
    assert by_imports("headway/server/sse.py")[0].startswith("tests/server/")
    assert "tests/models/test_encoder_names.py" in by_imports("headway/models/mpnet.py")
    assert not any(each.startswith("tests/planted") for each in by_imports("headway/core/params.py"))


def test_a_run_whose_time_is_over_says_nothing() -> None:
    over = "!!!!!!!!!! session-timeout: 100.0 sec exceeded !!!!!!!!!!\n176 passed in 106.33s"
    failed = "FAILED tests/core/test_ids.py::test_an_id - AssertionError: 3"
    assert out_of_time(over) and not out_of_time(f"{failed}\n{over}") and not out_of_time(failed)
    assert out_of_time(f"E   Failed: Timeout (>80.0s) from pytest-timeout.\n{failed.partition(' - ')[0]}")


def test_outcomes_are_kept_and_counted(tmp_path: Path) -> None:
    def mutant(floor: str, **changes: object) -> Mutant:
        fields = {
            "file": f"headway/{floor}/x.py",
            "number": 3,
            "old": "a | b",
            "new": "a & b",
            "what": "",
            "kind": "operator",
        }
        return Mutant(**(fields | {"tests": 5} | changes))  # type: ignore[arg-type]

    some = [
        mutant("core", test="tests/core/test_x.py::test_x"),
        mutant("core", verdict="equivalent: both are sets"),
        mutant("state", now="tests/state/test_x.py::test_y"),
        mutant("state", tests=0),
    ]
    path = tmp_path / "mutants-7-core.json"
    keep(path, "the command", some)
    assert kept(path) == ("the command", some)
    rows = table(some)[2:]
    assert rows == [
        "| core | 2 | 1 | 1 | 0 | 1 of 1 |",
        "| state | 2 | 0 | 0 | 1 | 1 of 2 |",
        "| all | 4 | 1 | 1 | 1 | 2 of 3 |",
    ]
    text = page([path])
    assert "| 7 | 4 | 1 | **1 of 3 (33%)** | 2 of 3 |" in text
    assert "`the command`" in text and all(row in text for row in rows)
    left = survivors(some)[2:]
    assert len(left) == 3 and "both are sets" in left[0] and "`a \\| b` became `a & b`" in left[0]


def test_the_page_is_of_the_runs_that_are_kept() -> None:
    runs = sorted((ROOT / "bench" / "reports" / "proof").glob("mutants-*.json"))
    assert runs
    written = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    assert written == page(runs), (
        "run tools/mutants.py --show bench/reports/proof/mutants-*.json --markdown docs/mutants.md"
    )
    for path in runs:
        unexplained = [each.old for each in kept(path)[1] if not each.test and not each.verdict]
        assert not unexplained, "a survivor is equivalent, or shows a hole that was closed"
