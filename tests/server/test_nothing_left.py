"""Whoever waits for several things at once leaves nothing behind: what was given up has ended, its clean-up included, when the
answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from headway.api.hearing import online
from headway.server.launch import Supervisor
from headway.server.service import ClientGoneError, _beside, _merged


async def slow_end(ended: list[Any], name: Any) -> None:
    """It goes on until it is cancelled, and its clean-up takes a few turns."""
    try:
        await asyncio.Event().wait()
    finally:
        for _ in range(3):
            await asyncio.sleep(0)
        ended.append(name)


async def endless(ended: list[Any], name: Any, fails: bool = False) -> AsyncIterator[Any]:
    try:
        while True:
            yield name
            for _ in range(9):  # others have their turns
                await asyncio.sleep(0)
            if fails:
                raise KeyError(name)
    finally:
        await asyncio.sleep(0)
        ended.append(name)


def left() -> set[Any]:
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize("fails", [False, True])
def test_streams_that_are_merged(fails: bool) -> None:
    async def run() -> None:
        ended: list[int] = []
        merged: Any = _merged([endless(ended, 0), endless(ended, 1, fails), endless(ended, 2)])
        assert await anext(merged) == (0, 0)
        if fails:
            with pytest.raises(KeyError):
                async for _ in merged:
                    pass
        else:
            await merged.aclose()
        assert len(ended) == 3 and not left()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["done", "gone", "failed"])
def test_work_beside_a_connection(how: str) -> None:
    async def run() -> None:
        ended: list[str] = []

        async def work() -> int:
            if how == "gone":
                await slow_end(ended, "work")
            if how == "failed":
                raise KeyError
            return 7

        async def receive() -> Any:
            if how != "gone":
                await slow_end(ended, "receive")
            return {"type": "http.disconnect"}

        answer: Coroutine[Any, Any, int] = _beside(receive, work())
        if how == "done":
            assert await answer == 7
        else:
            with pytest.raises(ClientGoneError if how == "gone" else KeyError):
                await answer
        assert ended == ["work" if how == "gone" else "receive"] and not left()

    asyncio.run(run())


def test_the_first_of_several_events() -> None:
    """The lowest number of those that have come; the others have ended."""

    async def run() -> None:
        ended: list[int] = []
        now = asyncio.sleep(0)
        assert await Supervisor._either(slow_end(ended, 0), now, slow_end(ended, 2), asyncio.sleep(0)) == 1
        assert sorted(ended) == [0, 2] and not left()

    asyncio.run(run())


def test_windows_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are still heard end with the answer."""

    async def run() -> None:
        ended: list[Any] = []

        def window(_recording: Any, number: int, *_: Any) -> AsyncIterator[Any]:
            return endless(ended, (SimpleNamespace(finished=False), number))

        monkeypatch.setattr(online, "_window", window)
        recording: Any = SimpleNamespace(spans=[0, 1, 2])
        heard: Any = online._side_by_side(recording)
        assert (await anext(heard))[2] == 0
        await asyncio.sleep(0.001)
        await heard.aclose()
        assert len(ended) == 3 and not left()

    asyncio.run(run())
