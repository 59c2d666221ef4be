"""Products without a norm of their own: which of two kinds of ops they run, by measurement and by the rule."""

from __future__ import annotations

import math
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel module is imported

from headway.kernels.linear_forms import bare, chain, on_card, table
from headway.kernels.linear_forms.bare import handover, handover_by_rule
from headway.kernels.linear_forms.card import BANDWIDTHS, H200, Card
from headway.kernels.linear_forms.chain import Around
from headway.kernels.linear_forms.check import check
from headway.kernels.linear_forms.on_card import OnCard
from headway.kernels.linear_forms.shapes import JUNCTIONS, Product
from headway.kernels.linear_forms.winners import Form, numbers
from headway.kernels.mid_linear import reference
from headway.kernels.mid_linear.tile import Kind as EarlyKind
from headway.kernels.mid_linear.tile import MidTile
from headway.kernels.mid_linear.tiles import mid_rows, tile_for
from headway.kernels.silu_mul import GATES
from headway.kernels.skinny_linear import linear_add, norm_gate_up, norm_linear, skinny_linear
from headway.kernels.skinny_linear.rule import BUCKETS
from headway.kernels.skinny_linear.tile import Kind as FewKind
from headway.kernels.skinny_linear.tile import Tile
from headway.kernels.skinny_linear.tiles import fused_rows
from headway.kernels.skinny_linear.tiles import measured_tiles as few_tiles
from headway.kernels.skinny_linear.triton import ADD, SILU
from tests.kernels.measured_alone import measure, tuned
from tests.kernels.test_linear_forms import like_public_ones, of_bench

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OPS: dict[str, tuple[FewKind, EarlyKind]] = {
    "qkv": ("skinny_linear", "bare_linear"),
    "o": ("skinny_linear", "bare_linear"),
    "gate_up": ("gate_up", "bare_gate_up"),
    "down": ("skinny_linear", "bare_linear"),
}
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 132, BANDWIDTHS["H100"])
QKV = Product("qkv", 1536, 1152, (("few", "skinny_linear"), ("meet", "bare_linear")))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# -- the rule ----------------------------------------------------------------------------------------------------------

HELD_OUT = {
    ("qkv", 4096, 2560): ((7.82, 8.21), (8.42, 8.46)), ("o", 2560, 2048): ((3.87, 6.08), (4.65, 6.04)),
    ("gate_up", 20480, 2560): ((35.26, 37.87), (37.15, 38.20)), ("down", 2560, 10240): ((21.36, 22.22), (22.24, 22.12)),
    ("qkv", 8192, 3584): ((19.55, 20.06), (21.11, 20.48)), ("o", 3584, 4096): ((11.76, 11.38), (11.58, 11.50)),
    ("gate_up", 28672, 3584): ((66.23, 73.91), (70.73, 74.37)), ("down", 3584, 14336): ((37.12, 36.29), (36.56, 36.31)),
}  # fmt: skip
"""Gemma3-4B and Gemma2-9B on one H100: microseconds of ``skinny_linear`` and ``mid_linear`` at 1 and 8 rows. They never tuned
the rule for the choice between these."""


def test_the_rule_chooses_well_for_products_it_was_not_fitted_to() -> None:
    losses = []
    for (junction, outputs, inputs), measured in HELD_OUT.items():
        last = handover_by_rule(*OPS[junction], outputs, inputs, H100)
        losses += [pair[rows > last] / min(pair) for rows, pair in zip((1, 8), measured, strict=True)]
    assert max(losses) < 1.035 and math.prod(losses) ** (1 / len(losses)) < 1.006
    always = [pair[0] / min(pair) for measured in HELD_OUT.values() for pair in measured]
    assert math.prod(losses) < math.prod(always), "worth more than no choice"


@pytest.mark.parametrize("card", [H200, H100], ids=lambda card: card.name)
def test_by_the_rule_no_bare_product_is_faster_for_more_rows(card: Card) -> None:
    """Whatever is taken for fewer rows, what more rows take was to be had, and is not predicted to be faster."""
    for shape in (*of_bench()[:5], *like_public_ones(8)):
        for junction in JUNCTIONS:
            few, early = OPS[junction]
            outputs, inputs = shape.weight(junction)
            if inputs % 64:
                continue
            last = handover_by_rule(few, early, outputs, inputs, card)
            times = {rows: bare.few_us(few, rows, outputs, inputs, card) for rows in BUCKETS}
            other = bare.early_us(early, 16, outputs, inputs, card)
            taken = [
                min(times[more] for more in BUCKETS if rows <= more <= last) if rows <= last else other
                for rows in BUCKETS
            ]
            assert all(a <= b + 1e-9 for a, b in pairwise(taken)), (shape, junction, last)


def test_more_bytes_and_fewer_chunks_in_flight_take_longer() -> None:
    tile = MidTile(32, 128, 1, 7, 7, 4, turn=8)
    assert (
        bare.tile_us(tile, 4096, 2560, H100)
        < bare.tile_us(tile, 4096, 5120, H100)
        < bare.tile_us(tile, 8448, 5120, H100)
    )
    thin = MidTile(16, 128, 1, 7, 7, 4, turn=8)
    assert bare.tile_us(thin, 1152, 6912, H100) > bare.tile_us(tile, 1152, 6912, H100), "chunks one after the other"


def test_what_cannot_start_early_is_left_to_few_rows() -> None:
    assert handover("skinny_linear", "bare_linear", 640, 1000) == fused_rows("skinny_linear", 640, 1000) == 16
    assert handover("skinny_linear", "linear_parts", 640, 1024) == 8, "parts start early for more"


def test_kinds_without_squares_take_the_others_tiles_until_they_are_measured(cache: None) -> None:
    assert mid_rows("bare_linear", 1536, 1152) == range(1, 129), "the handover says where it begins"
    assert mid_rows("mid_linear", 1536, 1152) == range(2, 129)
    assert tile_for("bare_linear", 8, 1536, 1152) == tile_for("mid_linear", 8, 1536, 1152)
    found = measure([(QKV,)], ROWS, lambda product, rows, form: {"bare_linear": 2.0, "plain": 9.0}.get(form[0], 5.0))
    with tuned(found):
        assert mid_rows("bare_linear", 1536, 1152) == range(1, 257)
        assert mid_rows("mid_linear", 1536, 1152) == range(2, 129), "what takes squares is as it was"


# -- measured ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1, 4, 16])
def test_a_measured_handover_is_where_the_other_op_was_faster(last: int, cache: None) -> None:
    def times(product: Product, rows: int, form: Form) -> float:
        return {"skinny_linear": 5.0 if rows <= last else 7.0, "bare_linear": 6.0, "plain": 20.0}[form[0]] + rows / 1000

    found = measure([(QKV,)], ROWS, times)
    assert found.entries["skinny_linear", 1536, 1152].keys() == ({each for each in BUCKETS if each <= last} or {0})
    with tuned(found):
        assert fused_rows("skinny_linear", 1536, 1152) == last == handover("skinny_linear", "bare_linear", 1536, 1152)
        assert mid_rows("bare_linear", 1536, 1152) == range(last + 1, 257)


def test_what_was_measured_of_one_alone_decides_too(cache: None) -> None:
    with tuned():
        table.save_tuned(H200, {("bare_linear", 1536, 1152): {8: numbers(("", MidTile(16, 128, 1, 7, 7, 4, turn=8)))}})
        table.tables.cache_clear()
        assert handover("skinny_linear", "bare_linear", 1536, 1152) == 4, "5 to 8 rows run what was measured for 8"
        assert handover("gate_up", "bare_gate_up", 13824, 1152) < 8, "by the rule"
        table.save_tuned(H200, {("gate_up", 13824, 1152): {8: numbers(("", Tile(8, 128, 4, 4, 3, 1)))}})
        for each in (table.tables, few_tiles):
            each.cache_clear()
        assert handover("gate_up", "bare_gate_up", 13824, 1152) == 8, "what was measured goes before the rule"


def test_fewer_rows_take_what_more_rows_have_if_that_was_faster() -> None:
    """4 rows were slower than 16 by every tile of theirs; 64 slower than 128."""
    slow = {("skinny_linear", 4): 9.0, ("bare_linear", 64): 30.0}

    def times(product: Product, rows: int, form: Form) -> float:
        base = 5.0 + rows / 100 if form[0] == "skinny_linear" else 7.0 + rows / 100
        return slow.get((form[0], rows), base if form[0] != "plain" else 50.0)

    found = measure([(QKV,)], ROWS, times)
    few, early = found.entries["skinny_linear", 1536, 1152], found.entries["bare_linear", 1536, 1152]
    assert few[4] == few[8] and early[64] == early[128]
    assert list(few) == [1, 2, 4, 8, 16] and list(early) == [32, 64, 128, 256]


def test_forms_that_are_wrong_are_left_out_and_told() -> None:
    def times(product: Product, rows: int, form: Form) -> float:
        if form[0] == "skinny_linear":
            raise ValueError("two runs differ")
        return 3.0

    found = measure([(QKV,)], ROWS, times)
    assert found.entries["skinny_linear", 1536, 1152] == {0: ()}
    assert found.failed and all("two runs differ" in line for line in found.failed)


def test_products_without_time_keep_their_rule() -> None:
    found = measure([(QKV,)], ROWS, lambda *_: 1.0, until=time.monotonic() - 1)
    assert not found.entries and found.left == [QKV] and not found.timed


def test_products_that_take_their_forms_together_are_added_up() -> None:
    """The first is faster by few up to 8 rows, the second by far by the other way."""
    group = (
        Product("qkv", 6448, 1536, (("few", "norm_linear"), ("meet", "mid_linear"))),
        Product("o", 1536, 3072, (("few", "linear_add"), ("meet", "mid_add")), place="added"),
    )
    us = {"norm_linear": 4.0, "linear_add": 9.0, "mid_linear": 5.0, "mid_add": 5.0, "plain": 8.0}
    found = measure([group], (1, 8, 64), lambda product, rows, form: us[form[0]] + (form[0] == "linear_add" and rows))
    assert found.entries["norm_linear", 6448, 1536] == {0: ()} == found.entries["linear_add", 1536, 3072]
    assert list(found.entries["mid_add", 1536, 3072]) == [1, 8, 64] == list(found.entries["mid_linear", 6448, 1536])
    us["linear_add"] = 4.0
    found = measure([group], (1, 8, 64), lambda product, rows, form: us[form[0]] + (form[0] == "linear_add" and rows))
    assert list(found.entries["linear_add", 1536, 3072]) == [1] == list(found.entries["norm_linear", 6448, 1536])


# -- what is timed -----------------------------------------------------------------------------------------------------

SMALL = Tile(4, 32, 2, 4, 3, 1)
EARLY = MidTile(16, 64, 1, 1, 1, 4)
BEHIND = Product("o", 48, 64, (), place="behind")
CASES: list[tuple[Product, Form]] = [
    (Product("qkv", 48, 64, (), bias=True), ("skinny_linear", SMALL)),
    (Product("qkv", 48, 64, (), bias=True), ("bare_linear", EARLY)),
    (Product("qkv", 48, 64, (), place="entering"), ("norm_linear", SMALL)),
    (Product("qkv", 48, 64, ()), ("mid_linear", EARLY)),
    (Product("gate_up", 48, 64, (), gate="gelu_tanh"), ("gate_up", SMALL)),
    (Product("gate_up", 48, 64, (), gate="gelu_tanh"), ("bare_gate_up", EARLY)),
    (Product("gate_up", 48, 64, (), gate="silu"), ("norm_gate_up", SMALL)),
    (Product("gate_up", 48, 64, (), gate="gelu"), ("plain", None)),
    (BEHIND, ("skinny_linear", SMALL)),
    (BEHIND, ("bare_linear", EARLY)),
    (BEHIND, ("linear_parts", MidTile(16, 32, 2, 1, 1, 4))),
    (BEHIND, ("plain", None)),
    (Product("o", 48, 64, (), place="added"), ("linear_add", SMALL)),
    (Product("o", 48, 64, (), place="added"), ("plain", None)),
    (Product("o", 48, 64, ()), ("skinny_linear", SMALL)),
    (Product("head", 48, 64, ()), ("mid_linear", EARLY)),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels by their references, on a CPU; what kinds of them were launched."""
    launched: list[str] = []

    def early(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: MidTile,
        squares: torch.Tensor | None = None, eps: float = 0.0, *, gate: int = 0,
    ) -> None:  # fmt: skip
        launched.append("squares" if squares is not None else "bare")
        if out.dim() == 3:
            for part, (a, b) in zip(out, zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True), strict=True):
                part.copy_(torch.nn.functional.linear(a.float(), b.float()))
        elif gate:
            out.copy_(reference.mid_gate_up(x, weight, bias, squares, eps, GATES[gate - 1]))
        else:
            out.copy_(reference.mid_linear(x, weight, bias, squares, eps))

    def few(
        x: torch.Tensor, norm: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None,
        out: torch.Tensor, mode: int, tile: Tile,
    ) -> None:  # fmt: skip
        launched.append("normed" if norm is not None else "few")
        if mode == ADD:
            linear_add.reference(x, weight, bias, out)
        elif mode >= SILU:
            out.copy_(norm_gate_up.reference(x, norm, eps, weight, bias, GATES[mode - SILU]))
        elif norm is not None:
            out.copy_(norm_linear.reference(x, norm, eps, weight, bias))
        else:
            out.copy_(skinny_linear.reference(x, weight, bias))

    monkeypatch.setattr(chain, "launch_mid", early)
    monkeypatch.setattr(chain, "launch_skinny", few)
    return launched


@pytest.mark.parametrize(
    ("product", "form"), CASES, ids=lambda each: str(each[0]) if isinstance(each, tuple) else each.place
)
def test_a_form_is_checked_with_what_stands_around_it(product: Product, form: Form, launches: list[str]) -> None:
    random = torch.Generator().manual_seed(1)
    hidden = product.outputs if product.junction == "o" else product.inputs

    def half(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=random).bfloat16()

    around = Around(half(3, hidden), half(hidden))
    weight, bias = half(*product.size) * product.inputs**-0.5, half(product.outputs) if product.bias else None
    check(product, form, around, weight, bias)
    wanted = {"norm_linear": "normed", "norm_gate_up": "normed", "plain": ""}.get(
        form[0], "few" if form[1] == SMALL else "bare"
    )
    assert set(launches) == ({"squares"} if form[0] == "mid_linear" and product.junction != "head" else {wanted} - {""})


def test_wrong_and_drifting_kernels_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def drifting(
        x: torch.Tensor, norm: None, eps: float, weight: torch.Tensor, bias: None, out: torch.Tensor, *_: Any
    ) -> None:
        calls[0] += 1
        out.copy_(torch.nn.functional.linear(x, weight) * (1 + 0.008 * (calls[0] % 2)))

    around, weight = Around(torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()), torch.randn(48, 64).bfloat16()
    product, form = Product("qkv", 48, 64, ()), ("skinny_linear", SMALL)
    monkeypatch.setattr(chain, "launch_skinny", drifting)
    with pytest.raises(ValueError, match="two runs differ"):
        check(product, form, around, weight, None)
    monkeypatch.setattr(chain, "launch_skinny", lambda *args: args[5].zero_())
    with pytest.raises(ValueError, match="error"):
        check(product, form, around, weight, None)


def test_each_weight_is_read_once_a_round(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Microseconds are of one product; all weights take part, so that none is in the cache when it is read again."""
    rounds: list[int] = []

    class Clock:
        def __init__(self, device: torch.device) -> None:
            pass

        def spent(self, call: Any, times: int) -> float:
            launches.clear()
            call()
            rounds.append(times)
            return 7.0 * len(launches)

    monkeypatch.setattr(on_card, "Timer", Clock)
    monkeypatch.setattr(on_card, "WEIGHTS_BYTES", 5 * 2 * 48 * 64)
    bench = OnCard(torch.device("cpu"), None)
    assert bench.us(BEHIND, 3, ("skinny_linear", SMALL)) == 7.0 and launches == ["few"] * 5 and rounds == [4]
    assert bench.us(Product("qkv", 48, 64, (), place="normed"), 3, ("bare_linear", EARLY)) == 7.0
    assert launches == ["bare"] * 5


def test_a_launch_takes_the_tiles_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without squares those of the kind that was measured without them."""
    from headway.kernels.mid_linear.hopper import launch

    asked: list[str] = []
    monkeypatch.setattr(launch, "tile_for", lambda kind, *_: asked.append(kind))
    monkeypatch.setattr(launch, "launch", lambda *_, **__: None)
    x, weight, squares = torch.zeros(2, 64), torch.zeros(32, 64), torch.zeros(1, 2)
    for given in (None, squares):
        launch.mid_linear(x, weight, None, given, 0.0)
        launch.mid_gate_up(x, weight, None, given, 0.0)
    assert asked == ["bare_linear", "bare_gate_up", "mid_linear", "mid_gate_up"]
