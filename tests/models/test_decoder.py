"""Every architecture and oddity against transformers, however the sequence is cut into steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.harness import Machine, Row
from tests.models.tiny import LENGTH, TINY, hf_model, ours, pair

# float32 on both sides: differences are orders of summation. Faults show from 1e-2 up (logits have a deviation of 5).
TOLERANCE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}

cases = pytest.mark.parametrize("name", TINY)


@cases
def test_whole_prompt_in_one_step(name: str) -> None:
    case = pair(name)
    logits = Machine(case.model).in_chunks(case.tokens, [LENGTH])
    torch.testing.assert_close(logits, case.logits, **TOLERANCE)


@cases
def test_uneven_chunks(name: str) -> None:
    case = pair(name)
    logits = Machine(case.model).in_chunks(case.tokens, [7, 1, 12, 2, 4])
    torch.testing.assert_close(logits, case.logits, **TOLERANCE)


@cases
def test_token_by_token(name: str) -> None:
    case = pair(name)
    logits = Machine(case.model, block_size=16).in_chunks(case.tokens, [3] + [1] * (LENGTH - 3))
    torch.testing.assert_close(logits, case.logits, **TOLERANCE)


@cases
def test_mixed_batch_with_zombie_and_padding(name: str) -> None:
    """A decode row, a zombie and two prefill rows of one batch keep apart; nobody writes where he must not."""
    case = pair(name)
    tokens, wanted = case.tokens, case.logits
    machine = Machine(case.model)
    machine.step([Row(3, tokens[:10]), Row(0, tokens[:20])])
    owned = {slot: machine.owned(slot) for slot in (0, 2, 3, 4)}
    before = [cache.clone() for cache in machine.cached]

    rows = [
        Row(3, tokens[10:11], 10),
        Row(0, [5], 20, alive=False),
        Row(4, tokens[:9]),
        Row(2, [7, 7, 7], 4, alive=False),
    ]
    decode, _, prefill, _ = machine.step(rows, pad_rows=2, pad_tokens=3)

    torch.testing.assert_close(decode, wanted[10:11], **TOLERANCE)
    torch.testing.assert_close(prefill, wanted[:9], **TOLERANCE)
    for old, new in zip(before, machine.cached, strict=True):
        for slot in (0, 2):
            assert torch.equal(old[owned[slot]], new[owned[slot]]), "a zombie row wrote KV"
        assert not new[0].any(), "the null block was written"
        assert not torch.equal(old[owned[3]], new[owned[3]])


@pytest.mark.parametrize("name", [name for name in TINY if "shared" in name] + ["gemma3", "cohere2"])
def test_last_rows_alone(name: str) -> None:
    """Behind the last layer that caches only the rows' last tokens are computed, each its own, padding and decode rows too."""
    case = pair(name)
    machine = Machine(case.model)
    machine.step([Row(1, case.tokens[:4]), Row(2, case.tokens[:11])])
    rows = [
        Row(2, case.tokens[11:12], 11),
        Row(1, case.tokens[4:20], 4),
        Row(3, case.tokens[:9]),
        Row(0, [7, 7], 3, alive=False),
    ]
    logits = machine.last_step(rows, pad_rows=2, pad_tokens=3)
    torch.testing.assert_close(logits[:3], case.logits[[11, 19, 8]], **TOLERANCE)
    follow = machine.step([Row(1, case.tokens[20:21], 20), Row(3, case.tokens[9:12], 9)])
    torch.testing.assert_close(torch.cat(follow), case.logits[[20, 9, 10, 11]], **TOLERANCE)


def test_rows_do_not_depend_on_their_batch() -> None:
    """The same sequence alone and among others gives the same logits, to float32 rounding."""
    case = pair("qwen3")
    alone = Machine(case.model).in_chunks(case.tokens, [LENGTH])
    machine = Machine(case.model)
    together = machine.step([Row(2, case.tokens[:5]), Row(1, case.tokens), Row(0, case.tokens[3:17])])[1]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_half_precision_stays_close_to_float32(name: str, dtype: torch.dtype) -> None:
    """The same model within the rounding of 16-bit weights and activations, in one step and in many."""
    case = pair(name)
    half = ours(hf_model(TINY[name]), dtype=dtype)
    for sizes in ([LENGTH], [9] + [1] * (LENGTH - 9)):
        logits = Machine(half).in_chunks(case.tokens, sizes)
        error = (logits - case.logits).norm() / case.logits.norm()
        assert 1e-5 < error < 0.05
