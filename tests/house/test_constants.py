"""Values of named numbers are listed: limits that messages and documents tell, time-outs, sizes of tables, codes on wires."""

from __future__ import annotations

import ast
import math

import pytest

from tests.house.constants import LISTED, assumed, found, named, number


def test_every_named_number_has_its_listed_value() -> None:
    """A test that compares with a limit by its name passes whatever the value is. Whoever changes one changes the list, too."""
    agreed = LISTED.read_text(encoding="utf-8").splitlines()
    now = found()
    changed = [f"- {line}" for line in agreed if line not in now] + [f"+ {line}" for line in now if line not in agreed]
    told = "\n".join(changed)
    assert now == agreed, f"{told}\nif that is meant: python -m tests.house.constants > tests/house/constants.txt"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-2.5", -2.5),
        ("4 * 2**20", 4 << 20),
        ("1 << 3", 8),
        ("7 // 2", 3),
        ("1 / 4", 0.25),
        ("True", None),
        ("float('inf')", math.inf),
        ("int('3')", None),
    ],
)
def test_what_a_number_is(text: str, value: float | None) -> None:
    assert number(ast.parse(text, mode="eval").body) == value


def test_which_are_named() -> None:
    text = "A = 3\nB: int = 4 * 2\nC, D = 1, 2.5\nE = (1, 2)\nF = G = 5\n"
    text += "H = 'x'\nK = 1 + A\nM: int\ndef f() -> None:\n    N = 3\n"
    text += "class R:\n    p: int = 3\n    q: tuple[int, int] = (4, 5)\n    r: bool = True\n"
    assert [*named(text)] == [("A", 3), ("B", 8), ("C", 1), ("D", 2.5), ("E[0]", 1), ("E[1]", 2), ("F", 5),
                               ("R.p", 3), ("R.q[0]", 4), ("R.q[1]", 5)]  # fmt: skip


def test_what_is_assumed() -> None:
    text = "def f(a, b=3, *, c=True, d=None, e=-1.5):\n    def g(x=2 * 4): ...\n"
    text += "class R:\n    p: bool = False\n    q: int = 3\n    async def h(self, y=False, z='a'): ...\n"
    assert [*assumed(text)] == [("f(b)", 3), ("f(c)", True), ("f(e)", -1.5), ("f.g(x)", 8), ("R.p", False),
                                ("R.h(y)", False)]  # fmt: skip
