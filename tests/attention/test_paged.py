"""``PagedAttention`` against dense attention written from the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headway.attention import paged
from headway.attention.paged import PagedAttention
from headway.state.batch import GroupBatch, StepBatch

H, KH, D, BS, LEN = 6, 2, 12, 8, 21
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [n, heads, D] at positions 0..n-1, as complex numbers: pair (i, i + Drot/2) times cos + i sin."""
    half = cos_sin.shape[1] // 2
    turn = torch.complex(cos_sin[: len(x), :half], cos_sin[: len(x), half:])[:, None]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def dense(
    qkv: torch.Tensor,
    layer: PagedAttention,
    cos_sin: torch.Tensor,
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """[n, H * D] for one whole sequence, one query and head at a time."""
    q, k, v = qkv.view(len(qkv), H + 2 * KH, D).split([H, KH, KH], dim=1)
    q, k = rotated(normed(q, norms[0]), cos_sin), rotated(normed(k, norms[1]), cos_sin)
    out = torch.zeros(len(qkv), H, D)
    for position in range(len(qkv)):
        first = max(0, position - layer.window + 1) if layer.window else 0
        for head in range(H):
            group = head * KH // H
            scores = k[first : position + 1, group] @ q[position, head] * layer.scale
            if layer.soft_cap:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            out[position, head] = scores.softmax(0) @ v[first : position + 1, group]
    return out.flatten(1)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(
    ("window", "soft_cap", "rotary"), [(0, 0.0, D), (5, 0.0, D), (0, 2.0, D), (3, 1.5, 8)], ids=str
)
def test_a_sequence_in_chunks_equals_dense_attention(window: int, soft_cap: float, rotary: int, norm: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(LEN, (H + 2 * KH) * D, generator=generator) * 2
    angles = torch.rand(LEN, rotary // 2, generator=generator) * 2 * math.pi
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    norms = (
        (torch.rand(D, generator=generator) + 0.5, torch.rand(D, generator=generator) + 0.5) if norm else (None, None)
    )
    numbers: dict[str, Any] = {"num_heads": H, "num_kv_heads": KH, "head_dim": D, "window": window}
    layer = PagedAttention(**numbers, scale=0.3, soft_cap=soft_cap)
    sharing = PagedAttention(**numbers, scale=0.5, shares=True)
    other = torch.randn(LEN, H * D, generator=generator)  # that layer's queries
    k_cache, v_cache = (torch.zeros(9, BS, KH, D, device=DEVICE) for _ in range(2))
    blocks = [7, 2, 5]
    on_device = [None if weight is None else weight.to(DEVICE) for weight in norms]

    found, shared, start = [], [], 0
    for size in (6, 1, 1, 13):
        positions = list(range(start, start + size))
        kv_slots = ints([blocks[p // BS] * BS + p % BS for p in positions])
        group = GroupBatch(ints([0, 0, 0, *blocks]).view(2, 3), kv_slots, ints([start + size]))
        batch = StepBatch(
            input_ids=ints([0] * size),
            positions=ints(positions),
            query_start=ints([0, size]),
            seq_lens=ints([start + size]),
            row_slots=ints([1]),
            logit_indices=ints([size - 1]),
            groups=(group,),
            arrivals=ints([0] * KH).view(1, KH),
            num_decode_rows=int(size == 1),
            max_query_len=size,
            max_seq_len_bound=24,
        )
        step, queries = (each[start : start + size].to(DEVICE) for each in (qkv, other))
        found.append(layer(step, batch, (k_cache, v_cache), cos_sin.to(DEVICE), on_device[0], on_device[1], EPS).cpu())
        written = k_cache.clone(), v_cache.clone()
        shared.append(sharing(queries, batch, (k_cache, v_cache), cos_sin.to(DEVICE), on_device[0], None, EPS).cpu())
        assert torch.equal(k_cache, written[0]) and torch.equal(v_cache, written[1])
        start += size

    torch.testing.assert_close(torch.cat(found), dense(qkv, layer, cos_sin, norms), atol=1e-4, rtol=1e-4)
    both = torch.cat([other, qkv[:, H * D :]], dim=1)
    torch.testing.assert_close(torch.cat(shared), dense(both, sharing, cos_sin, norms), atol=1e-4, rtol=1e-4)
    untouched = [block for block in range(9) if block not in blocks]
    assert not k_cache[untouched].any()
    assert not v_cache[untouched].any()


@pytest.mark.parametrize(
    ("tokens", "late", "launches"),
    [
        ([1, 1], False, ["decode_attention"]),
        ([3, 2], False, ["decode_attention"]),
        ([1, 1], True, ["rope_kv_write", "paged_attention"]),
        ([3, 2], True, ["rope_kv_write", "paged_attention"]),
        ([5, 1], False, ["rope_kv_write", "paged_attention"]),
    ],
    ids=str,
)
def test_what_a_layer_that_shares_keys_launches(
    tokens: list[int], late: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operation for rows that go on, also with drafts; two where a row's earlier keys may be of this very step."""
    noted = []
    for name in ("rope_kv_write", "paged_attention", "decode_attention"):
        own = getattr(paged, name)

        def note(*args: object, name: str = name, own: Any = own) -> object:
            noted.append(name)
            return own(*args)

        monkeypatch.setattr(paged, name, note)
    total, lengths = sum(tokens), [9, 7]
    positions = [p for n, length in zip(tokens, lengths, strict=True) for p in range(length - n, length)]
    kv_slots = [8 * block + p % 8 for p, block in zip(positions, [1] * tokens[0] + [2] * tokens[1], strict=True)]
    group = GroupBatch(ints([3, 1, 2, 0]).view(2, 2), ints(kv_slots), ints(lengths))
    batch = StepBatch(
        input_ids=ints([0] * total), positions=ints(positions), query_start=ints([0, tokens[0], total]),
        seq_lens=ints(lengths), row_slots=ints([0, 1]), logit_indices=ints([tokens[0] - 1, total - 1]), groups=(group,),
        arrivals=ints([0] * 4 * KH).view(4, KH), num_decode_rows=2 if total == 2 else 0, max_query_len=max(tokens),
        max_seq_len_bound=16, width=4, reads_this_step=late,
    )  # fmt: skip
    layer = PagedAttention(num_heads=H, num_kv_heads=KH, head_dim=D, scale=0.3, shares=True)
    caches = torch.ones(4, BS, KH, D, device=DEVICE), torch.ones(4, BS, KH, D, device=DEVICE)
    out = layer(
        torch.ones(total, H * D, device=DEVICE), batch, caches, torch.ones(16, D, device=DEVICE), None, None, EPS
    )
    assert noted == launches
    torch.testing.assert_close(out, torch.ones_like(out))
