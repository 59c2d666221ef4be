"""What the bench of products without a norm says of times that are known."""

from __future__ import annotations

import pytest

from bench.ops import few_tiles
from headway.kernels.linear_forms.shapes import Product
from headway.kernels.linear_forms.winners import Form
from headway.kernels.mid_linear.tile import is_early
from headway.models.layers.form_walk import decided
from tests.kernels.measured_alone import Times, measure


def slower_at_first() -> Times:
    """Few rows take 8 us, what starts early 10, ``F.linear`` 16; tiles that a start does not take 1 us less."""
    seen: set[tuple[Product, int, str]] = set()

    def times(product: Product, rows: int, form: Form) -> float:
        key = product, rows, form[0]
        first = key not in seen
        seen.add(key)
        return 16.0 if form[1] is None else (10.0 if is_early(form[0]) else 8.0) - (not first)

    return times


def test_a_choice_is_compared_with_the_best_of_all() -> None:
    name = "gemma3-1b"
    table = few_tiles.table_of(few_tiles.MODELS[name])
    groups = few_tiles.wanted(table)
    assert [group[0].junction for group in groups] == ["o", "gate_up", "down", "qkv"], "one of each"
    found = list(few_tiles.lines(name, table, measure(groups, (1, 8), slower_at_first(), most=2)))
    assert len(found) == 8
    for line in found:
        assert line.op == decided(table, line.rows)[line.product] and line.us == (10.0 if is_early(line.op) else 8.0)
        assert line.loss == line.us / 7.0 and line.op_loss == (line.us - 1) / 7.0
        assert set(line.best) == {op for _, op in line.product.ops} | {"plain"}
    early = [line for line in found if is_early(line.op)]
    assert [(line.product.junction, line.rows) for line in early] == [("gate_up", 8)]
    text = few_tiles.shown(early[0], 4e6)
    assert "gate_up" in text and "bare_gate_up 9.00" in text and "over the best 1.429" in text and "plain 16.00" in text
    told = list(few_tiles.summary(found))
    assert told[0].startswith(name) and "(worst 1.429)" in told[0]
    assert [line.split("  ")[0] for line in told[1:]] == ["fitted, 1 rows", "fitted, 8 rows"]
    assert few_tiles.as_json(early[0])["us"] == 10.0


def test_what_was_fitted_is_apart_from_what_was_not() -> None:
    assert not set(few_tiles.FITTED) & set(few_tiles.HELD)
    sizes = [few_tiles.MODELS[name][1:] for name in few_tiles.MODELS]
    assert len(set(sizes)) == len(sizes) == 8


@pytest.mark.parametrize("name", few_tiles.HELD)
def test_each_shape_is_read_as_its_architecture_has_it(name: str) -> None:
    _, hidden, inner, heads, kv_heads, size = few_tiles.MODELS[name]
    found = {group[0].junction: group[0] for group in few_tiles.wanted(few_tiles.table_of(few_tiles.MODELS[name]))}
    assert found["qkv"].size == ((heads + 2 * kv_heads) * size, hidden) and found["gate_up"].size == (2 * inner, hidden)
    assert found["down"].size == (hidden, inner) and found["o"].size == (hidden, heads * size)
    assert all(found[out].place == "behind" for out in ("o", "down"))
