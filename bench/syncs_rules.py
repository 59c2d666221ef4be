"""Make the table of operations that wait for the device, headway/syncs/sim/waits.json, from a record of bench/syncs_ops.py.

    python -m bench.syncs_rules RECORD.json [--out headway/syncs/sim/waits.json]

Each overload becomes the smallest decision tree over the kinds of its arguments that repeats the record: greedily the question
that separates best, the more general one where two do equally well (whether an argument is there, empty, on the host, its
number of dimensions; its dtype last). Arguments that waited in some calls and not in others count as waiting if half of the
calls did. Index and copy operations are left out: their rules are written by hand in headway/syncs/sim/rules.py, because the
operator database hardly has their forms.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from headway.syncs.sim.rules import BY_HAND
from headway.syncs.sim.table import FILE
from headway.syncs.trees import Kinds, Tree, dimensions, holds, parse

ROOT = Path(__file__).parents[1]
OUT = ROOT / "headway" / "syncs" / "sim" / FILE
FACTS = ROOT / "tests" / "syncs" / "card.json"
"""What tests hold the simulation against."""
DEEPEST = 6
Example = tuple[Kinds, bool]


def waited(counts: dict[str, int]) -> bool:
    """Whether half of the calls or more did. A call that waited in two ways counts in both, so take the most frequent."""
    waits = max((number for name, number in counts.items() if name != "none"), default=0)
    return waits > 0 and waits >= counts.get("none", 0)


def questions(examples: list[Example]) -> list[str]:
    """All that can be asked of these arguments, the more general first."""
    names = sorted({name for kinds, _ in examples for name in kinds})
    positions = [name for name in names if name.isdigit()]
    words: dict[str, set[str]] = defaultdict(set)
    sizes: dict[str, set[int]] = defaultdict(set)
    for kinds, _ in examples:
        for name, kind in kinds.items():
            words[name] |= set(kind.split(":"))
            sizes[name].add(dimensions(kind))
    general = {"empty", "cpu", "cuda", "True", "None"}
    return [
        *(f"{name}=" for name in names if not name.isdigit()),
        *(f"{name}:{word}" for name in names for word in sorted(words[name] & general)),
        *(str(int(position) - 0) for position in positions),
        *(f"{name}>{size}" for name in names for size in sorted(sizes[name])[:-1]),
        *(f"{name}:{word}" for name in names for word in sorted(words[name] - general)),
    ]


def impurity(examples: list[Example]) -> float:
    """Bits that the answers still hold."""
    share = sum(waits for _, waits in examples) / len(examples)
    return 0.0 if share in (0, 1) else -len(examples) * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def grow(examples: list[Example], depth: int = 0) -> Tree:
    """The tree that tells those which waited from the others."""
    if not examples:
        return False
    before = impurity(examples)
    if not before or depth == DEEPEST:
        return 2 * sum(waits for _, waits in examples) >= len(examples)
    best: tuple[float, str] | None = None
    for question in questions(examples):
        yes = [each for each in examples if holds(question, each[0])]
        no = [each for each in examples if not holds(question, each[0])]
        left = impurity(yes) + impurity(no) if yes and no else before
        if left < before - 1e-9 and (best is None or left < best[0] - 1e-9):
            best = left, question
    if best is None:
        return 2 * sum(waits for _, waits in examples) >= len(examples)
    question = best[1]
    waits = grow([each for each in examples if holds(question, each[0])], depth + 1)
    does_not = grow([each for each in examples if not holds(question, each[0])], depth + 1)
    return waits if waits == does_not else [question, waits, does_not]


def table(record: dict[str, Any]) -> dict[str, Any]:
    """The file's content."""
    waits: dict[str, Tree] = {}
    never: dict[str, list[str]] = defaultdict(list)
    for overload, by_kind in sorted(record["ops"].items()):
        packet = overload.split(".")[1]
        if packet in BY_HAND:
            continue
        tree = grow([(parse(kinds), waited(counts)) for kinds, counts in by_kind.items()])
        if tree is False:
            never[overload.partition(".")[0]].append(overload)
        else:
            waits[overload] = tree
    return {
        "made_by": "bench/syncs_rules.py from a record of bench/syncs_ops.py; do not edit",
        "torch": record["torch"],
        "card": record["card"],
        "waits": waits,
        "never": dict(never),
    }


def facts(record: dict[str, Any]) -> str:
    """The part of the record that tests need, a line each: operations that wait sometimes, and lines of user code.

    {"ops": {overload: {kinds: whether it waited}}, "forms": {form: driver's calls that blocked or copied}}
    """
    ops = {
        name: {kinds: waited(counts) for kinds, counts in by_kind.items()}
        for name, by_kind in record["ops"].items()
        if any(set(counts) - {"none"} for counts in by_kind.values())
    }
    forms = {name: form["driver"] for name, form in sorted(record["forms"].items())}
    parts = [
        f"{json.dumps(key)}: {{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) + "}"
        for key, part in (("ops", ops), ("forms", forms))
    ]
    return "{" + ",\n".join([f'"torch": {json.dumps(record["torch"])}', *parts]) + "}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    made = table(json.loads(options.record.read_text(encoding="utf-8")))
    lines = [f" {json.dumps(name)}: {json.dumps(tree)}" for name, tree in made["waits"].items()]
    head = "".join(f"{json.dumps(key)}: {json.dumps(made[key])},\n" for key in ("made_by", "torch", "card"))
    FACTS.write_text(facts(json.loads(options.record.read_text(encoding="utf-8"))), encoding="utf-8")
    never = json.dumps(made["never"], separators=(",", ":"))
    options.out.write_text(
        "{" + head + '"waits": {\n' + ",\n".join(lines) + '},\n"never": ' + never + "}\n", encoding="utf-8"
    )
    print(f"{options.out}: {len(made['waits'])} overloads wait, {sum(map(len, made['never'].values()))} never did")


if __name__ == "__main__":
    main()
