"""The two clients that live in this process."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator

import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, EngineDeadError
from headway.core.messages import AddRequest, RequestUpdate, StepUpdates
from headway.core.params import SamplingParams
from headway.engine.client import EngineClient, InprocClient, ThreadClient
from tests.engine import fake_core

FACTORY = "tests.engine.fake_core:build"


def request(name: str, *prompt: int, max_tokens: int = 3) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        eos_token_ids=[fake_core.EOS],
    )


def drain(client: EngineClient, count: int) -> dict[str, list[RequestUpdate]]:
    """Poll until ``count`` requests have finished."""
    seen: dict[str, list[RequestUpdate]] = {}
    while sum(updates[-1].finish_reason is not None for updates in seen.values()) < count:
        for update in client.poll():
            assert isinstance(update, RequestUpdate)
            seen.setdefault(update.request_id, []).append(update)
    return seen


@pytest.fixture(params=[InprocClient, ThreadClient])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    made = request.param(EngineArgs(model="fake"), FACTORY)
    yield made
    made.close()


def test_requests_run_to_their_end(client: EngineClient) -> None:
    assert client.info.model == "fake"
    client.add([request("a", 10), request("b", 20, max_tokens=2)])
    seen = drain(client, 2)
    assert [t for u in seen["a"] for t in u.new_token_ids] == [11, 12, 13]
    assert [t for u in seen["b"] for t in u.new_token_ids] == [21, 22]


def test_a_refused_request_fails_alone(client: EngineClient) -> None:
    client.add([request("bad", fake_core.REFUSE), request("good", 5)])
    seen = drain(client, 2)
    assert seen["bad"][-1].finish_reason == "error"
    assert seen["bad"][-1].error == "refused"
    assert seen["good"][-1].finish_reason == "length"


def test_abort_stops_a_request(client: EngineClient) -> None:
    client.add([request("long", 1, max_tokens=10**6)])
    client.poll()
    client.abort(["long", "unknown"])
    client.add([request("next", 1)])
    seen = drain(client, 1)
    assert seen["next"][-1].finish_reason == "length"
    assert client.stats().num_running == 0


def test_poll_keeps_its_timeout(client: EngineClient) -> None:
    assert client.poll(timeout=0.001) == []


def test_a_failing_step_kills_the_engine(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it holds, memory and sockets, is given back."""
    closed = threading.Event()
    monkeypatch.setattr(fake_core.FakeCore, "shutdown", lambda core: closed.set())
    client.add([request("x", fake_core.CRASH)])
    with pytest.raises(EngineDeadError, match="crash asked for"):
        client.poll()
    with pytest.raises(EngineDeadError):
        client.add([request("y", 1)])
    assert not client.has_work()
    assert closed.wait(10)


def test_a_closed_client_refuses_everything(client: EngineClient) -> None:
    client.close()
    client.close()
    for call in (client.poll, client.stats, lambda: client.add([]), lambda: client.abort([])):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


@pytest.mark.parametrize("kind", [InprocClient, ThreadClient])
def test_boot_errors_are_raised_as_they_are(kind: type[InprocClient] | type[ThreadClient]) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        kind(EngineArgs(model="wrong-config"), FACTORY)
    with pytest.raises(KeyError):
        kind(EngineArgs(model="bug"), FACTORY)


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "headway-engine"}


def wait_until_idle(client: ThreadClient) -> None:
    shared = client._shared
    with shared.changed:
        shared.changed.wait_for(lambda: not shared.busy)


def test_the_thread_sleeps_while_idle_and_ends_with_the_client() -> None:
    before = engine_threads()  # of servers that other modules of this process keep for the session
    client = ThreadClient(EngineArgs(model="fake"), FACTORY)
    client.add([request("a", 1)])
    drain(client, 1)
    wait_until_idle(client)
    steps = client.stats().num_steps
    assert client.poll(timeout=0.02) == []
    assert client.stats().num_steps == steps
    del client
    gc.collect()
    assert engine_threads() <= before


def test_close_wakes_a_blocked_poll() -> None:
    client = ThreadClient(EngineArgs(model="fake"), FACTORY)
    errors: list[EngineDeadError] = []

    def wait() -> None:
        try:
            client.poll()
        except EngineDeadError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    client.close()
    waiter.join()
    assert errors


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt. A shell that starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_waits_for_the_end_of_the_step() -> None:
    client = InprocClient(EngineArgs(model="fake"), FACTORY)
    core = client._core
    assert isinstance(core, fake_core.FakeCore)
    step, order = core.step, []

    def interrupted_step() -> StepUpdates:
        signal.raise_signal(signal.SIGINT)
        updates = step()
        order.append("step done")
        return updates

    core.step = interrupted_step  # type: ignore[method-assign]
    client.add([request("a", 1)])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        client.poll()
    assert order == ["step done"]
    assert signal.getsignal(signal.SIGINT) is before
    client.close()
