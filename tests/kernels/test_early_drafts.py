"""Rows of several tokens in the decode attention kernel for Hopper, run on the CPU by a model of its language."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from headway.kernels.decode_attention import decode_attention
from headway.kernels.paged_attention import launch, paged_attention
from headway.kernels.paged_attention.hopper import early_decode
from headway.kernels.paged_attention.hopper.decode_tiles import EarlyTile
from headway.kernels.paged_attention.hopper.early_decode import serves, shares_of
from headway.kernels.testing import assert_close, make_paged_inputs
from tests.kernels.draft_rows import ROWS, check, make
from tests.kernels.gluon_decode import modelled
from tests.kernels.pairs import pairs

TILES = [EarlyTile(4, 1), EarlyTile(2, 3), EarlyTile(8, 1, 0.2), EarlyTile(2, 1, 3.0, 4)]
SHAPES: list[dict[str, Any]] = [
    {"heads": (4, 2)},
    {"heads": (6, 2), "dtype": torch.bfloat16},
    {"heads": (4, 1), "size": 128, "norms": False},
    {"heads": (2, 2), "window": 30},
    {"heads": (4, 2), "window": 3, "soft_cap": 0.7, "block_size": 16},
    {"heads": (2, 2), "chunk": 48, "sinks": True},
    {"heads": (4, 1), "sinks": True},
    {"heads": (4, 2), "cached": torch.float8_e4m3fn, "dtype": torch.bfloat16},
    {"heads": (8, 2), "cached": torch.float8_e4m3fn, "window": 40},
]


def tiled(tile: EarlyTile) -> Any:
    return patch.object(early_decode, "early_tile", lambda *_: tile)


@pytest.mark.parametrize(("shape", "tile"), pairs(SHAPES, TILES, 2))
def test_kernel_equals_reference(shape: dict[str, Any], tile: EarlyTile) -> None:
    with modelled(), tiled(tile):
        check(make(ROWS, "cpu", **shape))


@pytest.mark.parametrize(
    ("width", "heads"), [(2, (4, 2)), (3, (4, 2)), (5, (4, 2)), (8, (2, 2)), (2, (16, 2)), (2, (6, 1))]
)
def test_widths(width: int, heads: tuple[int, int]) -> None:
    rows = [(min(count, width), context) for count, context in ROWS] + [(width, 90), (width, width)]
    for seed in range(2):
        with modelled(seed):
            check(make(rows, "cpu", width=width, heads=heads))


@pytest.mark.parametrize(("shape", "tile"), pairs(SHAPES[:6:2] + SHAPES[7:], TILES, 2))
def test_queries_that_are_turned(shape: dict[str, Any], tile: EarlyTile) -> None:
    """``paged_attention`` of such rows, whose keys are all cached."""
    shape = {"size": 64, "dtype": torch.float16, **shape}
    rule = {name: shape.pop(name, 0) for name in ("window", "soft_cap", "chunk")}
    shape = {name: value for name, value in shape.items() if name not in ("norms", "sinks")}
    inputs = make_paged_inputs(
        ROWS, num_decode_rows=0, device="cpu", heads_first=True, pad_rows=1, pad_tokens=9, bound=200,
        **{"block_size": 8, **shape},
    )  # fmt: skip
    arguments: list[Any] = list(inputs.arguments(0.1, rule["window"], rule["soft_cap"], rule["chunk"]))
    arguments[7] = torch.zeros(len(inputs.q), inputs.k_cache.shape[2], dtype=torch.int32)
    arguments += [False, 4]
    poison = patch.object(torch, "empty", lambda size, **kind: torch.full(size, float("nan"), **kind))
    with modelled(), tiled(tile), poison, patch.object(launch, "launch_prefill", None):
        found = paged_attention.implementation("cuda")(*arguments)
    assert_close(found, paged_attention.reference(*arguments))
    assert not arguments[7].any()


def test_one_token_of_rows_with_room_for_more_is_what_it_is_alone() -> None:
    """But for the order in which torch adds the parts up here."""
    contexts = [70, 4, 33, 131, 64]
    with modelled(), tiled(EarlyTile(4, 1)):
        alone = make([(1, context) for context in contexts], "cpu", width=1, pad_rows=0)
        expected = decode_attention.implementation("cuda")(*alone)
        wide = make([(1, context) for context in contexts], "cpu", width=4, pad_rows=0)
        wide[0][:5] = alone[0]
        found = decode_attention.implementation("cuda")(*wide)
    assert_close(found[:5], expected)
    assert (found[:5] == expected).float().mean() > 0.99 and not found[5:].any()


def test_keys_without_a_place_are_written_nowhere() -> None:
    arguments = make([(4, 40), (2, 12)], "cpu", pad_rows=0)
    arguments[6][1], arguments[6][4] = -1, arguments[7].shape[0] * arguments[7].shape[1]
    before = arguments[7].clone()
    with modelled():
        decode_attention.implementation("cuda")(*arguments)
    changed = (arguments[7].nan_to_num(3.0) != before.nan_to_num(3.0)).flatten(2).any(2)
    assert int(changed.sum()) == 4


def test_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_decode, "runs_gluon", lambda device: True)
    kinds = torch.bfloat16, torch.bfloat16, torch.device("cpu")
    assert [shares_of(4, group) for group in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 4]
    assert serves(128, 2, *kinds, width=4) and serves(64, 4, *kinds, width=4) and serves(128, 8, *kinds, width=2)
    assert not serves(128, 8, *kinds, width=4) and not serves(128, 1, *kinds, width=9)
