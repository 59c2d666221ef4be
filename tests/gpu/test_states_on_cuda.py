"""Mamba-2 in bfloat16 on a card: decode steps in each form of their products, which start early beside kernels of states, give
what separate kernels give."""

from __future__ import annotations

import pytest
import torch

from headway.models.layers.forms import Rules
from tests.models.harness import Machine, Row
from tests.models.tiny import ours

pytestmark = pytest.mark.gpu
ROWS = [1, 2, 4, 16, 33]
"""Forms for few tokens, and products that start early."""


@pytest.mark.parametrize("groups", [1, 4])
def test_forms_of_decode_steps(groups: int) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=509, hidden_size=256, num_heads=8, head_dim=64, state_size=128, n_groups=groups, num_hidden_layers=4,
        chunk_size=16, tie_word_embeddings=True,
    )  # fmt: skip
    oracle = transformers.Mamba2ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 509, (ROWS[-1], 12), generator=generator).tolist()
    plain, fused = (Machine(ours(oracle, dtype=torch.bfloat16), num_slots=ROWS[-1] + 1) for _ in range(2))
    plain.model.use_forms(Rules())
    at = [6] * ROWS[-1]
    for machine in (plain, fused):
        for slot, prompt in enumerate(tokens):
            machine.step([Row(slot, prompt[:6])])
    for place, rows in enumerate([*ROWS, 2]):
        step = [Row(slot, tokens[slot][at[slot] :][:1], at[slot]) for slot in range(rows)]
        at = [position + (slot < rows) for slot, position in enumerate(at)]
        wanted, found = (machine.step(step, pad_rows=1, pad_tokens=1) for machine in (plain, fused))
        for mine, theirs in zip(found, wanted, strict=True):
            assert float((mine - theirs).abs().max()) <= 0.04 * float(theirs.abs().max()), f"step {place}, {rows} rows"
