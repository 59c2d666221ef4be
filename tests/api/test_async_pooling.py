"""Pooling with AsyncLLM: many callers at once, callers that leave, engines that die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headway import AsyncLLM, EngineDeadError, InvalidRequestError, PoolingParams, RequestFailedError
from headway.api.hub import SENT_AT_ONCE
from headway.api.long_texts import LONG_TEXT_CHARS, TextLanes
from headway.api.pooling.requests import OpenPooling
from headway.core.task import Task
from tests.api.pooling_core import CLS, SEP, WORDS, PoolingCore, install, vector


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def run(work: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def core(llm: AsyncLLM) -> PoolingCore:
    found = llm._hub.client._shared.core
    assert isinstance(found, PoolingCore)
    return found


def test_many_callers_get_their_own_vectors() -> None:
    async def many() -> None:
        async with AsyncLLM("embed", multiprocess=False) as llm:
            calls = [llm.pool([f"w{i}", f"w{i} w{i + 1}"]) for i in range(50)]
            groups = await asyncio.gather(*calls)
            for i, group in enumerate(groups):
                first, second = llm.outputs(group)
                one, two = WORDS.index(f"w{i}"), WORDS.index(f"w{i + 1}")
                assert first.prompt_token_ids == [CLS, one, SEP] and second.prompt_token_ids == [CLS, one, two, SEP]
                assert first.outputs.embedding == vector(group.messages[0])
            metrics = llm.request_metrics
            assert metrics.tasks == {"embed": 100} and metrics.finished["stop"] == 100
            assert metrics.prompt_tokens.count == metrics.whole.count == metrics.queue.count == 100
            assert not llm._processor.requests()

    run(many())


def test_encode_yields_once_and_score_compares() -> None:
    async def both() -> None:
        async with AsyncLLM("embed", multiprocess=False) as llm:
            outputs = [output async for output in llm.encode("w1", request_id="mine")]
            assert [o.request_id for o in outputs] == ["mine"] and outputs[0].outputs.data.shape == (8,)
            job, group = await llm.score("w1", ["w1", "w2"], PoolingParams(truncate_prompt_tokens=-1))
            assert next(o.outputs.score for o in llm.score_outputs(job, group)) == pytest.approx(1)
            with pytest.raises(InvalidRequestError, match="serves embed, not generate"):
                async for _ in llm.generate("w1"):
                    pass
            with pytest.raises(InvalidRequestError, match="serves embed, not classify"):
                await llm.pool(["w1"], None, Task.CLASSIFY)
            assert await llm.tokenize("w1 w2") == [CLS, WORDS.index("w1"), WORDS.index("w2"), SEP]

    run(both())


LONG = "w1 " * 2000
CUT = PoolingParams(truncate_prompt_tokens=-1)
Call = Callable[[AsyncLLM], Coroutine[Any, Any, Any]]
LONG_CALLS: list[tuple[str, Call]] = [
    ("embed", lambda llm: llm.pool([LONG], CUT)),
    ("embed", lambda llm: llm.pool(["w1", LONG], CUT)),
    ("embed", lambda llm: llm.pool(["w1", {"prompt": LONG}], CUT)),
    ("embed", lambda llm: llm.pool([f"w{i % 9}" for i in range(300)], CUT)),
    *(
        (name, call)
        for name in ("embed", "cross")
        for call in (
            lambda llm: llm.score(LONG, "w1", CUT),
            lambda llm: llm.score("w1", LONG, CUT),
            lambda llm: llm.score("w1", ["w2", LONG], CUT),
            lambda llm: llm.score(["w2", LONG], ["w1", "w2"], CUT),
        )
    ),
    ('labels {"num_token_types": 2}', lambda llm: llm.pool_pairs(LONG, "w1", CUT)),
    ('labels {"num_token_types": 2}', lambda llm: llm.pool_pairs("w1", LONG, CUT)),
]


@pytest.mark.parametrize("number", range(len(LONG_CALLS)))
def test_what_takes_long_is_prepared_beside_the_event_loop(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in a call the long text stands, and where there are many short ones."""
    model, call = LONG_CALLS[number]
    asked: list[int] = []
    beside = TextLanes.beside

    async def listened(lanes: TextLanes, work: Callable[[], Any], size: int) -> Any:
        asked.append(size)
        return await beside(lanes, work, size)

    monkeypatch.setattr(TextLanes, "beside", listened)

    async def ask() -> None:
        async with AsyncLLM(model, multiprocess=False) as llm:
            await llm.pool_pairs("w1", "w2") if "num_token_types" in model else await (
                llm.score("w1", "w2") if model == "cross" else llm.pool(["w1"])
            )
            assert asked == [], "short texts are not"
            await call(llm)
            assert len(asked) == 1 and asked[0] > LONG_TEXT_CHARS

    run(ask())


def test_one_wrong_prompt_fails_its_call_alone() -> None:
    async def wrong() -> None:
        async with AsyncLLM("embed", multiprocess=False) as llm:
            others = [asyncio.create_task(llm.pool([f"w{i}"])) for i in range(9)]
            with pytest.raises(InvalidRequestError, match="prompt 1 is empty"):
                await llm.pool(["w1", ""])
            with pytest.raises(RequestFailedError, match="failure asked for"):
                await llm.pool(["w1", "fail", "w2"])
            with pytest.raises(InvalidRequestError, match="wrong prompt"):
                await llm.pool(["wrong"])
            with pytest.raises(InvalidRequestError, match="at most 64 fit"):
                await llm.pool(["w1 " * 5000])
            assert all(group.finished for group in await asyncio.gather(*others))
            long = await llm.pool(["w1 " * 5000] * 3, PoolingParams(truncate_prompt_tokens=-1))
            assert [len(m.prompt_token_ids) for m in long.messages] == [64] * 3

    run(wrong())


def test_who_leaves_aborts_all_of_his_prompts() -> None:
    async def leave() -> None:
        async with AsyncLLM("embed", multiprocess=False) as llm:
            task = asyncio.create_task(llm.pool(["hang", "w1 hang", "w1"]))
            while not core(llm).seen:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not llm._processor.requests()
            await llm.pool(["w2"])
            assert set(core(llm).aborted) >= {"p0", "p1"} and not core(llm).requests
            pending = asyncio.create_task(llm.pool(["hang"], request_id="named"))
            while len(core(llm).seen) < 5:
                await asyncio.sleep(0)
            await llm.abort("named")
            with pytest.raises(RequestFailedError, match="aborted"):
                await pending

    run(leave())


def test_a_dead_engine_ends_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def die() -> None:
        async with AsyncLLM("embed", multiprocess=False) as llm:
            waiting = asyncio.create_task(llm.pool(["hang"]))
            while not core(llm).seen:
                await asyncio.sleep(0)
            monkeypatch.setattr(core(llm), "step", lambda: 1 / 0)
            with pytest.raises(EngineDeadError):
                await waiting
            with pytest.raises(EngineDeadError):
                await llm.pool(["w1"])

    run(die())


def test_vectors_cross_from_another_process() -> None:
    async def cross() -> None:
        async with AsyncLLM("tokens", multiprocess=True) as llm:
            group: OpenPooling = await llm.pool(["w1", "w2 w3"], None, Task.TOKEN_EMBED)
            assert [array.shape for array in llm.arrays(group)] == [(3, 2), (4, 2)]

    run(cross())


class Recorder:
    """Takes the place of a client: notes what the engine is told, in order."""

    def __init__(self, client: Any) -> None:
        self._client, self.told = client, list[tuple[str, int]]()
        self.error: EngineDeadError | None = None

    def add(self, requests: list[Any]) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(("add", len(requests)))
        self._client.add(requests)

    def abort(self, request_ids: list[str]) -> None:
        self.told.append(("abort", len(request_ids)))
        self._client.abort(request_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def test_the_engine_hears_of_callers_of_one_turn_in_one_message() -> None:
    async def turn() -> None:
        async with AsyncLLM("embed", multiprocess=False) as llm:
            llm._hub.client = recorder = Recorder(llm._hub.client)
            await asyncio.gather(*(llm.pool([f"w{i}"]) for i in range(SENT_AT_ONCE - 1)))
            assert recorder.told == [("add", SENT_AT_ONCE - 1)]
            recorder.told.clear()
            await asyncio.gather(*(llm.pool([f"w{i}"]) for i in range(SENT_AT_ONCE + 5)))
            assert recorder.told == [
                ("add", SENT_AT_ONCE),
                ("add", 5),
            ]  # a full bundle does not wait for the turn's end

    run(turn())


def test_an_abort_does_not_overtake_the_message_it_ends() -> None:
    async def leaving() -> None:
        async with AsyncLLM("embed", multiprocess=False) as llm:
            llm._hub.client = recorder = Recorder(llm._hub.client)
            call = asyncio.ensure_future(llm.pool(["hang"], request_id="mine"))
            ended = asyncio.ensure_future(llm.abort("mine"))  # in the turn in which the call begins
            await ended
            with pytest.raises(RequestFailedError, match="aborted"):
                await call
            assert recorder.told == [("add", 1), ("abort", 1)]
            await llm.pool(["w1"])
            assert not core(llm).requests

    run(leaving())


def test_an_engine_found_dead_when_the_message_goes_wakes_its_callers() -> None:
    async def dying() -> None:
        async with AsyncLLM("embed", multiprocess=False) as llm:
            llm._hub.client = recorder = Recorder(llm._hub.client)
            recorder.error = EngineDeadError("gone")
            found = await asyncio.gather(llm.pool(["w1"]), llm.pool(["w2"]), return_exceptions=True)
            assert [str(each) for each in found] == ["gone", "gone"]
            assert not llm._processor.requests()

    run(dying())


def test_ids_are_checked() -> None:
    async def checked() -> None:
        async with AsyncLLM("embed", multiprocess=False, skip_tokenizer_init=True) as llm:
            for right in ([0], [len(WORDS) - 1], [[7, 8], [9]]):
                await llm.pool(right if isinstance(right[0], list) else [right])
            for wrong in (-1, len(WORDS), 2**40, -(2**40), True, 1.0, None):
                with pytest.raises(InvalidRequestError, match=r"vocabulary|integers"):
                    await llm.pool([[7], [8, wrong, 9]])

    run(checked())


def test_parameters_count_in_every_call() -> None:
    async def asked() -> None:
        async with AsyncLLM("embed", multiprocess=False) as llm:
            for _ in range(2):
                for dimensions in (2, 3, None):
                    group = await llm.pool(["w1"], PoolingParams(dimensions=dimensions))
                    assert len(llm.arrays(group)[0]) == (dimensions or 8)
                with pytest.raises(InvalidRequestError, match="at most 8"):
                    await llm.pool(["w1"], PoolingParams(dimensions=9))

    run(asked())
