"""``span_attention``: the kernel and the reference against the definition, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.kernels.paged_attention import paged_attention
from headway.kernels.span_attention import span_attention
from headway.kernels.testing import assert_close, interpreter_loops, kernel_dtypes, make_random


def attention_inputs(dtype: torch.dtype, heads: int, kv_heads: int, size: int, device: str) -> dict[str, Any]:
    """Rows: a decode row, a prompt with a span in a later chunk, padding, one whose end lies behind its tokens."""
    lengths, contexts, slots = [1, 37, 0, 20], [50, 61, 0, 20], [2, 0, -1, 1]
    total = sum(lengths) + 2
    blocks = 8 * 3 + 1
    caches = [make_random(blocks, 8, kv_heads, size, dtype=dtype, device=device, seed=s) for s in (1, 2)]
    tables = torch.arange(1, 25, dtype=torch.int32).view(3, 8)[:, torch.randperm(8)].contiguous()
    ends = torch.zeros(total, dtype=torch.int32)
    ends[1 + 3 : 1 + 20] = 24 + 20  # positions 27 to 43 see up to 44
    ends[38 : 38 + 20] = 99  # beyond the row
    return {
        "q": make_random(total, heads, size, dtype=dtype, device=device, seed=3),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": tables.to(device),
        "row_slots": torch.tensor(slots, dtype=torch.int32, device=device),
        "query_start": torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        "seq_lens": torch.tensor(contexts, dtype=torch.int32, device=device),
        "ends": ends.to(device),
    }


def by_definition(given: dict[str, Any], window: int, soft_cap: float) -> torch.Tensor:
    """In float64, a token and a head at a time."""
    q, out = given["q"].double().cpu(), torch.zeros_like(given["q"], dtype=torch.float64).cpu()
    starts, slots = given["query_start"].tolist(), given["row_slots"].tolist()
    for row, length in enumerate(given["seq_lens"].tolist()):
        if slots[row] < 0:
            continue
        blocks = given["block_tables"][slots[row]].long()
        k, v = (given[name][blocks].flatten(0, 1)[:length].double().cpu() for name in ("k_cache", "v_cache"))
        group = q.shape[1] // k.shape[1]
        count = starts[row + 1] - starts[row]
        for i in range(count):
            token, position = starts[row] + i, length - count + i
            last = min(max(int(given["ends"][token]), position + 1), length)
            first = max(position - window + 1, 0) if window else 0
            for head in range(q.shape[1]):
                scores = k[first:last, head // group] @ q[token, head] * 0.3
                scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
                out[token, head] = scores.softmax(0) @ v[first:last, head // group]
    return out


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (6, 1, 24), (3, 3, 72)])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (9, 0.0), (0, 4.0)])
def test_spans(
    heads: int, kv_heads: int, size: int, window: int, soft_cap: float, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    given = attention_inputs(dtype, heads, kv_heads, size, device)
    expected = by_definition(given, window, soft_cap).to(device)
    args = (*given.values(), 0.3, window, soft_cap, 37, 61)
    assert_close(span_attention.reference(*args), expected.to(dtype))
    with interpreter_loops():
        assert_close(span_attention.implementation("cuda")(*args), expected.to(dtype))


def test_without_ends_it_is_causal_attention(device: str) -> None:
    torch.manual_seed(0)
    given = attention_inputs(torch.float32, 4, 2, 16, device)
    given["ends"] = torch.zeros_like(given["ends"])
    found = span_attention.reference(*given.values(), 0.3, 5, 0.0, 37, 61)
    given.pop("ends")
    arrivals = torch.zeros(4, 2, dtype=torch.int32, device=device)
    causal = paged_attention.reference(*given.values(), arrivals, 0.3, 5, 0.0, 0, 37, 61)
    assert_close(found, causal)


def test_meta_gives_shapes() -> None:
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    q, cache = torch.empty(7, 4, 8, device="meta"), torch.empty(3, 8, 2, 8, device="meta")
    read = (ints(5, 2), ints(3), ints(4), ints(3), ints(7))
    assert span_attention(q, cache, cache, *read, 1.0, 0, 0.0, 5, 9).shape == q.shape
