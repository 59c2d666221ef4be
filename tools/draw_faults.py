"""Draws faults that nobody has seen: single tokens of the engine's code, changed by chance.

    python tools/draw_faults.py --seed 7 --each 12 > tests/planted/batches/NAME.toml

Faults that a person thinks of are those the person also thinks of testing; these are drawn. ``--each`` candidates per floor
come in a random order that depends on the seed alone. Some change nothing that anybody could see (a bound that is twice too
large, a log line): whoever makes a batch strikes those out before it runs, never after, and says so in the batch's head.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
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
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "//": "*",
    "&": "|", "|": "&", "+=": "-=", "-=": "+=", "and": "or", "or": "and", "min": "max", "max": "min",
    "True": "False", "False": "True", "any": "all", "all": "any",
}  # fmt: skip
"""What stands there, and what is put in its place."""
NOT_CODE = ("raise ", "assert ", "logger.", "import ", "from ", "def ", "class ", "@", '"', "'")


class Drawn(NamedTuple):
    """A candidate: the line as it is, as it becomes, and which token was changed."""

    file: str
    old: str
    new: str
    what: str


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold statements inside functions."""
    lines: set[int] = set()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if isinstance(node, ast.stmt) and node is not function and not documents:
                    lines.update(range(node.lineno, node.lineno + 1))
    return lines


def candidates(path: Path) -> Iterator[Drawn]:
    """Every single change of a file that leaves it Python, of lines that occur once."""
    text = path.read_text(encoding="utf-8")
    lines, wanted = text.splitlines(), code_lines(text)
    stripped = [line.strip() for line in lines]
    file = str(path.relative_to(ROOT))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if row not in wanted or stripped.count(stripped[row - 1]) != 1 or stripped[row - 1].startswith(NOT_CODE):
            continue
        new = SWAPS.get(token.string)
        if token.type == tokenize.NUMBER and token.string.isdigit():
            new = str(int(token.string) + 1)
        if new is None or token.type not in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
            continue
        line = lines[row - 1]
        changed = line[:column] + new + line[column + len(token.string) :]
        try:
            ast.parse("\n".join([*lines[: row - 1], changed, *lines[row:]]))
        except SyntaxError:
            continue
        yield Drawn(file, stripped[row - 1], changed.strip(), f"{token.string} became {new}")
    for row in sorted(wanted):
        line = stripped[row - 1]
        is_call = line.endswith(")") and line.count("(") == line.count(")") and "=" not in line.partition("(")[0]
        if (
            is_call
            and stripped.count(line) == 1
            and not line.startswith((*NOT_CODE, "return", "if ", "for ", "with ", "yield"))
        ):
            yield Drawn(file, line, "pass", "the call is left out")


def drawn(seed: int, each: int, floors: Sequence[str] = FLOORS) -> Iterator[Drawn]:
    """``each`` candidates of every floor, no two of one line."""
    for floor in floors:
        rng = random.Random(f"{seed} {floor}")
        files = [path for path in sorted((ROOT / "headway" / floor).rglob("*.py")) if "triton" not in path.name]
        found = [one for path in files for one in candidates(path)]
        rng.shuffle(found)
        yield from list({(one.file, one.old): one for one in reversed(found)}.values())[: -each - 1 : -1]


def as_toml(faults: Iterator[Drawn], batch: str) -> str:
    """A catalogue of them."""
    parts = [f'round = "{batch}"\n']
    for number, fault in enumerate(faults):
        stem = Path(fault.file).stem.replace("_", "-")
        quoted = [f"'''{text}'''" if "'" in text else f"'{text}'" for text in (fault.old, fault.new)]
        parts.append(
            f"[[fault]]\nname = '{batch}-{number:02}-{stem}'\nfile = '{fault.file}'\nold = {quoted[0]}\nnew = {quoted[1]}\n"
            f"what = '{fault.what}'\n"
        )
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Draw faults that nobody has seen.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--each", type=int, default=8, help="candidates of each floor")
    parser.add_argument("--batch", default="drawn", help="the batch's name")
    options = parser.parse_args(arguments)
    sys.stdout.write(as_toml(drawn(options.seed, options.each), options.batch))


if __name__ == "__main__":
    main()
