"""AsyncLLM over a fake engine: streams, aborts, death."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway import AsyncLLM, EngineDeadError, InvalidRequestError, RequestOutput, SamplingParams, UnknownParameterError
from headway.api.frontend import ChatOptions
from headway.api.hub import WOKEN_AT_ONCE
from headway.api.long_texts import LONG_TEXT_CHARS
from headway.api.structured.compile import Outcome
from headway.core.params import StructuredOutputsParams
from headway.engine.client import ThreadClient
from tests.api import fakes
from tests.engine import fake_core

ENDLESS = SamplingParams(seed=0, max_tokens=None)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch)


STUCK_SECONDS = 60
"""A test here takes a second."""


def ours() -> set[threading.Thread]:
    """Threads of engines and front ends. Servers that other modules of this process keep for the session have some, too."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("headway")}


def run(body: Callable[[AsyncLLM], Awaitable[None]], **engine_args: Any) -> None:
    before = ours()

    async def main() -> None:
        async with AsyncLLM("fake", **engine_args) as llm:
            try:
                async with asyncio.timeout(STUCK_SECONDS):
                    await body(llm)
            except TimeoutError:  # say so, instead of running into pytest's own limit
                waiting = [request.request_id for request in llm._processor.requests()]
                raise AssertionError(f"nobody was woken; open requests: {waiting}") from None

    asyncio.run(main())
    assert ours() <= before


def core(llm: AsyncLLM) -> fake_core.FakeCore:
    client = llm._hub.client
    assert isinstance(client, ThreadClient)
    assert isinstance(client._shared.core, fake_core.FakeCore)
    return client._shared.core


async def last(llm: AsyncLLM, *args: Any, **kwargs: Any) -> RequestOutput:
    return [output async for output in llm.generate(*args, **kwargs)][-1]


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine runs nothing."""
    while llm._hub.client.has_work() or core(llm).requests:
        await asyncio.sleep(0)


def seeded(**fields: Any) -> SamplingParams:
    return SamplingParams(seed=0, **fields)


@pytest.mark.parametrize("multiprocess", [False, True])
def test_cumulative_outputs_grow_to_the_last(multiprocess: bool) -> None:
    async def body(llm: AsyncLLM) -> None:
        texts = [o.outputs[0].text async for o in llm.generate("a", seeded(max_tokens=9, stop="i"), "mine")]
        assert texts[-1] == "bcdefgh"
        assert all(b.startswith(a) for a, b in pairwise(texts))
        outputs = await asyncio.gather(*(last(llm, chr(97 + i), seeded(max_tokens=i + 1, n=2)) for i in range(8)))
        assert [o.outputs[0].token_ids for o in outputs] == [[98 + i + j for j in range(i + 1)] for i in range(8)]
        assert all(len(o.outputs) == 2 and o.finished for o in outputs)
        assert (await llm.stats()).num_running == 0

    run(body, multiprocess=multiprocess)


def test_deltas_add_up() -> None:
    async def body(llm: AsyncLLM) -> None:
        text, tokens = "", []
        async for output in llm.generate("a", seeded(max_tokens=20, logprobs=0), delta=True):
            for completion in output.outputs:
                text += completion.text
                tokens += completion.token_ids
                assert len(completion.logprobs or []) == len(completion.token_ids)
        assert text == "bcdefghijklmnopqrstu"
        assert bytes(tokens).decode() == text

    run(body, multiprocess=False)


def test_many_streams_leave_the_loop_time_for_others() -> None:
    async def body(llm: AsyncLLM) -> None:
        outputs = 0
        turns = [0]  # outputs between two looks of the loop at what else there is

        def look() -> None:
            turns.append(outputs - sum(turns))
            if not streams.done():
                asyncio.get_running_loop().call_soon(look)

        async def consume() -> None:
            nonlocal outputs
            ending = seeded(max_tokens=100)  # this engine outruns the loop
            async for _ in llm.generate("a", ending, delta=True):
                outputs += 1

        streams = asyncio.gather(*(consume() for _ in range(4 * WOKEN_AT_ONCE)))
        look()
        await streams
        assert 1 < max(turns) <= WOKEN_AT_ONCE

    run(body, multiprocess=False)


def test_prompts_that_a_closed_loop_left_are_not_sent_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM("fake", multiprocess=False)
    sent: list[Any] = []
    monkeypatch.setattr(llm._hub.client, "add", sent.extend)

    async def leave() -> None:
        llm._hub.attach()
        llm._hub.add([cast(Any, "left behind")])
        asyncio.get_running_loop().stop()  # before its turn is over

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()

    async def go_on() -> None:
        llm._hub.attach()
        llm._hub.add([cast(Any, "new")])
        await asyncio.sleep(0)

    asyncio.run(go_on())
    assert "new" in sent and "left behind" not in sent
    llm.shutdown()


def test_updates_that_come_together_wake_no_more_consumers_in_one_turn() -> None:
    async def body(llm: AsyncLLM) -> None:
        hub = llm._hub
        hub.attach()
        requests: list[Any] = [SimpleNamespace(finished=False) for _ in range(3 * WOKEN_AT_ONCE)]
        batches: list[tuple[list[Any], list[str]]] = [
            (requests[start : start + WOKEN_AT_ONCE], []) for start in range(0, len(requests), WOKEN_AT_ONCE)
        ]
        events = [hub.open(request, only_final=False) for request in requests]
        woken = [0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hub, "processor", SimpleNamespace(apply=lambda updates: batches.pop()))
            for arrivals in (2, 1, 0, 0):  # two batches in one turn, and one in the turn that wakes the last of them
                for _ in range(arrivals):
                    hub._deliver()
                woken.append(sum(event.is_set() for event in events))
                await asyncio.sleep(0)
        assert [after - before for before, after in pairwise(woken)] == [WOKEN_AT_ONCE] * 3 + [0]
        hub._events.clear()

    run(body, multiprocess=False)


def test_a_stream_that_wants_only_the_end_is_woken_once() -> None:
    async def body(llm: AsyncLLM) -> None:
        woken: list[bool] = []
        wake = llm._hub.wake

        def noted(request: Any) -> None:
            woken.append(request.finished)
            wake(request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm._hub, "wake", noted)
            outputs = [each async for each in llm.generate("a", seeded(max_tokens=60), only_final=True)]
            assert len(outputs) == 1 and outputs[0].finished and woken == [True]
            woken.clear()
            async for _ in llm.generate("a", ENDLESS):
                if len(woken) > 1:  # others are woken as it grows
                    break

    run(body, multiprocess=False)


def test_a_request_leaves_no_wish_behind_for_another_at_its_address() -> None:
    async def body(llm: AsyncLLM) -> None:
        for final in (True, False):
            await last(llm, "a", seeded(max_tokens=3), only_final=final)
            with pytest.raises(InvalidRequestError):
                await last(llm, "", seeded(), only_final=final)
        stream = llm.generate("a", ENDLESS, "x", only_final=True)
        ended = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await llm.abort("x")
        assert (await ended).outputs[0].finish_reason == "abort"
        await stream.aclose()  # type: ignore[attr-defined]
        hub = llm._hub
        assert not hub._quiet and not hub._events and not hub._news

    run(body, multiprocess=False)


def test_leaving_the_loop_aborts() -> None:
    async def body(llm: AsyncLLM) -> None:
        async for output in llm.generate("a", ENDLESS):
            assert not output.finished
            break
        gc.collect()
        await idle(llm)
        assert llm._processor.requests() == []

    run(body, multiprocess=False)


def test_closing_the_generator_aborts() -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.generate("a", ENDLESS)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await idle(llm)

    run(body, multiprocess=False)


def test_cancelling_the_task_aborts() -> None:
    async def body(llm: AsyncLLM) -> None:
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in llm.chat([{"role": "user", "content": "hi"}], ENDLESS):
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)

    run(body, multiprocess=False)


def test_abort_by_name_is_exact_and_ends_the_stream() -> None:
    async def body(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm, "a", ENDLESS, name)) for name in ("x", "x", "x1")]
        while len(core(llm).requests) < 3:
            await asyncio.sleep(0)
        await llm.abort("unknown")
        await llm.abort("x")
        for task in tasks[:2]:
            output = await task
            assert (output.request_id, output.finished, output.outputs[0].finish_reason) == ("x", True, "abort")
        assert not tasks[2].done()
        await llm.abort("x1")
        await tasks[2]
        await idle(llm)

    run(body, multiprocess=False)


def test_wrong_requests_raise_and_leave_nothing() -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError, match="empty"):
            await last(llm, "")
        with pytest.raises(InvalidRequestError, match="SamplingParams"):
            await last(llm, "a", {"n": 1})
        assert llm._processor.requests() == []
        assert llm._hub._events == {}

    run(body, multiprocess=False)


def test_a_failed_request_leaves_the_others_alone() -> None:
    async def body(llm: AsyncLLM) -> None:
        bad, good = await asyncio.gather(last(llm, [fake_core.FAIL]), last(llm, "a", seeded(max_tokens=2)))
        assert (bad.error, bad.outputs[0].finish_reason) == ("failure asked for", "error")
        assert good.outputs[0].text == "bc"

    run(body, multiprocess=False)


@pytest.mark.parametrize(("multiprocess", "prompt"), [(False, fake_core.CRASH), (True, fake_core.EXIT)])
def test_engine_death_reaches_every_open_stream(multiprocess: bool, prompt: int) -> None:
    async def body(llm: AsyncLLM) -> None:
        llm.check_health()
        streams = [llm.generate("a", ENDLESS) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        results = await asyncio.gather(
            last(llm, [prompt]), *(_exhaust(stream) for stream in streams), return_exceptions=True
        )
        assert [type(result) for result in results] == [EngineDeadError] * 4
        assert llm.dead_error is not None
        with pytest.raises(EngineDeadError):
            llm.check_health()
        with pytest.raises(EngineDeadError):
            await last(llm, "a")

    run(body, multiprocess=multiprocess)


async def _exhaust(stream: Any) -> None:
    async for _ in stream:
        pass


def test_shutdown_ends_open_streams() -> None:
    async def body(llm: AsyncLLM) -> None:
        task = asyncio.create_task(last(llm, "a", ENDLESS))
        while not core(llm).requests:
            await asyncio.sleep(0)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        llm.shutdown()

    run(body, multiprocess=False)


def test_chat_and_salt_and_long_text() -> None:
    async def body(llm: AsyncLLM) -> None:
        talk = [{"role": "user", "content": "hi"}]
        [output] = [o async for o in llm.chat(talk, seeded(max_tokens=1))][-1:]
        assert output.prompt == "<user>hi<assistant>"
        options = ChatOptions(add_generation_prompt=False)
        [output] = [o async for o in llm.chat(talk, seeded(max_tokens=1), options=options)][-1:]
        assert output.prompt_token_ids == list(b"<user>hi")
        seen: list[str | None] = []
        add = core(llm).add

        def spy(request: Any) -> None:
            seen.append(request.cache_salt)
            add(request)

        core(llm).add = spy  # type: ignore[method-assign]
        await last(llm, "a", seeded(max_tokens=1), cache_salt="s")
        await last(llm, {"prompt": "a", "cache_salt": "own"}, seeded(max_tokens=1), cache_salt="s")
        assert seen == ["s", "own"]
        output = await last(llm, "x" * (LONG_TEXT_CHARS + 1), seeded(max_tokens=1))
        assert len(output.prompt_token_ids) == LONG_TEXT_CHARS + 2

    run(body, multiprocess=False)


def test_a_flood_of_new_grammars_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a thread for as long as it compiles; all else that needs a thread has its own."""
    release, begun = threading.Event(), threading.Semaphore(0)

    async def body(llm: AsyncLLM) -> None:
        prepare = llm._door.prepare

        def compile_slowly(prompt: Any, params: SamplingParams, **options: Any) -> Any:
            if params.structured_outputs is not None:
                begun.release()
                release.wait()
                raise InvalidRequestError("took its time")
            return prepare(prompt, params, **options)

        monkeypatch.setattr(llm._door, "prepare", compile_slowly)
        wanted = seeded(structured_outputs=StructuredOutputsParams(regex="a+"))
        flood = [asyncio.create_task(last(llm, "x", wanted)) for _ in range(80)]
        try:
            async with asyncio.timeout(60):  # for ever, where they share threads with others
                while not begun.acquire(blocking=False):
                    await asyncio.sleep(0)
                await last(llm, "x" * (LONG_TEXT_CHARS + 1), seeded(max_tokens=1))
                await llm.stats()
        finally:
            release.set()
        assert all(isinstance(e, InvalidRequestError) for e in await asyncio.gather(*flood, return_exceptions=True))

    run(body, multiprocess=False)


def test_a_known_grammar_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM) -> None:
        grammar = Outcome(host_grammar="known")
        monkeypatch.setattr(llm._door, "known_grammar", lambda params: grammar)
        prepared = []

        def prepare(*args: Any, **options: Any) -> Any:
            prepared.append((threading.current_thread(), options["grammar"]))
            raise InvalidRequestError("enough")

        monkeypatch.setattr(llm._door, "prepare", prepare)
        with pytest.raises(InvalidRequestError, match="enough"):
            await last(llm, "x", seeded(structured_outputs=StructuredOutputsParams(regex="a+")))
        assert prepared == [(threading.current_thread(), grammar)]

    run(body, multiprocess=False)


def test_one_engine_serves_one_loop_after_another() -> None:
    llm = AsyncLLM("fake", multiprocess=False)
    for _ in range(2):
        assert asyncio.run(last(llm, "a", seeded(max_tokens=2))).outputs[0].text == "bc"

    async def leave_one_open() -> None:
        stream = llm.generate("a", ENDLESS)
        await anext(stream)

        async def other_loop() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                await last(llm, "b")

        await asyncio.to_thread(asyncio.run, other_loop())

    asyncio.run(leave_one_open())
    assert asyncio.run(last(llm, "a", seeded(max_tokens=2))).outputs[0].text == "bc"
    llm.shutdown()


def test_letting_go_of_it_stops_the_engine() -> None:
    before = ours()
    llm = AsyncLLM("fake", multiprocess=False)
    engine = core(llm)
    del llm
    gc.collect()
    assert engine.is_shut_down
    assert ours() <= before


def test_unknown_engine_arguments() -> None:
    with pytest.raises(UnknownParameterError):
        AsyncLLM("fake", max_model_length=3)
