"""Steps of many tokens, whose matrix products add to the residual, give what the separate kernels give."""

from __future__ import annotations

import pytest
import torch

import headway.kernels.linear
from headway.models.layers.many_tokens import ManyTokens
from tests.models.harness import Machine, Row
from tests.models.tiny import TINY, hf_model, ours

TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_equals_separate_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of many tokens, the rest of the prompt with another, and a step below the threshold."""
    monkeypatch.setattr(headway.kernels.linear, "_can_pack", lambda *_: False)  # as on a GPU
    monkeypatch.setattr("headway.models.decoder.MANY_TOKENS", 14)
    used = 0
    inner = ManyTokens.forward

    def counted(self: ManyTokens, residual: torch.Tensor, *rest: torch.Tensor) -> None:
        nonlocal used
        used += 1
        inner(self, residual, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ManyTokens, "forward", counted)
    oracle = hf_model(TINY[name])
    plain, many = Machine(ours(oracle)), Machine(ours(oracle))
    many.model.fuse(lambda *_: 0)
    steps = [
        [Row(1, TOKENS[:15])],
        [Row(1, TOKENS[15:20], 15), Row(2, [5], 3, alive=False), Row(0, TOKENS[:9])],
        [Row(1, TOKENS[20:25], 20)],
    ]
    for step in steps:
        for wanted, found in zip(plain.step(step), many.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    assert used == 2 * many.model.config.num_layers  # and none by the model that was not fused
