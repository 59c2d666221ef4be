"""What an admission writes is what it said it would take: the planner fills steps by that, and staging buffers are as long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.api.structured.compile import Task, compile_task
from headway.core.automaton import MAX_TABLE_INTS, Vocabulary
from headway.core.encode import MediaRun
from headway.core.media import MAX_RUNS
from headway.core.messages import AddRequest
from headway.core.params import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, MAX_STOP_TOKEN_IDS, SamplingParams
from headway.core.plan import Admission, StepPlan
from headway.runner.admission import MAX_EOS_IDS, MAX_STOP_IDS, AdmissionWriter, max_upload_ints
from headway.sampling.bad_words import MAX_PHRASE_TOKENS, MAX_PHRASES
from headway.sampling.sampler import Sampler, sampler_tables
from headway.state.media import MEDIA_ROWS, media_tables
from headway.state.packed_step import ROW_INTS, ROWS_AT, PackedRows, PackedStep, segment_ints
from headway.state.slots import SlotArena, core_tables

VOCAB, SLOT = 200, 1


def runs(number: int) -> list[MediaRun]:
    return [MediaRun(item=each, first=0, start=2 * each, end=2 * each + 1) for each in range(number)]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "penalties and a seed": ({"presence_penalty": 1.0, "repetition_penalty": 1.5, "seed": 7, "min_tokens": 2}, {}),
    "stop tokens": ({"stop_token_ids": list(range(60))}, {"eos_token_ids": [1, 2]}),
    "biases": ({"logit_bias": {3: 1.0, 4: -1.0}}, {}),
    "allowed": ({"allowed_token_ids": [5, 6]}, {}),
    "phrases": ({}, {"bad_words_token_ids": [[1, 2, 3], [4]]}),
    "named log-probabilities": ({"logprob_token_ids": [9, 8, 7]}, {}),
    "a table": ({}, {"automaton": compile_task(Task("regex", "(ab|cd)+[0-9]{3}", bytes(range(256)))).automaton}),
    "a grammar on the host": ({}, {"host_grammar": "g"}),
    "a picture": ({}, {"runs": runs(1)}),
    "pictures": ({"logit_bias": {3: 1.0}}, {"runs": runs(40)}),
    "as many as there can be": ({}, {"runs": runs(MAX_RUNS), "host_grammar": "g"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("generated", [0, 5])
def test_it_takes_no_more_than_it_said(name: str, generated: int) -> None:
    params, fields = CASES[name]
    tables = [*core_tables(3000, 4, MAX_STOP_IDS), *sampler_tables(VOCAB), *media_tables()]
    arena = SlotArena(tables, 3, torch.device("cpu"))
    sampler = Sampler(arena, VOCAB)
    sampler.grammar.learn(Vocabulary.of(bytes([each]) for each in range(VOCAB)))
    writer = AdmissionWriter(arena, sampler)
    tokens = np.full(2 * MAX_RUNS, ord("a"), np.int32)
    prompt = tokens[: len(tokens) - generated].tolist()
    asked = SamplingParams(max_tokens=9, **params)
    request = AddRequest(
        request_id="a", prompt_token_ids=prompt, params=asked, seed=0, **({"eos_token_ids": []} | fields)
    )
    said = writer.prepare(request)
    one = np.array([SLOT], np.int32)
    plan = StepPlan(0, one, np.array([len(tokens)], np.int32), 0 * one, np.array([True]), 0)
    packed = PackedStep(np.zeros(400_000, np.int32), PackedRows(plan), 0)
    writer.write(packed, Admission(SLOT, request, tokens, 0))
    if request.runs:  # the first rows of the cache are told with the step
        rows = np.arange(len(request.runs), dtype=np.int32)
        packed.scatter(arena.position(MEDIA_ROWS, SLOT) + rows, rows)
    if request.host_grammar is not None:
        packed.write(arena.position("allowed_bits", SLOT), np.zeros(arena.stride("allowed_bits"), np.int32))
    taken = packed.finish() - ROWS_AT - ROW_INTS - segment_ints(len(tokens))
    assert taken <= said and (generated or taken == said)


def test_no_admission_takes_more_than_the_bound_on_them() -> None:
    """Every table as full as a request can make it."""
    vocab = 4096
    tables = [*core_tables(3000, 4, MAX_STOP_IDS, 3), *sampler_tables(vocab)]
    arena = SlotArena(tables, 3, torch.device("cpu"))
    writer = AdmissionWriter(arena, Sampler(arena, vocab))
    words = [[7] * (MAX_PHRASE_TOKENS // MAX_PHRASES)] * MAX_PHRASES
    asked = SamplingParams(
        max_tokens=9, presence_penalty=1.0, logprobs=3, prompt_logprobs=3, top_k=5, min_tokens=2, seed=1,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), allowed_token_ids=list(range(vocab)),
        logprob_token_ids=list(range(MAX_LOGPROB_TOKEN_IDS)), stop_token_ids=list(range(MAX_STOP_TOKEN_IDS)),
    )  # fmt: skip
    request = AddRequest(
        request_id="a", prompt_token_ids=[1] * 500, params=asked, seed=0, eos_token_ids=list(range(MAX_EOS_IDS)),
        bad_words_token_ids=words,
    )  # fmt: skip
    said = writer.prepare(request) + segment_ints(500) + segment_ints(MAX_TABLE_INTS)
    assert said <= max_upload_ints(500, 0, vocab)
    for tokens, blocks in ((501, 0), (500, 1)):
        assert max_upload_ints(tokens, blocks, vocab) > max_upload_ints(500, 0, vocab)
    assert max_upload_ints(500, 0, 2 * vocab) >= max_upload_ints(500, 0, vocab) + vocab // 32
