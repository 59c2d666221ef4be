"""``mla_decode``: the reference against attention written out, the kernel against the reference."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headway.kernels.mla_decode import mla_decode
from headway.kernels.testing import TOLERANCE, assert_close, kernel_dtypes
from tests.kernels.latent_cases import ROWS, SHORT, SIZES, Scene, Sizes, kernel, on, scene, tokens_of

SCALE = 0.3
ANY = 2**31 - 1
DECODE = [(1, 37), (1, 0), (1, 1), (1, 70), (1, 16), (1, 8)]


def arguments(made: Scene, most: int, selected: torch.Tensor | None = None) -> tuple[object, ...]:
    tables = (made.latents, *made.tables, selected, SCALE, most, made.max_query_len, made.bound)
    return (made.q_latent, made.q, *tables)


def chosen(made: Scene, number: int) -> torch.Tensor:
    """int32 [T, number], random positions of each token, rising."""
    generator = torch.Generator().manual_seed(4)
    found = torch.full((len(made.q), number), -1, dtype=torch.int32)
    starts, lens = made.query_start.tolist(), made.seq_lens.tolist()
    for row, length in enumerate(lens):
        for token in range(starts[row], starts[row + 1]):
            sees = length - (starts[row + 1] - token) + 1
            if sees > 0:
                mine = torch.randperm(sees, generator=generator)[:number].sort().values
                found[token, : len(mine)] = mine
    return found.to(made.q.device)


@pytest.mark.parametrize("sparse", [False, True])
def test_reference_equals_attention_written_out(sparse: bool) -> None:
    made, sizes = scene(SIZES[0], "cpu"), SIZES[0]
    selected = chosen(made, 6) if sparse else None
    out = mla_decode.reference(*arguments(made, ANY, selected))
    starts, lens = made.query_start.tolist(), made.seq_lens.tolist()
    for row, length in enumerate(lens):
        keys = made.latents[made.block_tables[made.row_slots[row]].long()].flatten(0, 1)[:length].double()
        for token in range(starts[row], starts[row + 1]):
            if not length:
                assert not out[:, token].any()
                continue
            mine = keys[: length - (starts[row + 1] - token) + 1]
            if selected is not None:
                mine = mine[[p for p in selected[token].tolist() if p >= 0]]
            q = torch.cat([made.q_latent[token], made.q[token, :, sizes.nope :]], dim=1).double()
            weights = torch.softmax(q @ mine.T * SCALE, dim=1)
            assert_close(out[:, token], (weights @ mine[:, : sizes.rank]).float())


@pytest.mark.parametrize(
    ("rows", "sizes", "sms"),
    [("decode", 0, 40), ("decode", 2, 1), ("short", 1, 40), ("any", 0, 1), ("selected", 0, 40), ("selected", 1, 1)],
)
def test_kernel_equals_reference(rows: str, sizes: int, sms: int, device: str) -> None:
    check_kernel(rows, SIZES[sizes], sms, device, kernel_dtypes() if rows == "decode" else [torch.float32])


@pytest.mark.soak
@pytest.mark.parametrize("sms", [1, 40])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", ["decode", "short", "any", "selected"])
def test_kernel_equals_reference_everywhere(rows: str, sizes: Sizes, sms: int, device: str) -> None:
    check_kernel(rows, sizes, sms, device, kernel_dtypes())


def check_kernel(rows: str, sizes: Sizes, sms: int, device: str, dtypes: list[torch.dtype]) -> None:
    """``sms``: with many processors rows are split, and splits weighed."""
    most = SHORT if rows == "short" else ANY
    with (
        patch("headway.kernels.mla_decode.launch.num_sms", lambda device: sms),
        patch("headway.kernels.mla_decode.launch.FEW_SPLIT_TOKENS", 8),
    ):
        for dtype in dtypes:
            made = scene(sizes, device, dtype, DECODE if rows == "decode" else ROWS)
            selected = chosen(made, 20) if rows == "selected" else None
            expected, found = (
                on(each, *arguments(made, most, selected)) for each in (mla_decode.reference, kernel(mla_decode))
            )
            mine = tokens_of(made, lambda count, length: count <= most)
            assert_close(found[:, mine], expected[:, mine])


def test_eight_bits(device: str) -> None:
    made = scene(SIZES[0], device, cached=torch.float8_e4m3fn)
    expected, found = (on(each, *arguments(made, ANY)) for each in (mla_decode.reference, kernel(mla_decode)))
    mine = tokens_of(made, lambda count, length: True)
    assert_close(found[:, mine], expected[:, mine])


def test_bad_ids_read_block_zero_and_unknown_slots_give_zeros(device: str) -> None:
    made = scene(SIZES[0], device, rows=DECODE)
    made.latents[0] = 1.0
    made.block_tables[int(made.row_slots[0]), 1] = 9999
    made.row_slots[3] = 77
    expected, found = (on(each, *arguments(made, ANY)) for each in (mla_decode.reference, kernel(mla_decode)))
    assert_close(found[:, :6], expected[:, :6])
    assert not found[:, 3].any() and not found.isnan()[:, :6].any()


def test_splits_are_weighed_by_their_sums(device: str) -> None:
    """One key that outweighs all others, in the first split and in the last."""
    made = scene(SIZES[0], device, rows=[(1, 70)], pads=(0, 0))
    for place in (0, 69):
        peak = made.block_tables[int(made.row_slots[0]), place // 8].long(), place % 8
        latents = made.latents.clone()
        made.latents[peak] = 0.0
        made.latents[peak][: SIZES[0].rank] = (
            made.q_latent[0, 0] * 9 / math.sqrt(float(made.q_latent[0, 0].square().sum()))
        )
        with (
            patch("headway.kernels.mla_decode.launch.num_sms", lambda device: 40),
            patch("headway.kernels.mla_decode.launch.FEW_SPLIT_TOKENS", 8),
        ):
            found = on(kernel(mla_decode), *arguments(made, ANY))
        torch.testing.assert_close(
            found, mla_decode.reference(*arguments(made, ANY)), atol=TOLERANCE[torch.float32][0], rtol=1e-4
        )
        made.latents.copy_(latents)


def test_splits_of_rows_behind_long_ones(device: str) -> None:
    """Rows that are left out have no splits, so those of a row behind them do not lie where its tokens do."""
    made = scene(SIZES[0], device, rows=[(60, 60), (1, 70), (9, 9), (1, 45)], pads=(0, 0))
    with (
        patch("headway.kernels.mla_decode.launch.num_sms", lambda device: 40),
        patch("headway.kernels.mla_decode.launch.FEW_SPLIT_TOKENS", 8),
    ):
        found = on(kernel(mla_decode), *arguments(made, 1))
    assert_close(found[:, [60, 70]], mla_decode.reference(*arguments(made, 1))[:, [60, 70]])


def test_scratch_memory_is_that_of_short_rows(device: str) -> None:
    """Tokens of long rows, which ``mla_decode`` leaves out, need none, however many they are."""
    made, shapes = scene(SIZES[0], device, rows=[(60, 60), (1, 70)], pads=(0, 0)), list[torch.Size]()
    empty = torch.empty

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = empty(*args, **kwargs)
        shapes.append(found.shape)
        return found

    with (
        patch("headway.kernels.mla_decode.launch.num_sms", lambda device: 40),
        patch("headway.kernels.mla_decode.launch.FEW_SPLIT_TOKENS", 8),
        patch("headway.kernels.mla_decode.launch.torch.empty", recorded),
    ):
        on(kernel(mla_decode), *arguments(made, 1))
    scratch = [shape for shape in shapes if len(shape) == 4]
    assert scratch and all(shape[0] <= 2 for shape in scratch)
