"""Messages survive the wire; anything else is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headway.core import errors
from headway.core.automaton import MAX_STATES, MAX_TRANSITIONS, Automaton, Vocabulary
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats, PooledBatch, RequestUpdate, StepUpdates, TokenLogprobsRow
from headway.core.params import SamplingParams
from headway.engine import channel
from tests.engine.fake_core import model_info

REQUEST = AddRequest(
    request_id="0-1",
    prompt_token_ids=[1, 2, 70000],
    params=SamplingParams(n=2, stop=["x"], logit_bias={5: -1.5}, seed=-3, allowed_token_ids=[4], max_tokens=None),
    seed=2**64 - 1,
    eos_token_ids=[9],
    bad_words_token_ids=[[1], [2, 3]],
    cache_salt="salt",
)


@pytest.mark.parametrize(
    "command",
    [
        channel.Boot(EngineArgs(model="m", run_ahead=3, max_model_len=77), "module:function", 20),
        channel.Boot(EngineArgs(), "module:function"),
        channel.Add([REQUEST, REQUEST]),
        channel.Abort(["0-1", "2"]),
        channel.StatsRequest(),
        channel.Shutdown(),
    ],
)
def test_commands_survive(command: channel.Command) -> None:
    assert channel.decode_command(channel.encode(command)) == command


@pytest.mark.parametrize(
    "report",
    [
        channel.Ready(model_info()),
        channel.Updates(
            StepUpdates(
                ["0", "1"],
                [1, 7],
                {
                    0: RequestUpdate(
                        request_id="0",
                        new_token_ids=[1],
                        new_logprobs=[TokenLogprobsRow([1, 2], [-0.25, -1.5], 4)],
                        finish_reason="stop",
                        stop_token_id=1,
                        error="e",
                    )
                },
            )
        ),
        channel.Dead("ConfigError", "no", "field"),
    ],
)
def test_reports_survive(report: channel.Report) -> None:
    assert channel.decode_report(channel.encode(report)) == report


def apart(update: RequestUpdate | PooledBatch) -> list[RequestUpdate]:
    if isinstance(update, RequestUpdate):
        return [update]
    size = 4 * update.width
    made = []
    for place, name in enumerate(update.request_ids):
        vector = update.vectors[place * size : (place + 1) * size]
        made.append(RequestUpdate(request_id=name, new_token_ids=[], finish_reason="stop", pooled=vector))
        made[-1].queue_seconds = update.queue_seconds[place] if update.queue_seconds else None
    return made


@pytest.mark.parametrize("width", [0, 2])
@pytest.mark.parametrize("special", [[], [0], [1], [2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("late", [0, 2])
def test_nobodys_update_is_lost_on_its_way(width: int, special: list[int], timed: bool, late: int) -> None:
    """Columns, objects for those that say more, what was refused meanwhile: in any mixture, whole or in parts."""
    names = ["a", "b", "c"]
    more = {n: RequestUpdate(request_id=names[n], new_token_ids=[], error="no", finish_reason="error") for n in special}
    step = StepUpdates(names, [7, 8, 9], dict(more))
    if width:
        step.vectors, step.width = bytes(range(8 * len(names))), width
        step.queue_seconds = [0.5, None, 2.5] if timed else []
    step.add([RequestUpdate(request_id=f"late {n}", new_token_ids=[], error="refused") for n in range(late)])
    told = channel.decode_report(channel.encode(channel.Updates(step)))
    assert isinstance(told, channel.Updates)
    whole = list(step)
    assert [each.request_id for each in whole] == [*names, *(f"late {n}" for n in range(late))] and len(step) == len(
        whole
    )
    for place, each in enumerate(whole[: len(names)]):
        if place in more:
            assert each == more[place]
        elif width:
            size = 4 * width
            assert each.pooled == bytes(range(8 * len(names)))[place * size : (place + 1) * size]
            assert each.queue_seconds == (step.queue_seconds[place] if timed else None)
        else:
            assert each.new_token_ids == [7 + place]
    for updates in (step, told.updates):
        assert list(updates) == whole and [each for part in updates.parts() for each in apart(part)] == whole


def test_tokens_too_long_for_their_length_count_as_none() -> None:
    tokens = [b"a" * (2**16 - 1), b"b" * 2**16, b"", b"c", b"d" * (2**16 + 1)]
    found = Vocabulary.of(tokens)
    assert found.tokens == [tokens[0], b"", b"", b"c", b""] and found.size == 5 and found.byte_set() == {ord("c")}
    learn = channel.decode_command(channel.encode(channel.Learn(found)))
    assert isinstance(learn, channel.Learn) and learn.vocabulary.tokens == found.tokens


@pytest.mark.parametrize(("states", "classes"), [(MAX_STATES, 1), (MAX_TRANSITIONS // 256, 256), (2, 1)])
def test_automata_fill_their_room_and_no_more(states: int, classes: int) -> None:
    def made(states: int, **changes: Any) -> Automaton:
        sizes: dict[str, Any] = {"num_states": states, "num_classes": classes, "start": 1, "first_accepting": states}
        sizes |= {"can_go_on": False, "classes": bytes([classes - 1]) * 256}
        return Automaton(**sizes | {"transitions": bytes(2 * states * classes), "kinds": bytes(2 * states)} | changes)

    made(states).check()
    wrong = [made(states, start=0), made(states, start=states), made(states, first_accepting=0)]
    wrong += [made(states, first_accepting=states + 1), made(states, kinds=bytes(2 * states - 2))]
    wrong += [
        made(states, classes=bytes([classes - 1]) * 255),
        made(states, transitions=bytes(2 * states * classes + 2)),
    ]
    wrong += [made(states + 1)] if states > 2 else []
    wrong += [made(states, classes=bytes([classes]) * 256)] if classes < 256 else []
    for each in wrong:
        with pytest.raises(errors.InvalidRequestError, match="malformed"):
            each.check()


def test_stats_survive() -> None:
    stats = EngineStats(num_running=3, kv_cache_usage=0.5)
    assert channel.decode_stats(channel.encode(stats)) == stats


@pytest.mark.parametrize(
    "data", [b"", b"\x80", channel.encode(["Nobody", 1]), channel.encode(channel.Ready(model_info()))]
)
def test_a_stranger_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        channel.decode_command(data)


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("c"),
        errors.ModelError("m"),
        errors.UnsupportedModelError("u"),
        errors.WeightsError("w"),
        errors.OutOfMemoryError("o"),
        errors.EngineDeadError("d"),
        errors.InvalidRequestError("i", "top_p"),
        errors.UnknownParameterError("tpo_p", ["top_p"], "SamplingParams"),
    ],
)
def test_our_errors_come_back_as_themselves(error: errors.HeadwayError) -> None:
    again = channel.rebuild(channel.decode_report(channel.encode(channel.describe(error))))  # type: ignore[arg-type]
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert getattr(again, "parameter", None) == getattr(error, "parameter", None)


@pytest.mark.parametrize("kind", ["KeyError", "SystemExit", "difflib", "annotations"])
def test_other_errors_come_back_as_engine_death(kind: str) -> None:
    again = channel.rebuild(channel.Dead(kind, "what happened"))
    assert type(again) is errors.EngineDeadError
    assert "what happened" in str(again)


def test_a_bug_is_described_with_its_traceback() -> None:
    dead = channel.describe(KeyError("k"), "Traceback ...")
    assert "KeyError" in dead.message
    assert "Traceback" in dead.message
