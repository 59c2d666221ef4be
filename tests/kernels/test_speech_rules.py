"""``speech_rules``: what Whisper's own rules forbid, by reference and kernel, beside transformers' processors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.hearing import SpeechRules
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.kernels.speech_rules import speech_rules
from headway.sampling.feature import Tables
from headway.sampling.speech import Speech
from headway.state.slots import SlotArena, core_tables
from tests.kernels.guarded import run_both

VOCAB, FIRST, END, INITIAL, PROMPT = 70, 50, 40, 5, 3
NEVER, NOT_FIRST = [1, 2, 49, 69, 999], [7, END]
T = FIRST
STORIES = [
    [], [T], [T + 4], [T + 4, 9], [T + 4, 9, 11], [T + 4, 9, T + 6], [T + 4, 9, T + 6, T + 6],
    [T + 4, 9, T + 6, T + 6, 5, 6], [9], [9, 8], [T + 4, T + 4], [T, 3, T + 19], [T, 3, T + 2, T + 3, 4, T + 8, T + 9],
]  # fmt: skip


def expected(story: list[int], logits: torch.Tensor, *, timed: bool) -> torch.Tensor:
    """transformers' processors, in the order in which they run there."""
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    tokens = torch.tensor([[0] * PROMPT + story])
    found = logits.clone()[None]
    found = SuppressTokensAtBeginLogitsProcessor(NOT_FIRST, PROMPT)(tokens, found)
    never = [token for token in NEVER if token < VOCAB]
    found = SuppressTokensLogitsProcessor(never)(tokens, found)
    if timed:
        config: Any = SimpleNamespace(
            no_timestamps_token_id=FIRST - 1, eos_token_id=END, bos_token_id=0, max_initial_timestamp_index=INITIAL
        )
        found = WhisperTimeStampLogitsProcessor(config, begin_index=PROMPT)(tokens, found)
    return found[0]


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("lift", [-3.0, 0.0, 3.0])
def test_both_forbid_what_transformers_forbids(timed: bool, lift: float) -> None:
    rows, slots = len(STORIES) + 2, len(STORIES) + 1
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[:, FIRST:] += lift
    history = torch.full((slots, 12), 999, dtype=torch.int32)
    num_tokens = torch.zeros(slots, dtype=torch.int32)
    numbers, ids = torch.zeros(slots, 6, dtype=torch.int32), torch.full((slots, 9), 3, dtype=torch.int32)
    for slot, story in enumerate(STORIES):
        known = [0] * PROMPT + story
        history[slot, : len(known)] = torch.tensor(known)
        num_tokens[slot] = len(known)
        counts = (len(NEVER), len(NEVER) + len(NOT_FIRST))
        numbers[slot] = torch.tensor([1, *counts, FIRST if timed else -1, END, INITIAL])
        ids[slot, : counts[1]] = torch.tensor(NEVER + NOT_FIRST)
    order = torch.tensor([*reversed(range(slots)), -1], dtype=torch.int32)
    prompt_len = torch.full((slots,), PROMPT, dtype=torch.int32)
    args = (logits, order, history, num_tokens, prompt_len, numbers, ids)
    for after, _ in run_both(speech_rules, args):
        for row, slot in enumerate(order.tolist()):
            if 0 <= slot < len(STORIES):
                wanted = expected(STORIES[slot], logits[row], timed=timed)
                assert torch.equal(after[0][row], wanted), (STORIES[slot], row)
            else:
                assert torch.equal(after[0][row], logits[row]), "a row without rules is left alone"


@pytest.mark.parametrize("timed", [True, False])
def test_a_requests_rules_are_staged_as_they_are_read(timed: bool) -> None:
    """From what a request asks for to what is forbidden, in slots that other requests have left."""
    tables = [*core_tables(12, 1, 1), *Speech.tables(VOCAB)]
    arena = SlotArena(tables, len(STORIES), torch.device("cpu"))
    arena.ints.fill_(3)
    feature = Speech(Tables(arena, len(STORIES), VOCAB))
    rules = SpeechRules(
        suppress=NEVER, begin_suppress=NOT_FIRST, first_timestamp=FIRST if timed else -1, end=END, max_initial=INITIAL
    )
    request = AddRequest(
        request_id="a", prompt_token_ids=[0] * PROMPT, params=SamplingParams(), seed=0, eos_token_ids=[], speech=rules
    )
    assert feature.wanted(request)
    for slot, story in enumerate(STORIES):
        for edit in feature.stage(request):
            at = arena.position(edit.table, slot)
            arena.ints[at : at + len(edit.values)] = torch.from_numpy(edit.values)
        known = [0] * PROMPT + story
        arena.view("history")[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
        arena.view("num_tokens")[slot], arena.view("prompt_len")[slot] = len(known), PROMPT
    logits = torch.randn(len(STORIES), VOCAB, generator=torch.Generator().manual_seed(4))
    found = logits.clone()
    feature.apply(found, torch.arange(len(STORIES), dtype=torch.int32))
    for slot, story in enumerate(STORIES):
        assert torch.equal(found[slot], expected(story, logits[slot], timed=timed)), story
