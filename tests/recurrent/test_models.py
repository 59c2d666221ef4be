"""Every model with states against transformers, however the sequence is cut into steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.harness import Machine, Row
from tests.recurrent.tiny_hybrids import HYBRIDS, LENGTH, pair

# float32 on both sides: differences are orders of summation. Logits have a deviation of 1 to 5.
TOLERANCE: dict[str, Any] = {"atol": 5e-4, "rtol": 2e-4}

cases = pytest.mark.parametrize("name", HYBRIDS)


@cases
@pytest.mark.parametrize(
    "sizes", [[LENGTH], [7, 1, 12, 2, 1, 3, 44], [2] + [1] * (LENGTH - 2)], ids=["whole", "odd", "single"]
)
def test_logits(name: str, sizes: list[int]) -> None:
    case = pair(name)
    logits = Machine(case.model).in_chunks(case.tokens, sizes)
    torch.testing.assert_close(logits, case.logits, **TOLERANCE)


@cases
def test_mixed_batch_with_zombie_and_padding(name: str) -> None:
    """A decode row, a zombie and two prefill rows of one batch keep apart; nobody writes a state that is not his."""
    case = pair(name)
    tokens, wanted = case.tokens, case.logits
    machine = Machine(case.model)
    machine.step([Row(3, tokens[:10]), Row(0, tokens[:20])])
    before = [state.clone() for state in machine.states]
    rows = [
        Row(3, tokens[10:11], 10),
        Row(0, [5], 20, alive=False),
        Row(4, tokens[:9]),
        Row(2, [7, 7, 7], 4, alive=False),
    ]
    decode, _, prefill, _ = machine.step(rows, pad_rows=2, pad_tokens=3)
    torch.testing.assert_close(decode, wanted[10:11], **TOLERANCE)
    torch.testing.assert_close(prefill, wanted[:9], **TOLERANCE)
    for old, new in zip(before, machine.states, strict=True):
        for slot in (0, 1, 2):
            torch.testing.assert_close(old[slot], new[slot], rtol=0, atol=0, equal_nan=True)
        assert not torch.equal(old[3], new[3])


@cases
def test_last_tokens_alone(name: str) -> None:
    case = pair(name)
    machine = Machine(case.model)
    machine.step([Row(1, case.tokens[:4])])
    logits = machine.last_step([Row(1, case.tokens[4:20], 4), Row(3, case.tokens[:9])], pad_rows=1, pad_tokens=2)
    torch.testing.assert_close(logits, case.logits[[19, 8]], **TOLERANCE)
