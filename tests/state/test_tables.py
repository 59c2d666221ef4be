"""What a request stages fits its slot's tables, to the last entry, or it is refused: nothing spills into a neighbour's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.core.errors import InvalidRequestError
from headway.core.hearing import MAX_SUPPRESSED, SpeechRules
from headway.core.messages import AddRequest
from headway.core.params import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, SamplingParams
from headway.runner.admission import MAX_STOP_IDS
from headway.sampling.bad_words import MAX_PHRASE_TOKENS, MAX_PHRASES
from headway.sampling.sampler import Sampler, sampler_tables
from headway.sampling.speech import Speech
from headway.state.slots import SlotArena, core_tables

VOCAB = 2500


def staged(params: dict[str, Any], **fields: Any) -> dict[str, int]:
    """Table -> how many of its entries are written, of those that there are at most as many of."""
    tables = [*core_tables(64, 4, MAX_STOP_IDS), *sampler_tables(VOCAB), *Speech.tables(VOCAB)]
    arena = SlotArena(tables, 2, torch.device("cpu"))
    request = AddRequest(
        request_id="a", prompt_token_ids=[1], params=SamplingParams(**params), seed=0, eos_token_ids=[], **fields
    )
    edits = Sampler(arena, VOCAB).stage(request)
    assert all(len(edit.values) <= arena.stride(edit.table) for edit in edits)
    return {edit.table: len(edit.values) for edit in edits}


def phrases(number: int, tokens: int) -> dict[str, Any]:
    """So many, of so many tokens in all."""
    each, more = divmod(tokens, number)
    return {"bad_words_token_ids": [[7] * (each + (nth < more)) for nth in range(number)]}


LARGEST: list[tuple[dict[str, Any], dict[str, Any], str, int]] = [
    ({}, phrases(MAX_PHRASES, MAX_PHRASES), "bw_offsets", MAX_PHRASES + 1),
    ({}, phrases(MAX_PHRASES, MAX_PHRASE_TOKENS), "bw_tokens", MAX_PHRASE_TOKENS),
    ({}, phrases(1, MAX_PHRASE_TOKENS), "bw_tokens", MAX_PHRASE_TOKENS),
    (
        {},
        {"speech": SpeechRules(suppress=[1] * (MAX_SUPPRESSED - 1), begin_suppress=[2])},
        "speech_ids",
        MAX_SUPPRESSED,
    ),
    ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)}, {}, "bias_ids", MAX_LOGIT_BIAS),
    ({"logprob_token_ids": list(range(MAX_LOGPROB_TOKEN_IDS))}, {}, "lp_ids", MAX_LOGPROB_TOKEN_IDS),
    ({"allowed_token_ids": [0, VOCAB - 1]}, {}, "allowed_bits", -(-VOCAB // 32)),
]
TOO_LARGE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, phrases(MAX_PHRASES + 1, MAX_PHRASES + 1)),
    ({}, phrases(MAX_PHRASES, MAX_PHRASE_TOKENS + 1)),
    ({}, phrases(1, MAX_PHRASE_TOKENS + 1)),
    ({}, {"speech": SpeechRules(suppress=[1] * MAX_SUPPRESSED, begin_suppress=[2])}),
    ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)}, {}),
    ({"logprob_token_ids": list(range(MAX_LOGPROB_TOKEN_IDS + 1))}, {}),
]


@pytest.mark.parametrize("case", LARGEST, ids=lambda case: case[2])
def test_the_largest_that_fits(case: tuple[dict[str, Any], dict[str, Any], str, int]) -> None:
    params, fields, table, entries = case
    assert staged(params, **fields)[table] == entries


@pytest.mark.parametrize("case", TOO_LARGE)
def test_one_more_is_refused(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequestError):
        staged(case[0], **case[1])
