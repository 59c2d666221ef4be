"""Rows of several tokens, drafts for one, through the kernels of decode rows for all devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headway.kernels.decode_attention import decode_attention
from headway.kernels.paged_attention import launch
from headway.kernels.testing import interpreter_loops, kernel_dtypes
from tests.kernels.draft_rows import ROWS, check, make

SHAPES: list[dict[str, Any]] = [
    {"heads": (4, 2), "size": 16},
    {"heads": (6, 2), "size": 32, "rotary": 16},
    {"heads": (4, 1), "size": 20, "norms": False},
    {"heads": (2, 2), "size": 16, "window": 30},
    {"heads": (4, 2), "size": 16, "window": 3, "soft_cap": 0.7, "block_size": 16},
    {"heads": (4, 2), "size": 16, "chunk": 48, "sinks": True},
    {"heads": (6, 2), "size": 16, "slopes": True, "sinks": True},
    {"heads": (8, 2), "size": 256, "rotary": 64},
    {"heads": (4, 2), "size": 256, "window": 30},
]
decodes_alone = patch.object(launch, "launch_prefill", None)


@pytest.fixture(autouse=True)
def loops() -> Iterator[None]:
    with interpreter_loops():
        yield


def often(cases: list[Any], count: int) -> list[Any]:
    """The first ``count`` in every run, the others with the long sweeps."""
    return [*cases[:count], *(pytest.param(each, marks=pytest.mark.soak) for each in cases[count:])]


@decodes_alone
@pytest.mark.parametrize("dtype", often(kernel_dtypes(), 1))
@pytest.mark.parametrize("shape", often(SHAPES, 3), ids=str)
def test_kernel_equals_reference(shape: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    check(make(ROWS, device, dtype=dtype, **shape))


@decodes_alone
@pytest.mark.parametrize("case", often([(3, (10, 2)), (8, (4, 2)), (2, (6, 2)), (5, (4, 2)), (16, (2, 2))], 2), ids=str)
def test_widths(case: tuple[int, tuple[int, int]], device: str) -> None:
    width, heads = case
    rows = [(min(count, width), context) for count, context in ROWS] + [(width, 90), (width, width)]
    check(make(rows, device, width=width, heads=heads, size=16, dtype=torch.float32))


@decodes_alone
@pytest.mark.parametrize("sinks", often([True, False], 1))
def test_many_splits(sinks: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split each tile; tokens stand on both sides of an edge between two."""
    monkeypatch.setattr("headway.kernels.paged_attention.launch.num_sms", lambda device: 132)
    rows = [(4, 1026), (3, 257), (4, 66), (2, 2)]
    check(make(rows, device, heads=(4, 2), size=16, dtype=torch.float32, bound=1100, sinks=sinks))


def test_wide_groups_go_where_prompts_go(device: str) -> None:
    """64 queries a KV head, of which the kernel's registers could not hold the sums."""
    with patch.object(launch, "launch_few", None):
        check(make([(4, 70), (3, 9)], device, heads=(16, 1), size=16, dtype=torch.float32))


def test_meta_gives_shapes(device: str) -> None:
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in make(ROWS, device)]
    assert decode_attention(*meta).shape == (36, 4, 64)
