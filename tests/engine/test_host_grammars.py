"""Grammars on the host: such rows lag, nobody else does, and their answers are right at every depth."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import jsonschema
import pytest

from headway.core.messages import AddRequest
from headway.engine.core import EngineCore
from headway.engine.host_grammars import SPELLED_BYTES, HostGrammars, _Spelling
from tests.engine.harness import MakeEngine, request, run
from tests.engine.tiny_grammars import LARK, PATTERN, TOKENS, automaton, host_grammar, text_of
from tests.engine.tiny_llama import EOS, KV_BLOCK_BYTES

TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["a", "b"],
        }
    },
    "$ref": "#/$defs/node",
}


def is_paired(text: str) -> bool:
    """LARK, by rewriting: innermost pairs become a word until one is left."""
    before = None
    text = re.sub(r"^([ab{}]*)[c-z]{1,3}([ab{}]*)$", r"\1W\2", text)
    while text != before:
        before, text = text, re.sub(r"ab|aWb|\{W\}", "W", text, count=1)
    return text == "W"


def mixed(count: int, seed: int) -> list[AddRequest]:
    rng, made = random.Random(seed), []
    grammars: list[dict[str, Any]] = [
        {"host_grammar": host_grammar("grammar", LARK)},
        {"host_grammar": host_grammar("json", json.dumps(TREE))},
        {"host_grammar": host_grammar("json_object", "")},
        {"automaton": automaton("regex", PATTERN)},
        {},
        {},
    ]
    for i in range(count):
        params: dict[str, Any] = {"temperature": rng.choice([0.0, 1.0, 1.5]), "max_tokens": rng.choice([3, 30, 60])}
        prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 40))]
        made.append(request(str(i), prompt, seed=i, **params, **grammars[i % len(grammars)]))
    return made


def check(requests: list[AddRequest], answers: dict[str, Any]) -> int:
    complete = 0
    for i, each in enumerate(requests):
        answer = answers[each.request_id]
        assert answer.error is None and answer.finish_reason in ("stop", "length"), answer.error
        if each.host_grammar is None or answer.finish_reason == "length":
            continue
        assert answer.token_ids[-1] in EOS
        text = b"".join(TOKENS[token] for token in answer.token_ids[:-1]).decode()
        complete += 1
        if i % 6 == 0:
            assert is_paired(text), text
        else:
            jsonschema.validate(json.loads(text), TREE if i % 6 == 1 else {"type": "object"})
    return complete


def test_the_judge_can_say_no() -> None:
    assert all(map(is_paired, ("ab", "aabb", "{ab}", "acdeb", "{a{z}b}")))
    assert not any(map(is_paired, ("", "a", "aab", "{}", "cdef", "ab}", "abab")))


def test_every_depth_gives_the_same_and_none_is_lost(make_engine: MakeEngine) -> None:
    requests = mixed(48, seed=1)
    truth = run(make_engine(run_ahead=0, enable_prefix_caching=False), requests)
    assert check(requests, truth) > 5
    for depth, memory in ((1, 200), (2, 20), (4, 24)):
        core = make_engine(run_ahead=depth, max_num_batched_tokens=40, kv_cache_memory_bytes=memory * KV_BLOCK_BYTES)
        answers = run(core, requests)
        for request_id, answer in answers.items():
            assert (answer.token_ids, answer.finish_reason) == (
                truth[request_id].token_ids,
                truth[request_id].finish_reason,
            )
        assert memory == 200 or core.stats().num_preemptions > 0


def test_only_rows_that_lag_wait(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a matcher gives no answer, everybody else is served to the end."""
    may_answer, answer = threading.Event(), HostGrammars._next

    def late(self: HostGrammars, opened: Any, token: int | None) -> Any:
        if token is not None:
            may_answer.wait(60)
        return answer(self, opened, token)

    monkeypatch.setattr(HostGrammars, "_next", late)
    core = make_engine(run_ahead=2)
    others = [request(str(i), [i + 1], max_tokens=12, ignore_eos=True) for i in range(3)]
    for each in (request("slow", [1, 2], host_grammar=host_grammar("grammar", LARK), temperature=1.0), *others):
        core.add(each)
    ended: dict[str, str | None] = {}
    while len(ended) < 3:
        ended |= {update.request_id: update.finish_reason for update in core.step() if update.finish_reason}
    assert ended == {"0": "length", "1": "length", "2": "length"} and core.has_work()
    may_answer.set()
    while core.has_work():
        ended |= {update.request_id: update.finish_reason for update in core.step() if update.finish_reason}
    assert ended["slow"] in ("stop", "length")


@pytest.mark.parametrize("depth", [0, 2])
def test_demands_that_leave_no_token_fail_alone(make_engine: MakeEngine, depth: int) -> None:
    core, lark = make_engine(run_ahead=depth), host_grammar("grammar", LARK)
    only_ab, every = host_grammar("grammar", 'start: "ab"'), [[i] for i, text in enumerate(TOKENS) if text]
    requests = [
        request("ids", [1], host_grammar=lark, allowed_token_ids=[TOKENS.index(b"9")]),
        request("words", [1], host_grammar=only_ab, bad_words_ids=every),
        request("ends", [1], host_grammar=only_ab, min_tokens=6),
        request("panic", [1], host_grammar='{"grammars": [{"lark_grammar": "start: <|x|>"}]}'),
        request("long", list(range(90)), host_grammar=lark, max_tokens=60),
        request("fine", [1, 2], host_grammar=lark, max_tokens=4),
    ]
    answers = run(core, requests)
    for name in ("ids", "words", "ends", "panic", "long"):
        assert answers[name].finish_reason == "error" and answers[name].error, name
    assert text_of(answers["ends"]) == "ab" and answers["fine"].error is None


@pytest.mark.parametrize("depth", [0, 2])
def test_a_token_that_its_grammar_did_not_allow_ends_the_request_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Whatever the device may have drawn: nothing that the grammar forbids reaches a client."""
    allows = HostGrammars.allows
    monkeypatch.setattr(HostGrammars, "allows", lambda self, name, token: name != "bad" and allows(self, name, token))
    core, lark = make_engine(run_ahead=depth), host_grammar("grammar", LARK)
    answers = run(core, [request(name, [1, 2], host_grammar=lark, max_tokens=4) for name in ("bad", "fine")])
    bad, fine = answers["bad"], answers["fine"]
    assert (bad.token_ids, bad.finish_reason, bad.error_parameter) == ([], "error", "structured_outputs")
    assert bad.error == "no token was left that structured_outputs allow together; loosen them"
    assert fine.token_ids and fine.finish_reason in ("stop", "length") and fine.error is None
    core.check_integrity()


def test_an_abort_at_any_time_leaves_nothing(make_engine: MakeEngine) -> None:
    core = make_engine(run_ahead=2)
    for moment in range(12):
        core.add(request("gone", [1, 2, 3], host_grammar=host_grammar("grammar", LARK), max_tokens=40))
        for _ in range(moment):
            core.step()
        core.abort("gone")
        for _ in range(200):
            if not core.has_work():
                break
            assert not [update for update in core.step() if update.request_id == "gone"]
        assert not core.has_work(), f"work is left after an abort at turn {moment}"
        assert "gone" not in core._grammars
    core.check_integrity()


def test_a_name_that_is_used_again_has_a_matcher_of_its_own(make_engine: MakeEngine) -> None:
    """The first one's mask may still be on its way."""
    core = make_engine(run_ahead=2)
    for moment in range(6):
        core.add(request("x", [1, 2, 3], host_grammar="start: /[0-9]{1,9}/", max_tokens=9))
        for _ in range(moment):
            core.step()
        core.abort("x")
        [answer] = run(core, [request("x", [1, 2, 3], host_grammar="start: /[a-c]{1,9}/", max_tokens=9)]).values()
        assert answer.error is None and {*text_of(answer)} <= {*"abc"}, (moment, answer.error)


def test_a_grammar_that_goes_over_the_matchers_limits_says_so(make_engine: MakeEngine) -> None:
    """Not at its beginning, where the door would have seen it; and it says nothing of tokens that it would not allow."""
    grammar = 'start: /[bc]{20}/ "a"~1000000'
    [answer] = run(
        make_engine(), [request("x", [1], host_grammar=host_grammar("grammar", grammar), max_tokens=40)]
    ).values()
    assert answer.error is not None and "Too many items" in answer.error and "\n" not in answer.error


def test_of_a_forced_text_only_the_beginning_is_spelled() -> None:
    """The library asks in each step: 60,000 characters took half a second of the engine's interpreter, token by token."""
    spelling = _Spelling([b"a", b"aa", b"b"], 2)
    for text in (b"a" * 60_000, b"a" * SPELLED_BYTES, b"aab", b"", b"a" * 60_000 + b"?"):
        spelled = b"".join(spelling.tokens[token] for token in spelling(text))
        assert spelled == text[:SPELLED_BYTES]
    assert spelling(b"ab?b") == [0, 2]


def refused(core: EngineCore, made: AddRequest) -> str:
    [answer] = run(core, [made]).values()
    return str(answer.error)


def test_the_vocabulary_must_be_known(tiny_model: Any) -> None:
    from headway.core.config import EngineArgs
    from headway.engine.boot import build_engine

    args = EngineArgs(model=str(tiny_model), device="cpu", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    core = build_engine(args, progress=False)
    assert "vocabulary" in refused(core, request("a", [1], host_grammar=host_grammar("grammar", LARK)))
    core.shutdown()
