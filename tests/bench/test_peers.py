"""Attention beside FlashInfer: what it is told of the pages is what our kernels read."""

from __future__ import annotations

import pytest
import torch

from bench.ops.peers import BLOCK, Case, decode_cases, pages_of, prompt_cases
from headway.kernels.testing import make_paged_inputs


@pytest.mark.parametrize("contexts", [(1, 16, 17, 300), (40,)])
def test_pages_hold_the_keys_of_each_row(contexts: tuple[int, ...]) -> None:
    case = Case((4, 2), 8, tuple((1, context) for context in contexts))
    inputs = make_paged_inputs(
        case.rows, num_decode_rows=len(contexts), heads=case.heads, size=case.size, block_size=BLOCK, dtype=torch.float32,
        device="cpu",
    )  # fmt: skip
    starts, pages, last = (each.tolist() for each in pages_of(case, inputs))
    assert len(starts) == len(contexts) + 1 and starts[-1] == len(pages)
    for row, context in enumerate(contexts):
        mine, slot = pages[starts[row] : starts[row + 1]], int(inputs.row_slots[row])
        assert (len(mine) - 1) * BLOCK + last[row] == context
        assert mine == inputs.block_tables[slot, : len(mine)].tolist()


def test_least_bytes_and_products_of_a_case() -> None:
    case = Case((4, 2), 8, ((1, 10), (3, 10)))
    assert case.bytes == 20 * 2 * 8 * 4 + 4 * 4 * 4 * 8, "keys and values once, queries and results"
    assert case.flops == 4 * 4 * 8 * (10 + 8 + 9 + 10), "a query sees what is before it, and itself"
    assert all(tokens == 1 for each in decode_cases() for tokens, _ in each.rows)
    assert all(tokens <= context for each in prompt_cases() for tokens, context in each.rows)
