"""Structured output in the engine: answers obey their grammars at every depth, neighbours notice nothing, none is lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headway.core.automaton import Automaton
from headway.core.messages import AddRequest
from headway.engine.core import EngineCore
from tests.engine.harness import Answer, MakeEngine, request, run
from tests.engine.tiny_grammars import LOOP, PATTERN, SCHEMA, TOKENS, VOCABULARY, automaton, holds, text_of
from tests.engine.tiny_llama import EOS, KV_BLOCK_BYTES

GRAMMARS: list[tuple[Any, Any, str]] = [
    ("regex", PATTERN, PATTERN),
    ("json", SCHEMA, json.dumps(SCHEMA)),
    ("regex", LOOP, LOOP),
    ("regex", r"(?:true|false|null)", r"(?:true|false|null)"),
    ("json", {"enum": ["abc", 12, None]}, json.dumps({"enum": ["abc", 12, None]})),
]

STARVED: list[tuple[dict[str, Any], list[str]]] = [
    # Token 0 reads "{": legal for the grammar, and what a row without any choice used to draw.
    ({"automaton": automaton("regex", r"\{+"), "bad_words_ids": [[0]]}, ["structured_outputs", "bad_words"]),
    ({"allowed_token_ids": [0, 9], "bad_words_ids": [[0], [9]]}, ["allowed_token_ids", "bad_words"]),
    ({"allowed_token_ids": EOS, "min_tokens": 3}, ["allowed_token_ids", "min_tokens"]),
    ({"allowed_token_ids": [4], "bad_words_ids": [[4, 4]], "temperature": 1.0, "top_k": 3}, ["allowed_token_ids"]),
]
"""Demands that leave no token, and the fields the error names."""


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(97) for _ in range(rng.randrange(1, 40))]


def mixed(count: int, seed: int) -> list[AddRequest]:
    """Half with a grammar, half without."""
    rng, made = random.Random(seed), []
    for i in range(count):
        params: dict[str, Any] = {"temperature": rng.choice([0.0, 1.0, 1.5]), "max_tokens": rng.choice([3, 30, 60])}
        if i % 2:
            kind, _, source = rng.choice(GRAMMARS)
            params["automaton"] = automaton(kind, source)
        made.append(request(str(i), prompt(rng), seed=i, **params))
    return made


def wanted_of(each: AddRequest) -> tuple[Any, Any]:
    return next((kind, wanted) for kind, wanted, source in GRAMMARS if automaton(kind, source) is each.automaton)


def check(requests: list[AddRequest], answers: dict[str, Answer]) -> int:
    """Every answer is there and, if it ended by itself, right; returns how many did."""
    complete = 0
    for each in requests:
        answer = answers[each.request_id]
        assert answer.error is None and answer.finish_reason in ("stop", "length")
        if each.automaton is None:
            continue
        if answer.finish_reason == "stop":
            assert answer.token_ids.pop() in EOS
            assert holds(*wanted_of(each), text_of(answer)), text_of(answer)
            complete += 1
        else:
            assert len(answer.token_ids) == each.params.max_tokens
            text = b"".join(TOKENS[token] for token in answer.token_ids)
            assert each.automaton.walk(each.automaton.start, text), "cut short, but a beginning of something right"
    return complete


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_hundreds_of_answers_and_none_lost(make_engine: MakeEngine, depth: int) -> None:
    requests = mixed(240, seed=depth)
    core = make_engine(run_ahead=depth, kv_cache_memory_bytes=24 * KV_BLOCK_BYTES, max_num_batched_tokens=40)
    answers = run(core, requests)
    assert core.stats().num_preemptions > 0
    assert check(requests, answers) > 30


def test_depth_and_preemption_change_nothing(make_engine: MakeEngine) -> None:
    requests = mixed(60, seed=9)
    truth = run(make_engine(run_ahead=0, enable_prefix_caching=False), requests)
    for depth in (1, 2, 4):
        answers = run(make_engine(run_ahead=depth, kv_cache_memory_bytes=20 * KV_BLOCK_BYTES), requests)
        for request_id, answer in answers.items():
            assert answer.token_ids == truth[request_id].token_ids
            assert answer.finish_reason == truth[request_id].finish_reason


def test_neighbours_without_a_grammar_get_the_same_tokens(make_engine: MakeEngine) -> None:
    requests = mixed(24, seed=4)
    plain = [each for each in requests if each.automaton is None]
    alone, together = run(make_engine(run_ahead=2), plain), run(make_engine(run_ahead=2), requests)
    for each in plain:
        assert alone[each.request_id].token_ids == together[each.request_id].token_ids


def test_a_grammar_that_is_complete_forces_the_end(make_engine: MakeEngine) -> None:
    core = make_engine(run_ahead=2)
    [answer] = run(core, [request("a", [1, 2], automaton=automaton("regex", "ab"), temperature=1.5)]).values()
    assert text_of(answer) == "ab" and answer.finish_reason == "stop" and answer.token_ids[-1] in EOS


def test_a_slot_forgets_the_grammar_of_its_former_owner(make_engine: MakeEngine) -> None:
    core = make_engine(run_ahead=2, max_num_seqs=1)
    plain = request("b", [1, 2], temperature=1.0, seed=5)
    [truth] = run(core, [plain]).values()
    run(core, [request("a", [1, 2], automaton=automaton("regex", "a+"))])
    [again] = run(core, [plain]).values()
    assert again.token_ids == truth.token_ids


def test_log_probabilities_are_of_the_raw_logits(make_engine: MakeEngine) -> None:
    forced = automaton("regex", "the")
    [answer] = run(make_engine(), [request("a", [7, 8], automaton=forced, logprobs=97, temperature=0.0)]).values()
    ids, values, _ = answer.logprobs[0]
    assert len(ids) > 20 and min(values) > -100, "nothing was masked before they were taken"


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [TOKENS.index(b"z")]},
        {"bad_words_ids": [[token] for token, text in enumerate(TOKENS) if text[:1] == b"a"]},
        {"min_tokens": 8},
    ],
)
def test_demands_that_leave_no_token_fail_alone(make_engine: MakeEngine, params: dict[str, Any], depth: int) -> None:
    core = make_engine(run_ahead=depth)
    others = mixed(6, seed=1)
    broken = request("broken", [1, 2, 3], automaton=automaton("regex", "a{1,3}"), **params)
    answers = run(core, [*others[:3], broken, *others[3:]])
    assert answers["broken"].finish_reason == "error" and "structured_outputs" in str(answers["broken"].error)
    assert all(text.startswith("a") or not text for text in [text_of(answers["broken"])])
    check(others, answers)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("params", "fields"), STARVED)
def test_a_banned_token_is_never_drawn_for_want_of_another(
    make_engine: MakeEngine, params: dict[str, Any], fields: list[str], depth: int
) -> None:
    core = make_engine(run_ahead=depth)
    others = mixed(6, seed=3)
    answers = run(core, [*others[:3], request("broken", [1, 2, 3], logprobs=2, **params), *others[3:]])
    broken = answers["broken"]
    assert broken.finish_reason == "error" and broken.error_parameter == fields[0]
    assert all(field in str(broken.error) for field in fields)
    assert broken.token_ids == ([4] if params.get("top_k") else []), "what was allowed before stays"
    check(others, answers)


def test_a_bias_against_all_that_is_allowed_is_only_a_bias(make_engine: MakeEngine) -> None:
    """-100 is a finite number: as elsewhere it makes a token unlikely, and a grammar may leave nothing likelier."""
    bias = dict.fromkeys(range(len(TOKENS)), -100.0)
    [answer] = run(make_engine(), [request("a", [1], automaton=automaton("regex", "ab"), logit_bias=bias)]).values()
    assert text_of(answer) == "ab" and answer.finish_reason == "stop"


def test_ignoring_the_end_cannot_break_out(make_engine: MakeEngine) -> None:
    """The door refuses it; the engine, asked anyway, says what happened."""
    broken = request("a", [1], automaton=automaton("regex", "ab"), ignore_eos=True)
    [answer] = run(make_engine(run_ahead=2), [broken]).values()
    assert answer.finish_reason == "error" and text_of(answer) == "ab"


def refused(core: EngineCore, made: AddRequest) -> str:
    [answer] = run(core, [made]).values()
    assert answer.finish_reason == "error"
    return str(answer.error)


def test_malformed_automata_are_refused(make_engine: MakeEngine) -> None:
    core, good = make_engine(), automaton("regex", "ab")
    fields = {name: getattr(good, name) for name in Automaton.__struct_fields__}
    for wrong in (
        {"num_states": 0},
        {"num_states": 2**15},
        {"num_classes": 300},
        {"start": 0},
        {"start": 99},
        {"first_accepting": 0},
        {"classes": b"\xff" * 256},
        {"classes": b""},
        {"transitions": b"\x00"},
        {"kinds": b"\x00"},
    ):
        assert "malformed" in refused(core, request("a", [1], automaton=Automaton(**(fields | wrong))))


def test_an_engine_that_knows_no_tokens_refuses(tiny_model: Any) -> None:
    from headway.core.config import EngineArgs
    from headway.engine.boot import build_engine

    args = EngineArgs(model=str(tiny_model), device="cpu", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    core = build_engine(args, progress=False)
    assert "vocabulary" in refused(core, request("a", [1], automaton=automaton("regex", "ab")))
    core.learn(VOCABULARY)
    core.learn(VOCABULARY)
    assert run(core, [request("a", [1], automaton=automaton("regex", "ab"))])["a"].error is None
    core.shutdown()
