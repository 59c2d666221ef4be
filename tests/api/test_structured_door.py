"""Structured output at the door: compiling in a process that can be killed, the cache, and combinations of parameters."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from headway.api import killable
from headway.api.inputs import Door
from headway.api.killable import Job, Pool, TooMuchError
from headway.api.structured import compiler
from headway.api.structured.compile import Outcome
from headway.api.structured.compiler import GrammarCompiler
from headway.api.structured.door import vocabulary_of
from headway.api.tokenizer import from_gguf
from headway.core.automaton import Automaton, Vocabulary
from headway.core.errors import BusyError, EngineDeadError, InvalidRequestError
from headway.core.params import SamplingParams, StructuredOutputsParams
from headway.core.processes import processor_seconds
from tests.api.tiny_tokenizers import byte_level_metadata, header, sentencepiece_metadata
from tests.engine.fake_core import model_info

EVERY = frozenset(range(256))


@pytest.fixture
def grammars() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(EVERY)
    yield made
    made.close()


def automaton(made: GrammarCompiler, wanted: StructuredOutputsParams) -> Automaton:
    found = made.compile(wanted).automaton
    assert found is not None
    return found


def refusal(made: GrammarCompiler, **wanted: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        made.compile(StructuredOutputsParams(**wanted))
    assert caught.value.parameter == "structured_outputs"
    return str(caught.value)


def test_compiles_each_kind(grammars: GrammarCompiler) -> None:
    assert automaton(grammars, StructuredOutputsParams(regex="a+")).accepts(b"aaa")
    assert automaton(grammars, StructuredOutputsParams(choice=["yes", "nö"])).accepts("nö".encode())
    for schema in ({"type": "null"}, '{"type": "null"}'):
        assert automaton(grammars, StructuredOutputsParams(json=schema)).accepts(b"null")


def test_what_no_table_holds_goes_to_the_host(grammars: GrammarCompiler) -> None:
    lark = 'start: "a" start "b" | "c"'
    given: list[dict[str, Any]] = [{"json_object": True}, {"json": {"type": "object"}}, {"grammar": lark}]
    for wanted in given:
        found = grammars.compile(StructuredOutputsParams(**wanted))
        assert found.automaton is None and found.host_grammar
    assert "Expected" in refusal(grammars, grammar='start: "a" (')
    assert "'typo'" in refusal(grammars, json={"type": "number", "minimum": 3, "typo": 1})
    assert "'uniqueItems'" in refusal(grammars, json={"type": "array", "uniqueItems": True})
    assert "iri" in refusal(grammars, json={"type": "string", "format": "iri"})


def test_a_known_grammar_is_not_compiled_again(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = grammars.compile(StructuredOutputsParams(regex="a+"))
    assert "valid" in refusal(grammars, regex="(")
    monkeypatch.setattr(grammars._pool, "run", None)
    assert grammars.compile(StructuredOutputsParams(regex="a+")) is first
    assert grammars.known(StructuredOutputsParams(regex="a+")) is first
    assert grammars.known(StructuredOutputsParams(regex="a*")) is None
    with pytest.raises(InvalidRequestError, match="valid"):
        grammars.known(StructuredOutputsParams(regex="("))
    assert "valid" in refusal(grammars, regex="(")


def test_the_memory_of_what_was_compiled_is_bounded(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED", 3)
    for i in range(5):
        grammars.compile(StructuredOutputsParams(regex=f"a{{{i + 1}}}"))
    assert len(grammars._known) == 3
    for i in range(5, 9):
        grammars.compile(StructuredOutputsParams(regex=f"a{{{i + 1}}}"))
        assert grammars.known(StructuredOutputsParams(regex="a{5}")) is not None, "what is asked for stays"
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 100)
    grammars.compile(StructuredOutputsParams(regex="b{30}"))
    assert grammars._known_bytes <= 100


BOMB = "(?:[ab]*a){9}(?:[ab]{0,9}b){300}"
"""Minutes of determinising."""


def test_a_grammar_that_takes_too_long_is_killed_alone() -> None:
    now = [0.0]
    made = GrammarCompiler(EVERY, seconds=0.3, clock=lambda: now[0])
    try:
        assert "0.3 s of processor time" in refusal(made, regex=BOMB)
        assert not made._pool._idle, "its process is gone"
        made._pool.seconds = 60.0
        assert automaton(made, StructuredOutputsParams(regex="b+")).accepts(b"b")
        run, made._pool.run = made._pool.run, None  # type: ignore[method-assign,assignment]
        assert "0.3 s" in refusal(made, regex=BOMB), "remembered"
        made._pool.run = run  # type: ignore[method-assign]
        now[0] = compiler.LIMIT_SECONDS
        assert made.known(StructuredOutputsParams(regex=BOMB)) is None, "not for long: the machine may have been busy"
        assert made.known(StructuredOutputsParams(regex="b+")) is not None
    finally:
        made.close()


def test_a_verdict_that_did_not_hold_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that went over a limit on a busy machine and compiled later is remembered like any other."""
    now, runs = [0.0], list[bool]()
    made = GrammarCompiler(EVERY, clock=lambda: now[0])

    def work(data: bytes, job: Job | None) -> bytes:
        runs.append(True)
        if len(runs) == 1:
            raise TooMuchError(time=True)
        return msgspec.msgpack.encode(Outcome(host_grammar="g"))

    monkeypatch.setattr(made._pool, "run", work)
    wanted = StructuredOutputsParams(regex="a+")
    try:
        assert "processor time" in refusal(made, regex="a+")
        now[0] = compiler.LIMIT_SECONDS
        for later in range(3):
            assert made.compile(wanted).host_grammar == "g" and len(runs) == 2, "compiled once more, and no more"
            now[0] += later * compiler.LIMIT_SECONDS
        assert made.known(wanted) is not None and not made._until
    finally:
        made.close()


class Meddler(threading.Thread):
    """Sends a signal to the first ``count`` processes that get a job."""

    def __init__(self, pool: Pool, number: signal.Signals, count: int) -> None:
        super().__init__()
        self.pool, self.number, self.count = pool, number, count
        self.start()

    def run(self) -> None:
        seen: set[int] = set()
        while len(seen) < self.count:
            for child in list(self.pool._busy):
                if child.process.pid not in seen and (processor_seconds(child.process.pid) or 0) > 0.01:
                    seen.add(child.process.pid)
                    os.kill(child.process.pid, self.number)
            os.sched_yield()


@pytest.mark.skipif(sys.platform != "linux", reason="reads processor times")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_not_the_grammars_fault(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killable, "STUCK_SECONDS", 0.2)
    monkeypatch.setattr(killable, "TICK_SECONDS", 0.1)
    made = GrammarCompiler(EVERY)
    slow = StructuredOutputsParams(regex="(a|b)*a(a|b){11}")
    try:
        meddler = Meddler(made._pool, number, 2)
        with pytest.raises(BusyError, match="try again"):
            made.compile(slow)
        meddler.join()
        assert made.known(slow) is None, "nothing is remembered"
        meddler = Meddler(made._pool, number, 1)
        assert made.compile(slow).automaton is not None, "tried once more"
        meddler.join()
    finally:
        made.close()


def test_a_job_that_crashes_its_process_twice_is_at_fault() -> None:
    pool = Pool("tests.api.crashing_child", b"", 1, 0.3, 2**32, "crashing")
    try:
        with pytest.raises(TooMuchError) as caught:
            pool.run(b"crash")
        assert not caught.value.time
        assert pool.run(b"fine") == b"fine"
        with pytest.raises(TooMuchError) as caught:
            pool.run(b"spin", keep=False)
        assert caught.value.time
        assert pool.run(b"fine") == b"fine"
    finally:
        pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads processor times")
@pytest.mark.timeout(60)
def test_a_process_that_reads_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is larger than what fits between the two: sending the rest of it must not wait for the reader."""
    monkeypatch.setattr(killable, "STUCK_SECONDS", 0.2)
    monkeypatch.setattr(killable, "TICK_SECONDS", 0.1)
    pool, job = Pool("tests.api.crashing_child", b"", 1, 30.0, 2**32, "stopped"), bytes(2**23)
    try:
        assert pool.run(b"fine") == b"fine"
        [worker] = pool._idle
        os.kill(worker.process.pid, signal.SIGSTOP)
        assert pool.run(job) == job, "another process does it"
        assert worker.process.poll() is not None
    finally:
        pool.close()


def test_a_job_that_nobody_wants_any_more_ends() -> None:
    made = GrammarCompiler(EVERY, seconds=3600.0)
    job = Job()
    try:
        with ThreadPoolExecutor(1) as pool:
            bomb = pool.submit(made.compile, StructuredOutputsParams(regex=BOMB), job)
            while not made._pool._busy:
                os.sched_yield()
            job.give_up()
            with pytest.raises(BusyError):
                bomb.result(60)
        assert not made._pool._busy
    finally:
        made.close()


def test_a_process_that_died_idle_costs_nothing(grammars: GrammarCompiler) -> None:
    grammars.compile(StructuredOutputsParams(regex="a+"))
    [worker] = grammars._pool._idle
    worker.process.kill()
    worker.process.wait()
    assert automaton(grammars, StructuredOutputsParams(regex="b{7}")).accepts(b"b" * 7)


def test_no_process_outlives_its_compiler() -> None:
    made = GrammarCompiler(EVERY)
    made.compile(StructuredOutputsParams(regex="a+"))
    [worker] = made._pool._idle
    made.close()
    made.close()
    assert worker.process.poll() is not None


def test_closing_does_not_wait_for_what_is_being_compiled() -> None:
    made = GrammarCompiler(EVERY, seconds=3600.0)
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(made.compile, StructuredOutputsParams(regex=BOMB))
        while not made._pool._busy:
            os.sched_yield()
        made.close()
        with pytest.raises(EngineDeadError):
            bomb.result()
    with pytest.raises(EngineDeadError):
        made.compile(StructuredOutputsParams(regex="a"))


def test_a_closed_door_starts_no_processes() -> None:
    made = door(Engine())
    made._structured_door()
    made.close()
    with pytest.raises(EngineDeadError):
        made.prepare("ab", params())


def test_hostile_grammars_are_answered_with_an_error(grammars: GrammarCompiler) -> None:
    loop: dict[str, Any] = {}
    loop["items"] = loop
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for wanted in (
        {"regex": "(a|b)*a(a|b){20}"},
        {"regex": "(" * 5000},
        {"regex": "x" * (compiler.MAX_SPEC_BYTES + 1)},
        {"regex": "\ud800"},
        {"choice": ["x" * 1000] * 100},
        {"json": loop},
        {"json": {"const": deep}},
        {"json": {"const": object()}},
        {"json": {"const": float("nan")}},
        {"json": "[" * 60_000},
    ):
        assert "structured_outputs" in refusal(grammars, **wanted)
    assert automaton(grammars, StructuredOutputsParams(regex="a+")).accepts(b"a")


# -- the door ----------------------------------------------------------------------------------------------------------


class Engine:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.learnt: list[Vocabulary] = []


def door(engine: Engine, **info: Any) -> Door:
    tokenizer = from_gguf(header(byte_level_metadata()))
    made = replace_info(tokenizer.vocab_size, **info)
    return Door(made, tokenizer, teach=engine.learnt.append)


def replace_info(vocab_size: int, **fields: Any) -> Any:
    info = model_info()
    info.vocab_size = vocab_size
    for name, value in fields.items():
        setattr(info, name, value)
    return info


def params(**fields: Any) -> SamplingParams:
    wanted = fields.pop("wanted", {"regex": "a+"})
    return SamplingParams(structured_outputs=StructuredOutputsParams(**wanted), **fields)


def test_the_engine_learns_the_vocabulary_once_and_gets_the_automaton() -> None:
    engine = Engine()
    made = door(engine)
    try:
        assert made.known_grammar(params()) is None
        prepared = made.prepare("ab", params(n=2))
        known = made.known_grammar(params())
        assert known is not None and known.automaton is prepared.children[0].automaton
        assert made.prepare("ab", params(), grammar=known).children[0].automaton is known.automaton
        made.prepare("ab", params())
        assert len(engine.learnt) == 1
        [vocabulary] = engine.learnt
        tokenizer = made.tokenizer
        assert tokenizer is not None and vocabulary.size == tokenizer.vocab_size
        for token, text in enumerate(vocabulary.tokens):
            assert text == (b"" if token in tokenizer.added_ids else tokenizer.token_bytes(token))
        for child in prepared.children:
            assert child.automaton is not None and child.automaton.accepts(b"aa")
            assert child.params.structured_outputs is None
        assert prepared.params.structured_outputs is not None
        assert made.prepare("ab", SamplingParams()).children[0].automaton is None
    finally:
        made.close()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 3, "wanted": {"regex": "a{1,3}"}}, "min_tokens"),
        ({"wanted": {"regex": "("}}, "not valid"),
    ],
)
def test_combinations_that_cannot_hold(fields: dict[str, Any], named: str) -> None:
    made = door(Engine())
    try:
        with pytest.raises(InvalidRequestError, match=named):
            made.prepare("ab", params(**fields))
        assert made.prepare("ab", params(min_tokens=3)).children
    finally:
        made.close()


def test_a_tokenizer_and_an_end_are_needed() -> None:
    info = replace_info(300)
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        Door(info, None, teach=Engine().learnt.append).prepare([1], params())
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        door(Engine(), eos_token_ids=[]).prepare("ab", params())


def test_sentencepiece_tokens_keep_their_blanks_and_bytes() -> None:
    tokenizer = from_gguf(header(sentencepiece_metadata()))
    tokens = vocabulary_of(tokenizer, tokenizer.vocab_size + 5).tokens
    texts = {tokenizer.backend.id_to_token(i): text for i, text in enumerate(tokens)}
    assert texts["▁hello"] == b" hello" and texts["ld"] == b"ld" and texts["<0xE2>"] == b"\xe2" and texts["▁"] == b" "
    assert texts["</s>"] == texts["<unk>"] == texts["<|im|>"] == b""
    assert tokens[-5:] == [b""] * 5
