"""Draws faults that nobody has seen: small mistakes in the engine's code, made by chance.

    python tools/draw_faults.py --seed 7 --each 12 > tests/planted/batches/NAME.toml
    python tools/draw_faults.py --seed 7 --number 100 --floors scheduler runner

Faults that a person thinks of are those the person also thinks of testing; these are drawn. ``--each`` candidates per floor,
or ``--number`` over all floors in proportion to their lines, come in a random order that depends on the seed alone: a line
first, then what kind of thing is done to it (``tools/mutations.py``). Some change nothing that anybody could see (a bound that
is twice too large, a log line): whoever makes a batch strikes those out before it runs, never after, and says so in the
batch's head.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.mutations import ROOT, Mutation, is_python, mutations

FLOORS = (
    "core",
    "scheduler",
    "device",
    "weights",
    "state",
    "sampling",
    "models",
    "runner",
    "engine",
    "api",
    "server",
    "syncs",
)
Lines = Mapping[tuple[str, int], Sequence[Mutation]]


def candidates(floor: str) -> Lines:
    """What can be done to each line of a floor, or of the files that a pattern such as ``kernels/*/reference.py`` names;
    Triton's kernels are left out."""
    found: dict[tuple[str, int], list[Mutation]] = {}
    top = ROOT / "headway"
    for path in sorted(top.glob(floor) if "*" in floor else (top / floor).rglob("*.py")):
        if "triton" not in path.name:
            for each in mutations(path):
                found.setdefault((each.file, each.number), []).append(each)
    return found


def drawn(seed: int, each: int, floors: Sequence[str] = FLOORS) -> Iterator[Mutation]:
    """``each`` mistakes of every floor, no two of one line."""
    for floor in floors:
        yield from _some(seed, floor, candidates(floor), each)


def sampled(seed: int, number: int, floors: Sequence[str] = FLOORS) -> Iterator[Mutation]:
    """``number`` mistakes over the floors, in proportion to the lines that can be changed."""
    lines = {floor: candidates(floor) for floor in floors}
    whole = sum(map(len, lines.values()))
    before = 0
    for floor, own in lines.items():
        upto = before + len(own)
        yield from _some(seed, floor, own, number * upto // whole - number * before // whole)
        before = upto


def _some(seed: int, floor: str, lines: Lines, number: int) -> Iterator[Mutation]:
    rng = random.Random(f"{seed} {floor}")
    places = sorted(lines)
    rng.shuffle(places)
    for place in places:
        kind = rng.choice(sorted({each.kind for each in lines[place]}))  # names and arguments are many, and easily seen
        found = rng.choice([each for each in lines[place] if each.kind == kind])
        if number and is_python(found):
            number -= 1
            yield found


def as_toml(faults: Iterable[Mutation], batch: str) -> str:
    """A catalogue of them."""
    parts = [f'round = "{batch}"\n']
    for number, fault in enumerate(faults):
        stem = Path(fault.file).stem.replace("_", "-")
        quoted = [f"'''{text}'''" if "'" in text else f"'{text}'" for text in (fault.old, fault.new, fault.what)]
        parts.append(
            f"[[fault]]\nname = '{batch}-{number:02}-{stem}'\nfile = '{fault.file}'\nold = {quoted[0]}\nnew = {quoted[1]}\n"
            f"what = {quoted[2]}\n"
        )
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Draw faults that nobody has seen.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--each", type=int, default=8, help="candidates of each floor")
    parser.add_argument("--number", type=int, help="candidates of all floors, in place of --each")
    parser.add_argument("--floors", nargs="+", default=FLOORS)
    parser.add_argument("--batch", default="drawn", help="the batch's name")
    options = parser.parse_args(arguments)
    if options.number is None:
        found = drawn(options.seed, options.each, options.floors)
    else:
        found = sampled(options.seed, options.number, options.floors)
    sys.stdout.write(as_toml(found, options.batch))


if __name__ == "__main__":
    main()
