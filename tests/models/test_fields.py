"""What is read of a config.json: every reader at its limit and one beside, and what it says of other things."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headway.core.errors import UnsupportedModelError
from headway.models.fields import NEUTRAL, SHAPES, Fields


@pytest.mark.parametrize(
    ("value", "fits"), [(1, True), (0, False), (-1, False), (1.0, False), (True, False), (None, False)]
)
def test_counts_are_integers_from_one_on(value: object, fits: bool) -> None:
    fields = Fields({"n": value})
    if fits:
        assert fields.count("n") == value
        return
    with pytest.raises(UnsupportedModelError, match="n must be a positive integer"):
        fields.count("n")


@pytest.mark.parametrize(
    ("value", "found"),
    [(0, 0), (7, 7), (2.0, 2), (None, 3), (-1, None), (0.5, None), (True, None), ("1", None), ([1], None)],
)
def test_whole_numbers_begin_with_none_at_all(value: object, found: int | None) -> None:
    fields = Fields({"n": value})
    if found is not None:
        assert fields.whole("n", 3) == found and isinstance(fields.whole("n", 3), int)
        return
    with pytest.raises(UnsupportedModelError, match="n must be"):
        fields.whole("n", 3)


def test_lists_and_objects_are_what_they_are() -> None:
    for name, shape in SHAPES.items():
        fits: list[Any] = [[], [1], (2,)] if list in shape else [{}, {"a": 1}]
        for value in (None, *fits):
            assert Fields({name: value})[name] == value
        for value in ("x", 1, True, [1] if list not in shape else {}):
            with pytest.raises(UnsupportedModelError, match=f"{name} must be a"):
                Fields({name: value}).get(name)
    with pytest.raises(UnsupportedModelError, match="an object is wanted in place of 'x'"):
        Fields("x")  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [0, 1, -2.5, 0.5])
def test_numbers_begin_with_the_least(least: float) -> None:
    assert Fields({"x": least}).number("x", least=least) == least
    assert Fields({"x": least + 0.25}).number("x", 7.0, least=least) == least + 0.25
    assert Fields({}).number("x", least, least=least) == Fields({"x": None}).number("x", least, least=least) == least
    wrong: list[Any] = [least - 0.25, math.inf, math.nan, "1", True, [least], None]
    for value in wrong:
        with pytest.raises(UnsupportedModelError, match="x must be a number"):
            Fields({"x": value}).number("x", least=least)


def test_what_is_not_read_is_refused_unless_it_changes_nothing() -> None:
    for name, neutral in NEUTRAL.items():
        for value in neutral:
            Fields({name: value}).refuse_unread()
        other = Fields({name: ["something else"] if name in SHAPES else "something else"})
        with pytest.raises(UnsupportedModelError, match=name):
            other.refuse_unread()
        with pytest.raises(UnsupportedModelError, match=name):
            other.with_defaults(other_one=1).replaced(third=2).refuse_unread()
        other.replaced(third=2).get(name)  # what is read of a changed copy is read of the first
        other.refuse_unread()


def test_defaults_stand_in_for_what_is_absent_and_not_for_null() -> None:
    fields = Fields({"a": None, "b": 2}).with_defaults(a=1, b=1, c=1)
    assert (fields["a"], fields["b"], fields["c"], "d" in fields) == (None, 2, 1, False)
    assert fields.replaced(a=5)["a"] == 5 and not fields.flag("a") and fields.flag("b")


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (3, (3,)), (0, (0,)), ([4, 5], (4, 5)), ((6,), (6,)), ([], ())])
def test_token_ids_are_one_or_several(value: object, ids: tuple[int, ...]) -> None:
    assert Fields({"t": value}).token_ids("t") == ids and Fields({}).token_ids("t") == ()
