"""LLM over a fake engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headway import LLM, EngineDeadError, InvalidRequestError, SamplingParams, UnknownParameterError
from headway.api import frontend
from headway.api.llm import Progress
from headway.core.errors import ConfigError
from headway.engine.client import InprocClient
from tests.api import fakes
from tests.engine import fake_core


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("fake") as made:
        yield made


def core(llm: LLM) -> fake_core.FakeCore:
    assert isinstance(llm._client, InprocClient)
    assert isinstance(llm._client._core, fake_core.FakeCore)
    return llm._client._core


def prompts(*mixed: Any) -> list[Any]:
    return list(mixed)


def seeded(**fields: Any) -> SamplingParams:
    return SamplingParams(seed=0, **fields)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [seeded(max_tokens=5), seeded(max_tokens=1), seeded(max_tokens=3, n=2)]
    outputs = llm.generate(prompts("a", [96], {"prompt": "0"}), params)
    assert [o.outputs[0].text for o in outputs] == ["bcdef", "a", "123"]
    assert outputs[2].outputs[1].text == "234"
    assert [o.prompt for o in outputs] == ["a", None, "0"]
    assert all(o.finished and o.error is None for o in outputs)
    assert len({o.request_id for o in outputs}) == 3
    assert llm.generate([]) == []


def test_stop_strings_end_the_request_in_the_engine(llm: LLM) -> None:
    [output] = llm.generate("a", seeded(max_tokens=100_000, stop="ef"))
    assert output.outputs[0].text == "bcd"
    assert output.outputs[0].stop_reason == "ef"
    assert llm.stats().num_running == 0
    assert core(llm).num_steps < 20


def test_eos(llm: LLM) -> None:
    [output] = llm.generate([[fake_core.EARLY_EOS, 96]], seeded(max_tokens=9))
    assert output.outputs[0].text == "ab"
    assert output.outputs[0].token_ids == [97, 98, fake_core.EOS]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    [output] = llm.generate([[fake_core.EARLY_EOS, 96]], seeded(max_tokens=9, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"


def test_without_params_the_models_defaults_apply(llm: LLM) -> None:
    seen: list[SamplingParams] = []
    add = core(llm).add

    def spy(request: Any) -> None:
        seen.append(request.params)
        add(request)

    core(llm).add = spy  # type: ignore[method-assign]
    llm.generate("a")
    llm.generate("a", SamplingParams())
    assert [p.temperature for p in seen] == [0.5, 1.0]


def test_one_wrong_prompt_stops_the_call_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["fine", ""])
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert core(llm).requests == {}
    assert core(llm).num_steps == 0


def test_a_request_that_fails_inside_leaves_the_others_alone(llm: LLM) -> None:
    outputs = llm.generate(prompts([fake_core.FAIL], "a", [fake_core.REFUSE]), seeded(max_tokens=2))
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "error"]
    assert [o.error for o in outputs] == ["failure asked for", None, "refused"]


def test_engine_death(llm: LLM) -> None:
    with pytest.raises(EngineDeadError, match="crash asked for"):
        llm.generate(prompts("a", [fake_core.CRASH]))
    with pytest.raises(EngineDeadError):
        llm.generate("a")


def test_an_interrupt_aborts_all_and_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    poll = llm._client.poll
    calls = 0

    def interrupted(timeout: float | None) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return poll(timeout)

    monkeypatch.setattr(llm._client, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], seeded(max_tokens=1000))
    assert core(llm).requests == {}
    assert llm._processor.requests() == []
    assert llm.generate("a", seeded(max_tokens=2))[0].outputs[0].text == "bc"


def test_the_engine_starts_before_the_last_prompts_are_added(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.api.llm.PART_TOKENS", 3)
    events: list[str] = []
    add, step = core(llm).add, core(llm).step

    def noted(event: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(event)
            return inner(*args)

        return call

    monkeypatch.setattr(core(llm), "add", noted("add", add))
    monkeypatch.setattr(core(llm), "step", noted("step", step))
    outputs = llm.generate(prompts([97, 98], [97, 98, 99], [97], [97], [97], [98]), seeded(max_tokens=2))
    assert events[:8] == ["add", "add", "step", "add", "add", "add", "step", "add"]
    assert [o.prompt_token_ids for o in outputs] == [[97, 98], [97, 98, 99], [97], [97], [97], [98]]
    assert all(len(o.outputs[0].token_ids) == 2 for o in outputs)


def test_a_bad_prompt_is_found_while_the_first_part_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.api.llm.PART_TOKENS", 2)
    added: list[str] = []
    add = core(llm).add

    def spy(request: Any) -> None:
        added.append(request.request_id)
        add(request)

    monkeypatch.setattr(core(llm), "add", spy)
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts([97], [97], [97], [97], []), seeded(max_tokens=1000))
    assert len(added) == 2
    assert core(llm).num_steps == 1
    assert core(llm).requests == {}
    assert llm._processor.requests() == []
    assert llm.generate("a", seeded(max_tokens=2))[0].outputs[0].text == "bc"


def test_completions_count_as_tokens_of_a_part(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.api.llm.PART_TOKENS", 4)
    sizes: list[int] = []
    add = llm._client.add

    def spy(requests: list[Any]) -> None:
        sizes.append(len(requests))
        add(requests)

    monkeypatch.setattr(llm._client, "add", spy)
    llm.generate(prompts([97], [97], [97]), [seeded(max_tokens=1, n=3), seeded(max_tokens=1), seeded(max_tokens=1)])
    assert sizes == [4, 1]


def test_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(talk, seeded(max_tokens=1))
    assert output.prompt == "<user>hi<assistant>"
    assert output.prompt_token_ids == list(b"<user>hi<assistant>")
    outputs = llm.chat([talk, talk], seeded(max_tokens=1), add_generation_prompt=False)
    assert [o.prompt for o in outputs] == ["<user>hi"] * 2
    [output] = llm.chat(talk, seeded(max_tokens=1), chat_template="{{ x }}", chat_template_kwargs={"x": "X"})
    assert output.prompt == "X"


@pytest.mark.parametrize(
    ("messages", "options", "parameter"),
    [
        ([], {}, "messages"),
        ("hi", {}, "messages"),
        ([[]], {}, "messages"),
        ([[1]], {}, "messages"),
        ([{"role": "user", "content": "hi"}], {"tools": [{"type": "function"}]}, "tools"),
        ([{"role": "user", "content": "hi"}], {"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_chats_that_are_refused(llm: LLM, messages: Any, options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(messages, **options)
    assert caught.value.parameter == parameter


def test_without_a_tokenizer() -> None:
    with LLM("fake", skip_tokenizer_init=True) as llm:
        [output] = llm.generate([1, 2], seeded(max_tokens=2))
        assert output.outputs[0].token_ids == [3, 4]
        assert output.outputs[0].text == ""
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            llm.generate("text")
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            llm.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            llm.get_tokenizer()


def test_engine_arguments_are_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "connect", lambda *_, **__: pytest.fail("the engine was started"))
    with pytest.raises(UnknownParameterError, match="did you mean 'max_model_len'"):
        LLM("fake", max_model_length=3)
    with pytest.raises(ConfigError):
        LLM("fake", dtype="int3")


def test_boot_errors_pass_through() -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        LLM("wrong-config")


def test_close_and_garbage() -> None:
    llm = LLM("fake")
    engine = core(llm)
    llm.close()
    llm.close()
    assert engine.is_shut_down
    with pytest.raises(EngineDeadError):
        llm.generate("a")
    other = LLM("fake")
    engine, gone = core(other), weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert engine.is_shut_down


def test_the_bar_counts_requests_and_tokens(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], seeded(max_tokens=3))
    assert capsys.readouterr().err == ""
    request = llm._processor.open(llm._door.prepare("a", seeded(max_tokens=3)), "x")
    with Progress(1, enabled=True) as progress:
        progress.advance([request])
        assert progress._bar.n == 1
    assert "output: 0.00 toks/s" in capsys.readouterr().err


def test_in_a_process_of_its_own() -> None:
    with LLM("fake", multiprocess=True) as llm:
        params = [seeded(max_tokens=3, stop="c", logprobs=1), seeded(max_tokens=2)]
        outputs = llm.generate(["a", "0"], params)
        assert [o.outputs[0].text for o in outputs] == ["b", "12"]
        assert llm.stats().num_running == 0
        with pytest.raises(EngineDeadError, match="status 7"):
            llm.generate([[fake_core.EXIT]])
