"""The products of 4-bit weights for Hopper, run on the CPU by a model of their language, and on the card."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.expert_mlp import add_experts, tiles
from tests.kernels.gluon_words import on_the_cpu
from tests.kernels.test_expert_mlp import check, inputs


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model of the language is for tensors of a CPU")
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "top_k", "bias", "act", "gated"),
    [
        (1, 5, 192, 64, 4, True, "clamped_swiglu", True),
        (1, 3, 64, 192, 3, False, "silu", True),
        (2, 33, 320, 128, 2, True, "relu2", False),
        (6, 12, 192, 128, 4, True, "clamped_swiglu", True),
        (40, 3, 128, 320, 2, False, "silu", True),
        (90, 3, 64, 64, 1, True, "gelu", False),
        (
            17,
            4,
            704,
            192,
            2,
            True,
            "clamped_swiglu",
            True,
        ),  # more steps than stages, half a step over, half a tile of outputs
        (50, 1, 576, 128, 1, True, "relu2", False),
        (90, 2, 192, 448, 2, True, "silu", True),
    ],
)
def test_kernels_equal_reference(
    monkeypatch: pytest.MonkeyPatch, tokens: int, experts: int, hidden: int, inner: int, top_k: int, bias: bool, act: str,
    gated: bool,
) -> None:  # fmt: skip
    given = inputs(
        tokens,
        experts,
        hidden,
        inner,
        top_k,
        device="cpu",
        dtype=torch.bfloat16,
        act=act,
        gated=gated,
        bias=bias,
        fp4=True,
    )
    for programs in (1, 64):  # few programs share nothing; many share a row's inputs among warps
        monkeypatch.setattr(tiles, "PROGRAMS", programs)
        with on_the_cpu():
            check(given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model of the language is for tensors of a CPU")
def test_few_tokens_add_to_what_there_is() -> None:
    given = inputs(2, 33, 128, 64, 2, device="cpu", dtype=torch.bfloat16, fp4=True, bias=True)
    residual = torch.randn(2, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    found, wanted = residual.clone(), residual.clone()
    with on_the_cpu():
        add_experts.implementation("cuda")(*given, found)
    add_experts.reference(*given, wanted)
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.02)
    assert not torch.equal(found, residual)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 40, 64, 200, 300, 1100])
def test_published_sizes(tokens: int, device: str) -> None:
    check(
        inputs(
            tokens, 32, 2880, 2880, 4, device=device, dtype=torch.bfloat16, act="clamped_swiglu", bias=True, fp4=True
        )
    )
