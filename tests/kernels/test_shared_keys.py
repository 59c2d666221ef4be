"""``decode_attention`` of layers whose keys and values another layer has written: queries alone come in, nothing is written."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from headway.kernels.cpu import ops
from headway.kernels.decode_attention import decode_attention
from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.hopper import early_decode
from headway.kernels.paged_attention.hopper.decode_tiles import EarlyTile
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.testing import assert_close, interpreter_loops
from tests.kernels import draft_rows
from tests.kernels.gluon_decode import modelled
from tests.kernels.test_decode_attention import ROWS, check, make

FP8 = torch.float8_e4m3fn
TILES = [EarlyTile(2, 3), EarlyTile(4, 1, 3.0, 8), EarlyTile(4, 2, 0.1)]
SHAPES: list[dict[str, Any]] = [
    {"heads": (8, 1), "size": 256, "dtype": torch.bfloat16, "window": 50},
    {"heads": (6, 2), "size": 64, "dtype": torch.float16, "soft_cap": 0.7, "block_size": 16},
    {"heads": (6, 2), "size": 128, "dtype": torch.bfloat16, "cached": FP8},
    {"heads": (8, 2), "size": 64, "dtype": torch.float16, "sinks": True, "chunk": 48, "norms": False},
]
DRAFTS: list[dict[str, Any]] = [
    {"heads": (4, 2)},
    {"heads": (4, 1), "sinks": True, "window": 30},
    {"heads": (6, 2), "window": 3, "soft_cap": 0.7, "block_size": 16, "dtype": torch.bfloat16},
    {"heads": (8, 2), "cached": FP8, "dtype": torch.bfloat16, "norms": False},
]
"""With 3 and 4 queries a KV head two programs have a row's tokens; both read its newest keys."""
IN_ONE = patch("headway.kernels.decode_attention.triton.rope_kv_write", None)


def tiled(tile: EarlyTile) -> Any:
    return patch.object(early_decode, "early_tile", lambda *_: tile)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_launch_for_hopper(shape: dict[str, Any], tile: EarlyTile) -> None:
    """Projections and the newest keys land with the kernel before: whoever reads them earlier reads NaN."""
    with modelled(), tiled(tile), IN_ONE:
        check(make(ROWS, "cpu", pad_rows=1, shares=True, **shape))


@pytest.mark.parametrize("tile", TILES[:2], ids=str)
@pytest.mark.parametrize("shape", DRAFTS, ids=str)
def test_one_launch_of_rows_with_drafts(shape: dict[str, Any], tile: EarlyTile) -> None:
    with modelled(), tiled(tile), IN_ONE:
        draft_rows.check(draft_rows.make(draft_rows.ROWS, "cpu", shares=True, **shape))


@pytest.mark.parametrize("shape", [{}, {"size": 20, "rotary": 8}, {"slopes": True, "cached": FP8}], ids=str)
def test_two_launches_elsewhere(shape: dict[str, Any], device: str) -> None:
    with interpreter_loops():
        check(make(ROWS, device, shares=True, **shape))
        draft_rows.check(draft_rows.make(draft_rows.ROWS[:4], device, shares=True, **{"size": 16, **shape}))


@pytest.mark.parametrize("width", [1, 4])
def test_a_layer_that_shares_all_is_the_layer(width: int) -> None:
    """With its queries, too: what the first has written is what the second sees."""
    own = make(ROWS, "cpu", window=30) if width == 1 else draft_rows.make(draft_rows.ROWS, "cpu", window=30)
    expected = decode_attention.reference(*own)
    queries = own[9] * own[7].shape[3]
    sharing = [own[0][:, :queries], *own[1:4], None, *own[5:23], True]
    caches = [cache.clone() for cache in sharing[7:9]]
    assert torch.equal(decode_attention.reference(*sharing), expected)
    for cache, before in zip(sharing[7:9], caches, strict=True):
        assert torch.equal(cache.nan_to_num(), before.nan_to_num())


@pytest.mark.skipif(not ops.available(), reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 4])
def test_two_halves_on_a_cpu(width: int, dtype: torch.dtype) -> None:
    """To the bit; in 16-bit floats that C does not know as well."""
    rows = ROWS if width == 1 else draft_rows.ROWS
    maker: Any = make if width == 1 else draft_rows.make
    arguments = maker(rows, "cpu", size=20, dtype=dtype, window=9, shares=True)
    found = decode_attention.implementation("cpu")(*arguments)
    without = [cache[:, :, :0] for cache in arguments[7:9]]
    q = rope_kv_write.implementation("cpu")(*arguments[:7], *without, arguments[9])
    halves = paged_attention.implementation("cpu")(
        q, *arguments[7:9], *arguments[10:18], len(q) if width == 1 else 0, width, arguments[18]
    )
    assert torch.equal(found, halves)
    assert_close(found, decode_attention.reference(*arguments))


def test_keys_without_a_place_are_read_nowhere() -> None:
    """A slot outside the cache is not an address."""
    arguments = make([33, 12], "cpu", shares=True, **SHAPES[1])
    arguments[6][0], arguments[6][1] = -1, arguments[7].shape[0] * arguments[7].shape[1]
    with modelled():
        assert decode_attention.implementation("cuda")(*arguments).isfinite().all()


def test_meta_gives_shapes() -> None:
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in make([4, 9], "cpu", shares=True)]
    assert decode_attention(*meta).shape == (2, 6, 16)
