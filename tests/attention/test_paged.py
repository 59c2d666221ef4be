"""``PagedAttention`` against dense attention written from the definition."""

from __future__ import annotations

import math

import pytest
import torch

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
    layer = PagedAttention(num_heads=H, num_kv_heads=KH, head_dim=D, scale=0.3, window=window, soft_cap=soft_cap)
    k_cache, v_cache = (torch.zeros(9, BS, KH, D, device=DEVICE) for _ in range(2))
    blocks = [7, 2, 5]
    on_device = [None if weight is None else weight.to(DEVICE) for weight in norms]

    found, start = [], 0
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
        step = qkv[start : start + size].to(DEVICE)
        found.append(layer(step, batch, (k_cache, v_cache), cos_sin.to(DEVICE), on_device[0], on_device[1], EPS).cpu())
        start += size

    torch.testing.assert_close(torch.cat(found), dense(qkv, layer, cos_sin, norms), atol=1e-4, rtol=1e-4)
    untouched = [block for block in range(9) if block not in blocks]
    assert not k_cache[untouched].any()
    assert not v_cache[untouched].any()
