"""Messages survive the wire; anything else is refused."""

from __future__ import annotations

import msgspec
import pytest

from headway.core import errors
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats, RequestUpdate, StepUpdates, TokenLogprobsRow
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
