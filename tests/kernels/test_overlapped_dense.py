"""Attention over whole rows in Gluon: its code on the machine of ``gluon_warps``, where it serves, and on Hopper the kernel."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from headway.core.ints import cdiv
from headway.kernels.dense_attention import dense_attention
from headway.kernels.dense_attention import triton as plain
from headway.kernels.hopper import runs_gluon
from headway.kernels.testing import assert_close, make_random

SIZE = 64
CASES = [([1, 63, 130, 0, 257, 64], 4, 2), ([510], 2, 2), ([65, 127, 128, 2], 2, 1)]
"""(lengths of rows, heads, KV heads)."""


def inputs(
    lengths: list[int], heads: int, kv_heads: int, device: str, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, keys and values, with padding that is no number, and where rows begin, a row of padding behind them."""
    qkv = make_random(sum(lengths) + 40, (heads + 2 * kv_heads) * SIZE, dtype=dtype, device=device)
    qkv[sum(lengths) :] = torch.nan
    return qkv, torch.tensor([0, *lengths, 0]).cumsum(0).int().to(device)


def wanted(qkv: torch.Tensor, starts: torch.Tensor, heads: int, kv_heads: int, longest: int) -> torch.Tensor:
    tokens = int(starts[-1])
    return dense_attention.reference(qkv[:tokens], starts, None, heads, kv_heads, SIZE**-0.5, -1, 0.0, longest)


def run_on_machine(qkv: torch.Tensor, starts: torch.Tensor, heads: int, kv_heads: int, longest: int) -> torch.Tensor:
    """What the kernel writes, one program after the other."""
    from headway.kernels.dense_attention.hopper import triton
    from tests.kernels.gluon_pointer import Pointer
    from tests.kernels.gluon_warps import Descriptor, Machine

    out = torch.full((len(qkv), heads * SIZE), torch.nan, dtype=qkv.dtype)
    arguments = (Descriptor(qkv, (64, SIZE)), Pointer(starts), Pointer(out.view(-1)), len(qkv), SIZE**-0.5)
    for place in product(range(cdiv(longest, 64)), range(heads), range(len(starts) - 1)):
        machine = Machine(triton, place, 1, sum(place))
        machine.specialize([(machine.names["overlapped_dense_kernel"], (*arguments, heads, kv_heads))], [], [])
    return out


@pytest.mark.parametrize(("lengths", "heads", "kv_heads"), CASES)
def test_equals_reference_on_the_machine(lengths: list[int], heads: int, kv_heads: int) -> None:
    pytest.importorskip("triton.experimental.gluon", reason="the kernel's module imports Gluon")
    qkv, starts = inputs(lengths, heads, kv_heads, "cpu")
    found = run_on_machine(qkv, starts, heads, kv_heads, max(lengths))
    assert_close(found[: sum(lengths)], wanted(qkv, starts, heads, kv_heads, max(lengths)))
    assert bool(found[sum(lengths) :].isnan().all())


def test_serves_heads_of_64_that_see_whole_rows_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from headway.kernels.dense_attention.hopper import launch

    ran: list[str] = []
    monkeypatch.setattr(plain, "runs_gluon", lambda device: True)
    monkeypatch.setattr(launch, "launch_overlapped", lambda *_: ran.append("overlapped"))

    class Plain:
        def __getitem__(self, grid: object) -> Any:
            return lambda *_, **__: ran.append("plain")

    monkeypatch.setattr(plain, "dense_kernel", Plain())
    bias = torch.zeros(2, 1023)
    whole = (-1, 0.0, 128)
    cases: list[tuple[torch.dtype, int, int, torch.Tensor | None, tuple[int, float, int], str]] = [
        (torch.bfloat16, 64, 0, None, whole, "overlapped"),
        (torch.float16, 64, 0, None, (-1, 0.0, 65), "overlapped"),
        (torch.float16, 64, 0, None, (-1, 0.0, 64), "plain"),
        (torch.float32, 64, 0, None, whole, "plain"),
        (torch.bfloat16, 128, 0, None, whole, "plain"),
        (torch.bfloat16, 64, 0, bias, whole, "plain"),
        (torch.bfloat16, 64, 0, None, (128, 0.0, 128), "plain"),
        (torch.bfloat16, 64, 0, None, (-1, 30.0, 128), "plain"),
        (torch.bfloat16, 64, 4, None, whole, "plain"),  # rows that no copy may begin at
    ]
    for dtype, size, apart, table, (reach, soft_cap, longest), expected in cases:
        width = 6 * size
        qkv = torch.zeros(130, width + apart, dtype=dtype)[:, :width]
        starts = torch.tensor([0, 130], dtype=torch.int32)
        dense_attention.implementation("cuda")(qkv, starts, table, 2, 2, 0.125, reach, soft_cap, longest)
        assert ran.pop() == expected and not ran


@pytest.fixture
def hopper() -> str:
    if not torch.cuda.is_available() or not runs_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper's warpgroup products")
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads"), [*CASES, ([509, 300, 1, 1023], 12, 12)])
def test_equals_reference(lengths: list[int], heads: int, kv_heads: int, dtype: torch.dtype, hopper: str) -> None:
    """Within rounding; nothing on padding is written; a row's bits are the same whoever is beside it."""
    from headway.kernels.dense_attention.hopper.launch import launch_overlapped

    qkv, starts = inputs(lengths, heads, kv_heads, hopper, dtype)
    tokens, longest = sum(lengths), max(lengths)
    numbers = (heads, kv_heads, SIZE**-0.5)
    op = dense_attention(qkv, starts, None, *numbers, -1, 0.0, longest)
    assert_close(op[:tokens], wanted(qkv, starts, heads, kv_heads, longest))
    for _ in range(20):
        out = torch.full((len(qkv), heads * SIZE), torch.nan, dtype=dtype, device=hopper)
        launch_overlapped(qkv, starts, out, *numbers, longest)
        assert torch.equal(out[:tokens], op[:tokens]), "a moving result would be a race"
        assert bool(out[tokens:].isnan().all())
    last = lengths[-1]
    alone = dense_attention(
        qkv[tokens - last : tokens].clone(), starts.new_tensor([0, last]), None, *numbers, -1, 0.0, longest
    )
    assert torch.equal(alone, op[tokens - last : tokens])


@pytest.mark.gpu
def test_a_graph_replays_it_for_other_rows(hopper: str) -> None:
    """Tokens, starts and padding are read when the graph runs."""
    heads, longest = 4, 300
    qkv, starts = inputs([300, 77], heads, heads, hopper, torch.bfloat16)
    numbers = (heads, heads, SIZE**-0.5, -1, 0.0, longest)
    dense_attention(qkv, starts, None, *numbers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dense_attention(qkv, starts, None, *numbers)
    for lengths in ([130, 65, 0], [1, 1, 299], [64, 63, 129]):
        tokens = sum(lengths)
        qkv.copy_(make_random(*qkv.shape, dtype=qkv.dtype, device=hopper, seed=tokens))
        qkv[tokens:] = torch.nan
        starts.copy_(torch.tensor([0, *lengths]).cumsum(0).int())
        graph.replay()
        assert_close(out[:tokens], wanted(qkv, starts, heads, heads, longest))
