"""``dense_attention``: the reference against torch's own attention row by row, the other implementations against the reference.

Tokens of padding hold NaN, and fresh memory is poisoned.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.cpu import encoder_ops
from headway.kernels.dense_attention import dense_attention
from headway.kernels.testing import assert_close, interpreter_loops, kernel_dtypes, make_random

ROWS = [[5], [1, 1, 37, 3], [17, 17, 2, 0, 2], [70, 33]]
OPTIONS: list[dict[str, Any]] = [
    {}, {"reach": 3}, {"bias": True}, {"soft_cap": 4.0}, {"reach": 16, "bias": True, "soft_cap": 3.0}, {"reach": 0},
]  # fmt: skip


def inputs(
    lengths: list[int], heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: str
) -> tuple[Any, ...]:
    """qkv with 3 tokens of padding behind the rows, starts with a row of padding."""
    total = sum(lengths)
    qkv = make_random(total + 3, (heads + 2 * kv_heads) * size, dtype=dtype, device=device)
    qkv[total:] = float("nan")
    starts = torch.tensor([0, *lengths, 0]).cumsum(0).int().to(device)
    return qkv, starts


def bias_table(heads: int, longest: int, device: str) -> torch.Tensor:
    return make_random(heads, 2 * longest - 1, dtype=torch.float32, device=device, seed=3)


def numbers(
    lengths: list[int], heads: int, kv_heads: int, size: int, device: str, *, reach: int = -1, soft_cap: float = 0.0,
    bias: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    table = bias_table(heads, 71, device) if bias else None
    return table, heads, kv_heads, size**-0.5, reach, soft_cap, max(lengths)


def by_row(qkv: torch.Tensor, starts: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    """The formula, in float64."""
    heads, kv_heads, scale, reach, soft_cap, _ = rest
    rows = []
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        x = qkv[start:end].double().unflatten(1, (heads + 2 * kv_heads, -1)).transpose(0, 1)
        q, k, v = x.split([heads, kv_heads, kv_heads])
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
        scores = q @ k.mT * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        for i in range(end - start):
            for j in range(end - start):
                if bias is not None:
                    scores[:, i, j] += bias[:, j - i + bias.shape[1] // 2]
                if reach >= 0 and abs(i - j) > reach:
                    scores[:, i, j] = float("-inf")
        rows.append((F.softmax(scores, -1) @ v).transpose(0, 1).flatten(1))
    return torch.cat(rows).to(qkv.dtype)


@pytest.mark.parametrize("options", OPTIONS)
def test_reference_follows_the_formula(options: dict[str, Any]) -> None:
    lengths = [6, 1, 9]
    qkv, starts = inputs(lengths, 4, 2, 8, torch.float32, "cpu")
    rest = numbers(lengths, 4, 2, 8, "cpu", **options)
    assert_close(dense_attention.reference(qkv, starts, *rest)[:16], by_row(qkv, starts, *rest))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_implementations_equal_the_reference(
    lengths: list[int], options: dict[str, Any], where: str, device: str
) -> None:
    """GQA, an odd head size, runs of equal rows, empty rows, padding."""
    device = "cpu" if where == "cpu" else device
    for dtype in kernel_dtypes() if not options else [torch.float32]:
        qkv, starts = inputs(lengths, 4, 2, 12, dtype, device)
        rest = numbers(lengths, 4, 2, 12, device, **options)
        with interpreter_loops():
            found = dense_attention.implementation(where)(qkv, starts, *rest)
        assert_close(found[: sum(lengths)], dense_attention.reference(qkv, starts, *rest)[: sum(lengths)])


@pytest.mark.parametrize("large", [60.0, -60.0])
def test_large_products_with_a_small_scale(large: float, device: str) -> None:
    """What is subtracted must be the highest score as scaled, or all weights vanish, or grow beyond numbers."""
    qkv, starts = inputs([70, 3], 2, 2, 16, torch.float32, device)
    qkv[:, :32] = large * qkv[:, :32].abs()
    qkv[:, 32:64] = 60.0 * qkv[:, 32:64].abs()
    arguments = (qkv, starts, None, 2, 2, 0.002, -1, 0.0, 70)
    with interpreter_loops():
        found = dense_attention.implementation("cuda")(*arguments)
    torch.testing.assert_close(found[:73], dense_attention.reference(*arguments)[:73], rtol=1e-3, atol=1e-4)


def test_a_row_is_the_same_whoever_shares_its_step(device: str) -> None:
    qkv, _ = inputs([30, 7], 4, 4, 8, torch.float32, device)
    rest = numbers([30, 7], 4, 4, 8, device)
    with interpreter_loops():
        for where in ("cpu", "cuda"):
            run = dense_attention.implementation(where)
            together = run(qkv, torch.tensor([0, 30, 37], dtype=torch.int32, device=device), *rest)
            alone = run(qkv[30:37].clone(), torch.tensor([0, 7], dtype=torch.int32, device=device), *rest)
            assert torch.equal(together[30:37], alone)


@pytest.mark.skipif(not encoder_ops.available(), reason="no C compiler here")
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 3, 16), (4, 2, 32), (2, 1, 64), (1, 1, 112)])
@pytest.mark.parametrize("reach", [-1, 32])
def test_short_rows_have_a_kernel_of_their_own(
    heads: int, kv_heads: int, size: int, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows on both sides of what it takes; a row's bits depend neither on the others nor on the number of threads."""
    monkeypatch.setattr(encoder_ops, "MOST_KEYS", 40)
    lengths = [1, 2, 33, 32, 0, 40, 41, 6, 7, 64]
    for dtype in (torch.float32, torch.bfloat16):
        qkv, starts = inputs(lengths, heads, kv_heads, size, dtype, "cpu")
        assert encoder_ops.serves(qkv, starts, size)
        rest = numbers(lengths, heads, kv_heads, size, "cpu", reach=reach)
        run = dense_attention.implementation("cpu")
        found = run(qkv, starts, *rest)
        assert_close(found[: sum(lengths)], by_row(qkv, starts, *rest))
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for first, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
                only = torch.tensor([0, end - first], dtype=torch.int32)
                if 0 < end - first <= 33:
                    assert torch.equal(run(qkv[first:end].clone(), only, *rest), found[first:end])
        finally:
            torch.set_num_threads(before)


def test_what_the_kernel_of_short_rows_does_not_take() -> None:
    qkv, starts = inputs([3], 2, 2, 144, torch.float32, "cpu")
    assert not encoder_ops.serves(qkv, starts, 144) and not encoder_ops.serves(qkv.half(), starts, 16)
    assert not encoder_ops.serves(qkv, starts.long(), 16)


def test_meta_gives_shapes() -> None:
    qkv, starts = torch.empty(5, 64, device="meta"), torch.empty(3, device="meta", dtype=torch.int32)
    assert dense_attention(qkv, starts, None, 4, 2, 1.0, -1, 0.0, 5).shape == (5, 32)
