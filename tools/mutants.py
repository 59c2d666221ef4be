"""The rate at which the tests catch mistakes made by chance, by floor, and those they do not catch.

    python tools/mutants.py MAP --seed 1 --number 100 --floors scheduler runner --json bench/reports/proof/mutants-1.json
    python tools/mutants.py MAP --again OUT.json      try those that survived again: what is caught now
    python tools/mutants.py --show A.json B.json --markdown docs/mutants.md     write the page, run nothing

``tools/draw_faults.py`` draws the mistakes in proportion to the floors' lines. Each is planted in a copy of the tree and tried
by the tests that execute its line, which ``tools/covered_tests.py`` wrote to MAP: those first that execute little else, then a
few of every test file, for ``--bound`` seconds. Behind them, or instead where none executes the line, come the test files that
MAP knows nothing of, those first that ``tools/planted_floors.py`` calls nearest. What survives that is tried by the others that
execute the line, and then by all near files' tests that CI runs and MAP has not, slow ones included, for ``--patience`` seconds
each: only then nothing has caught it. First outcomes are kept; ``--again`` writes beside them. A survivor gets its
``verdict`` by hand, in the file: "equivalent: ..." if nobody could tell it from the code as it is, or what was done about its
class.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.covered_tests import MARKS, CoverageMap
from tools.draw_faults import FLOORS, sampled
from tools.mutations import Mutation
from tools.planted_faults import Fault, failure
from tools.planted_floors import PYTEST as PLANTED
from tools.planted_floors import ROOT, nearest
from tools.warm_pytest import WarmTree

PYTEST = ("-q", "-x", "-m", MARKS)
READ_SOURCES = {
    "tests/house/test_constants.py": ("value", "name"),
    "tests/house/test_host_tensors.py": ("call",),
    "tests/house/test_tree.py::test_python_files_obey[text_encoding]": ("call",),
}
"""Tests that see lines without executing them, and the kinds of mistakes that they may see."""
OF_FLOOR = {
    "cli": ("tests/cli/test_cli_frozen.py", "tests/cli/test_commands.py::test_help_is_quick_and_loads_no_torch"),
}
"""Those that run a floor's modules in a process of their own, which is not watched."""
CI = "not soak and not gpu and not attack"
"""What CI runs: slow tests, too."""
TEST_SECONDS = 600
"""Of one test, as in CI."""
EACH_FILE = 3
MOST_TESTS = 400
"""Ids that one command line takes."""


@dataclass(kw_only=True)
class Mutant:
    """A mistake, and what became of it.

    Attributes:
        tests: how many execute its line; -1: the map was empty, which leaves all to test files found by imports.
        cut: of a survivor: tests were left out, because their time was over.
        test, error: what caught it at the first run; empty when nothing did.
        now: the test that catches it at a later run.
        verdict: of a survivor, see the module.
    """

    file: str
    number: int
    old: str
    new: str
    what: str
    kind: str
    tests: int = 0
    cut: bool = False
    test: str = ""
    error: str = ""
    seconds: float = 0.0
    now: str = ""
    verdict: str = ""

    @property
    def floor(self) -> str:
        """The folder of ``headway`` it is in."""
        return Path(self.file).parts[1]


def chosen(names: Sequence[str], covered: CoverageMap, bound: float) -> list[str]:
    """The first of all, as many as take half of ``bound`` seconds, then the first few of each test file, for the other half; a
    file's together, quick files first.

    Args:
        names: ids of tests in the order of ``CoverageMap.tests``.
    """
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(name.partition("::")[0], []).append(name)
    few = [name for own in files.values() for name in own[:EACH_FILE]]
    taken, whole = set[str](), 0.0
    for some, most in ((names, bound / 2), (few, bound), (names, bound)):
        for name in some:
            fits = not taken or (name not in taken and whole + covered.seconds[name] <= most)
            if fits and len(taken) < MOST_TESTS:
                taken.add(name)
                whole += covered.seconds[name]
    order = sorted(files.values(), key=lambda own: sum(covered.seconds[name] for name in own if name in taken))
    return [name for own in order for name in own if name in taken]


def unmapped(file: str, covered: CoverageMap) -> list[str]:
    """Test files of which the map has no test, the nearest first."""
    mapped = {name.partition("::")[0] for name in covered.seconds}
    return [each for each in nearest(file, 0)[1][len(PLANTED) + 1 :] if each not in mapped]


def tests_of(mutation: Mutation, covered: CoverageMap, bound: float) -> list[str]:
    """What may tell: arguments for pytest."""
    names = covered.tests(mutation.file, mutation.number)
    found = chosen(names, covered, bound) if names else []
    limits = f"--timeout={TEST_SECONDS}", f"--session-timeout={4 * bound:g}"  # machines and moments differ by as much
    reading = [test for test, kinds in READ_SOURCES.items() if mutation.kind in kinds]
    always = (*reading, *OF_FLOOR.get(Path(mutation.file).parts[1], ()))
    tests = dict.fromkeys([*found, *always, *unmapped(mutation.file, covered)])
    return [*PYTEST, *limits, *tests]


def others_of(mutation: Mutation, covered: CoverageMap, bound: float, patience: float) -> Iterator[list[str]]:
    """What may tell besides: arguments for pytest, one run after the other."""
    names = covered.tests(mutation.file, mutation.number)
    ran = chosen(names, covered, bound) if names else []
    limits = f"--timeout={TEST_SECONDS}", f"--session-timeout={patience:g}"
    if rest := [name for name in names if name not in ran]:
        yield ["-q", "-x", "-m", CI, *limits, *rest]
    executes = {name.partition("::")[0] for name in names}
    near = [each for each in nearest(mutation.file, 0)[1][len(PLANTED) + 1 :] if each not in executes]
    yield ["-q", "-x", "-m", f"slow and {CI}", *limits, *sorted(executes), *near]
    if not names:  # nothing is known: whole files
        yield ["-q", "-x", "-m", CI, *limits, *near]


def out_of_time(output: str) -> bool:
    """Whether the time was over, of all tests or of one, and nothing had failed besides: on a busy machine it says nothing."""
    test, error = failure(output)
    return "pytest-timeout" in error if test else "session-timeout:" in output


def tried(mutation: Mutation, tree: WarmTree, covered: CoverageMap, bound: float, patience: float) -> Mutant:
    """What became of one mistake."""
    tests = len(covered.tests(mutation.file, mutation.number)) if covered.seconds else -1
    mutant = Mutant(**mutation._asdict(), tests=tests)
    fault = Fault(name="mutant", file=mutant.file, old=mutant.old, new=mutant.new, what=mutant.what)
    begun = time.monotonic()
    more = others_of(mutation, covered, bound, patience) if patience else ()
    with tree.changed(mutant.file, fault.planted((ROOT / mutant.file).read_text(encoding="utf-8"))):
        for arguments in (tests_of(mutation, covered, bound), *more):
            failed, output = tree.pytest(arguments, 2 * max(4 * bound, patience))
            if failed and not out_of_time(output):
                test, error = failure(output)
                mutant.test, mutant.error = test or "collection", error[:100]
                break
            mutant.cut = mutant.cut or failed
    mutant.cut = mutant.cut and not mutant.test
    mutant.seconds = round(time.monotonic() - begun, 1)
    return mutant


def run(mutations: Iterable[Mutation], covered: CoverageMap, bound: float, patience: float = 0.0) -> Iterator[Mutant]:
    """Try them all, and say how it went.

    Raises:
        RuntimeError: the first one's tests fail without it, too.
    """
    with WarmTree() as tree:
        for number, each in enumerate(mutations):
            if not number:
                failed, output = tree.pytest(tests_of(each, covered, bound / 4), 8 * bound)
                if failed and not out_of_time(output):
                    raise RuntimeError(f"{output}\nthe clean tree fails")
            mutant = tried(each, tree, covered, bound, patience)
            word = "caught" if mutant.test else "CUT" if mutant.cut else "SURVIVED"
            place = f"{mutant.file.removeprefix('headway/')}:{mutant.number}"
            print(f"{word:8} {mutant.seconds:4.0f} s  {place:40} {mutant.what:40} {mutant.test[:100]}", flush=True)
            yield mutant


def table(mutants: Sequence[Mutant]) -> list[str]:
    """The rates by floor, as Markdown. Equivalent survivors are no mistakes and count in a column of their own."""
    lines = [
        "| floor | mistakes | caught at first run | equivalent | not executed | caught now |",
        "|---|---|---|---|---|---|",
    ]
    for floor in [*dict.fromkeys(each.floor for each in mutants), "all"]:
        ours = [each for each in mutants if floor in (each.floor, "all")]
        same = sum(each.verdict.startswith("equivalent") for each in ours)
        first = sum(bool(each.test) for each in ours)
        now = sum(bool(each.test or each.now) for each in ours)
        unseen = "no map" if all(each.tests < 0 for each in ours) else sum(not each.tests for each in ours)
        lines.append(f"| {floor} | {len(ours)} | {first} | {same} | {unseen} | {now} of {len(ours) - same} |")
    return lines


def survivors(mutants: Sequence[Mutant]) -> list[str]:
    """What nothing caught at its first run, as Markdown."""
    lines = ["| survivor | mistake | verdict | caught now by |", "|---|---|---|---|"]
    for each in mutants:
        if not each.test:
            place = f"{each.file.removeprefix('headway/')}:{each.number}"
            old, new = (text.replace("|", "\\|") for text in (each.old, each.new))
            lines.append(f"| `{place}` | `{old}` became `{new}` | {each.verdict} | {each.now and f'`{each.now}`'} |")
    return lines


def by_seed(runs: Mapping[str, Sequence[Mutant]]) -> list[str]:
    """What each draw's first run caught, the latest draw first, as Markdown.

    Args:
        runs: by the names of their files, ``mutants-SEED`` and maybe some floors.
    """
    seeds: dict[int, list[Mutant]] = {}
    for name, mutants in runs.items():
        seeds.setdefault(int(name.split("-")[1]), []).extend(mutants)
    lines = [
        "| seed | mistakes | equivalent | caught at first run, of the others | caught now |",
        "|---|---|---|---|---|",
    ]
    for seed, mutants in sorted(seeds.items(), reverse=True):
        same = sum(each.verdict.startswith("equivalent") for each in mutants)
        first, now = (sum(bool(each.test or (late and each.now)) for each in mutants) for late in (False, True))
        others = len(mutants) - same
        share = f"{first} of {others} ({first / max(others, 1):.0%})"
        lines.append(f"| {seed} | {len(mutants)} | {same} | **{share}** | {now} of {others} |")
    return lines


def page(paths: Sequence[Path]) -> str:
    """docs/mutants.md: the rates of several runs, and what became of each survivor."""
    runs = {path.stem: kept(path) for path in paths}
    lines = [
        "# Mutants",
        "",
        "Written by `tools/mutants.py --show`; do not edit. Mistakes made by chance, one line each (`tools/mutations.py`),",
        "planted in a copy of the tree and tried by the tests that see their line. A survivor is equivalent, if nobody",
        "could tell it from the code as it is, or shows a hole in the tests; what was done about its class stands beside it.",
        "",
        *by_seed({name: mutants for name, (_, mutants) in runs.items()}),
        "",
        "A draw's first run is the figure that says how many mistakes the tests of that day catch: nobody had seen these.",
        "What is caught now was caught after tests of the survivors' classes were written.",
        "",
        "How far the rates can be trusted. Up to seed 12, a bound on time on a busy machine and test files that the map",
        "did not know left out tests that would catch a mistake, which makes the rates low. While the runs of seed 1 went",
        "on, tests were written already and the tool was mended (its order of tests, its bound, outcomes that said nothing),",
        "which may make them high. From seed 13 on test files without a map are found by imports and run, too. Of seed 13,",
        "what time cut off ran again, the likeliest files whole but not the suite, so that its rate may still be low; of seeds",
        "14 and 15, which had no map, likewise (two of three and four of six that time cut off were caught then). Draws are of",
        "different floors; seeds 13 to 15 are of all. A draw is small: 35 of 36 may be a true rate of 86 % or of 99.5 %, 33 of",
        "37 one of 75 % or of 96 % (Wilson, 95 %). Limits that `tests/house/constants.txt` lists, and from seed 13 on what",
        "records and functions assume, are caught by that list, not by what they do.",
    ]
    for name, (command, mutants) in runs.items():
        lines += ["", f"## {name}", "", f"`{command}`", "", *table(mutants), "", *survivors(mutants)]
    return "\n".join(lines) + "\n"


def kept(path: Path) -> tuple[str, list[Mutant]]:
    """The command of a run, and its mutants."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return data["command"], [Mutant(**each) for each in data["mutants"]]


def keep(path: Path, command: str, mutants: Sequence[Mutant]) -> None:
    """Write them."""
    data = {"command": command, "mutants": [asdict(each) for each in mutants]}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def try_again(path: Path, covered: CoverageMap, bound: float, patience: float = 0.0) -> None:
    """Survivors anew: what is caught now."""
    command, mutants = kept(path)
    left = [each for each in mutants if not each.test and not each.now and not each.verdict.startswith("equivalent")]
    anew = [Mutation(*(getattr(each, name) for name in Mutation._fields)) for each in left]
    for old, new in zip(left, run(anew, covered, bound, patience), strict=True):
        old.now = new.test
        keep(path, command, mutants)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="The rate at which tests catch mistakes made by chance.")
    parser.add_argument("map", type=Path, nargs="?", help="what tools/covered_tests.py wrote; needed to run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--floors", nargs="+", default=FLOORS)
    parser.add_argument("--these", nargs="+", default=(), help="floors of the draw that are run now; default: all")
    parser.add_argument("--bound", type=float, default=60, help="seconds for the tests of one mistake")
    parser.add_argument("--patience", type=float, default=0, help="seconds for each kind of other tests of a survivor")
    parser.add_argument("--json", type=Path, help="write the outcomes there, after each")
    parser.add_argument("--again", type=Path, help="outcomes whose survivors are tried again")
    parser.add_argument("--show", type=Path, nargs="+", help="outcomes that are shown; nothing is run")
    parser.add_argument("--markdown", type=Path, help="write the page of --show there")
    options = parser.parse_args(arguments)
    if options.show:
        text = page(options.show)
        if options.markdown:
            options.markdown.write_text(text, encoding="utf-8")
        else:
            print(text)
        return 0
    if options.map is None:
        parser.error("MAP is missing")
    covered = CoverageMap(options.map)
    path = options.again or options.json
    if options.again:
        try_again(path, covered, options.bound, options.patience)
        mutants = kept(path)[1]
    else:
        command = f"tools/mutants.py MAP --seed {options.seed} --number {options.number} --bound {options.bound:g}"
        command += f" --patience {options.patience:g}" if options.patience else ""
        command += f" --floors {' '.join(options.floors)}"
        mutants = []
        if path and path.exists():  # a run that was ended goes on
            before, mutants = kept(path)
            if before != command:
                parser.error(f"{path} is of another run: {before}")
        whole = sampled(options.seed, options.number, options.floors)
        drawn = [each for each in whole if not options.these or Path(each.file).parts[1] in options.these]
        drawn = drawn[len(mutants) :]
        for mutant in run(drawn, covered, options.bound, options.patience):
            mutants.append(mutant)
            if path:
                keep(path, command, mutants)
    print("\n".join([*table(mutants), "", *survivors(mutants)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
