"""Updates become outputs: n completions in one, stop strings, log-probabilities, errors."""

from __future__ import annotations

import gc
import random
from typing import Any, cast

import pytest

from headway.api.inputs import Door
from headway.api.output_processor import OpenRequest, OutputProcessor, logprobs_dict
from headway.core.messages import RequestUpdate, TokenLogprobsRow
from headway.core.outputs import CompletionOutput, Logprob
from headway.core.params import SamplingParams
from tests.api.fakes import ByteTokenizer
from tests.engine.fake_core import model_info


def start(prompt: str = "p", **params: Any) -> tuple[OutputProcessor, OpenRequest]:
    tokenizer = cast(Any, ByteTokenizer())
    processor = OutputProcessor(tokenizer)
    return processor, processor.open(Door(model_info(), tokenizer).prepare(prompt, SamplingParams(**params)), "name")


def update(child: str, text: str, **fields: Any) -> RequestUpdate:
    return RequestUpdate(request_id=child, new_token_ids=list(text.encode()), **fields)


def test_completions_are_merged_in_order() -> None:
    processor, request = start(n=2)
    touched, aborts = processor.apply([update("0-1", "bb"), update("0-0", "a", num_cached_tokens=4)])
    assert touched == [request]
    assert aborts == []
    processor.apply([update("0-1", "", finish_reason="length")])
    assert not request.finished
    processor.apply([update("0-0", "x", finish_reason="stop", stop_token_id=120)])
    output = request.snapshot()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("name", "p", [1, 112])
    assert output.finished
    assert output.num_cached_tokens == 4
    assert [(c.index, c.text, c.token_ids) for c in output.outputs] == [(0, "a", [97, 120]), (1, "bb", [98, 98])]
    assert [(c.finish_reason, c.stop_reason) for c in output.outputs] == [("stop", 120), ("length", None)]
    assert request.num_generated == 4
    assert processor.requests() == []


def test_a_stop_string_aborts_and_truncates() -> None:
    processor, request = start(stop=["ND"], logprobs=0)
    rows = [TokenLogprobsRow([t], [-1.0], 1) for t in b"xENDyz"]
    _, aborts = processor.apply([update("0-0", "xENDyz", new_logprobs=rows)])
    assert aborts == ["0-0"]
    [completion] = request.snapshot().outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("xE", "stop", "ND")
    assert bytes(completion.token_ids) == b"xEND"
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 4
    assert completion.cumulative_logprob == -4.0
    assert processor.apply([update("0-0", "late", finish_reason="abort")]) == ([], [])
    assert request.snapshot().outputs == [completion]


def test_a_stop_string_in_the_last_update_needs_no_abort() -> None:
    processor, request = start(stop=["b"])
    _, aborts = processor.apply([update("0-0", "ab", finish_reason="length")])
    assert aborts == []
    assert request.snapshot().outputs[0].finish_reason == "stop"
    assert request.snapshot().outputs[0].stop_reason == "b"


def test_logprobs() -> None:
    processor, request = start(logprobs=2, prompt_logprobs=1)
    processor.apply(
        [
            update(
                "0-0",
                "c",
                new_logprobs=[TokenLogprobsRow([99, 97, 98], [-3.0, -0.1, -0.2], 7)],
                new_prompt_logprobs=[TokenLogprobsRow([112, 113], [-0.5, -0.25], 2)],
            ),
            update("0-0", "a", new_logprobs=[TokenLogprobsRow([97, 97, 98], [-0.1, -0.1, -0.2], 5)]),
        ]
    )
    output = request.snapshot()
    [completion] = output.outputs
    assert completion.logprobs == [
        {99: Logprob(-3.0, 7, "c"), 97: Logprob(-0.1, 1, "a"), 98: Logprob(-0.2, 2, "b")},
        {97: Logprob(-0.1, 5, "a"), 98: Logprob(-0.2, 2, "b")},
    ]
    assert list(completion.logprobs[0]) == [99, 97, 98]
    assert completion.cumulative_logprob == pytest.approx(-3.1)
    assert output.prompt_logprobs == [None, {112: Logprob(-0.5, 2, "p"), 113: Logprob(-0.25, 1, "q")}]


def test_logprobs_of_chosen_ids_have_no_rank() -> None:
    processor, request = start(logprob_token_ids=[98], detokenize=False)
    processor.apply([update("0-0", "a", new_logprobs=[TokenLogprobsRow([97, 98], [-0.1, -0.2], 1)])])
    assert request.snapshot().outputs[0].logprobs == [{97: Logprob(-0.1, 1, None), 98: Logprob(-0.2, None, None)}]


def test_without_logprobs_there_are_none() -> None:
    processor, request = start()
    processor.apply([update("0-0", "a")])
    completion = request.snapshot().outputs[0]
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
    assert request.snapshot().prompt_logprobs is None


def test_an_error_ends_one_completion() -> None:
    processor, request = start(n=2)
    processor.apply([update("0-0", "", finish_reason="error", error="why"), update("0-1", "b", finish_reason="length")])
    output = request.snapshot()
    assert output.finished
    assert output.error == "why"
    assert [c.finish_reason for c in output.outputs] == ["error", "length"]


def test_deltas_add_up() -> None:
    processor, request = start(n=2, stop=["END"], logprobs=0, prompt_logprobs=0)
    text = ["", ""]
    tokens: list[list[int]] = [[], []]
    logprobs = 0
    first = True
    for pieces in (("a", "bc"), ("E", ""), ("N", "d"), ("x", "")):
        for i, piece in enumerate(pieces):
            rows = [TokenLogprobsRow([t], [-1.0], 1) for t in piece.encode()]
            processor.apply([update(f"0-{i}", piece, new_logprobs=rows)])
        delta = request.delta()
        assert (delta.prompt_logprobs is not None) == first
        first = False
        for completion in delta.outputs:
            text[completion.index] += completion.text
            tokens[completion.index] += completion.token_ids
            logprobs += len(completion.logprobs or [])
    assert text == ["aENx", "bcd"]
    assert [bytes(t) for t in tokens] == [b"aENx", b"bcd"]
    assert logprobs == 7
    assert request.delta().outputs == []
    processor.apply([update("0-1", "", finish_reason="length")])
    [last] = request.delta().outputs
    assert (last.index, last.text, last.finish_reason) == (1, "", "length")


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_whenever_it_is_asked_for(seed: int) -> None:
    """Runs of tokens, stop strings within them, ends, an abort: deltas add up to the whole, each end is told once, with the
    last of its text, and each token that is told has its log-probabilities."""
    rng = random.Random(seed)
    processor, request = start(n=4, stop=["ab", "cc"], logprobs=0)
    running, deltas = set(range(4)), list[CompletionOutput]()
    while running:
        updates = []
        for i in sorted(running):
            piece = bytes(rng.choice(b"abcde") for _ in range(rng.randrange(5)))
            end = "length" if rng.random() < 0.1 else None
            if piece or end:
                rows = [TokenLogprobsRow([token], [-1.0], 1) for token in piece]
                updates.append(update(f"0-{i}", piece.decode(), new_logprobs=rows, finish_reason=end))
        if rng.random() < 0.05:
            processor.drop(request)
        processor.apply(updates)
        running = {c.index for c in request.snapshot().outputs if c.finish_reason is None}
        if rng.random() < 0.6 or not running:
            deltas += request.delta().outputs
    assert request.delta().outputs == []
    for whole in request.snapshot().outputs:
        told = [delta for delta in deltas if delta.index == whole.index]
        assert "".join(delta.text for delta in told) == whole.text
        tokens = [token for delta in told for token in delta.token_ids]
        assert tokens == list(whole.token_ids) and len(whole.logprobs or []) == len(tokens)
        assert [token for delta in told for row in delta.logprobs or [] for token in row] == tokens
        assert whole.cumulative_logprob == -len(tokens)
        assert [delta.finish_reason for delta in told] == [None] * (len(told) - 1) + [whole.finish_reason]
        assert whole.finish_reason != "stop" or whole.stop_reason in ("ab", "cc")


def test_drop_ends_what_still_runs() -> None:
    processor, request = start(n=3, stop=["END"])
    processor.apply([update("0-0", "a", finish_reason="length"), update("0-1", "bE")])
    assert processor.drop(request) == ["0-1", "0-2"]
    assert processor.drop(request) == []
    output = request.snapshot()
    assert output.finished
    assert [(c.text, c.finish_reason) for c in output.outputs] == [("a", "length"), ("bE", "abort"), ("", "abort")]


def test_snapshots_do_not_change_later() -> None:
    processor, request = start(logprobs=0)
    processor.apply([update("0-0", "a", new_logprobs=[TokenLogprobsRow([97], [-1.0], 1)])])
    early = request.snapshot()
    processor.apply([update("0-0", "b", new_logprobs=[TokenLogprobsRow([98], [-1.0], 1)])])
    assert early.outputs[0].token_ids == [97]
    assert early.outputs[0].text == "a"
    assert len(early.outputs[0].logprobs or []) == 1


def test_prompt_logprobs_wait_for_the_first_delta_with_a_token() -> None:
    processor, request = start(prompt_logprobs=0)
    early = update("0-0", "", new_prompt_logprobs=[TokenLogprobsRow([112], [-0.5], 1)])
    processor.apply([early])
    assert request.delta().prompt_logprobs is None, "it may not be delivered: nobody is woken for it"
    processor.apply([update("0-0", "a", new_prompt_logprobs=[TokenLogprobsRow([113], [-0.5], 1)])])
    assert [row and list(row) for row in request.delta().prompt_logprobs or []] == [None, [112], [113]]
    processor.apply([update("0-0", "b")])
    assert request.delta().prompt_logprobs is None


def test_the_garbage_collector_need_not_know_log_probabilities() -> None:
    row = TokenLogprobsRow([7, 9], [-0.5, -1.0], 1)
    [entry, _] = logprobs_dict(row, SamplingParams(logprobs=1), None).values()
    assert not gc.is_tracked(entry) and not gc.is_tracked(row)


def test_a_chosen_token_that_is_among_the_others_keeps_its_own_rank() -> None:
    tie = TokenLogprobsRow([9, 7, 9, 5], [-1.0, -1.0, -1.0, -3.0], 1)
    listed = logprobs_dict(tie, SamplingParams(logprobs=3), None)
    assert list(listed) == [9, 7, 5], "the chosen one comes first, once"
    assert [(entry.logprob, entry.rank) for entry in listed.values()] == [(-1.0, 1), (-1.0, 1), (-3.0, 3)]
    asked = logprobs_dict(tie, SamplingParams(logprob_token_ids=[7, 9, 5]), None)
    assert [entry.rank for entry in asked.values()] == [1, None, None]
