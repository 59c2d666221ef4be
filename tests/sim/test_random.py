"""The tools of the random scenarios: ties are told from mistakes, failures can be replayed, a loop without end is cut off."""

from __future__ import annotations

import copy
import re

import pytest

from headway.core.messages import AddRequest
from headway.device.sim import RaceError
from headway.device.staging import Staging, StagingRing
from headway.engine.core import EngineCore
from tests.engine.harness import Answer, request
from tests.sim import replay
from tests.sim.harness import Scenario, ask_oracle, play
from tests.sim.rounding import rows_tie, settle, settle_prefix

ROW = ([35, 93, 4], [-5.448553, -0.9192304, -1.3], 30)


def test_a_seed_gives_the_same_scenario() -> None:
    for seed in (17, 10**6 + 17):
        one, other = Scenario(seed), Scenario(seed)
        assert (one.overrides, one.abort_rate) == (other.overrides, other.abort_rate)
        assert one.requests == other.requests
    assert Scenario(17).requests != Scenario(18).requests


@pytest.mark.parametrize(
    ("row", "ties"),
    [
        (([35, 93, 4], [-5.448554, -0.9192296, -1.3], 29), True),
        (([35, 93, 4], [-5.448553, -0.9192304, -1.3], 28), False),
        (([35, 4, 93], [-5.448553, -0.9192304, -1.3], 30), False),
        (([35, 93, 7], [-5.448553, -0.9192304, -1.30001], 30), True),
        (([35, 93, 4], [-5.448553, -0.9192304, -1.301], 30), False),
        (([36, 93, 4], [-5.448553, -0.9192304, -1.3], 30), False),
        (([35, 93], [-5.448553, -0.9192304], 30), False),
    ],
    ids=["rank", "rank by two", "swapped", "last of equals", "value", "the token itself", "shorter"],
)
def test_rows_of_logprobs(row: tuple[list[int], list[float], int], ties: bool) -> None:
    assert rows_tie(row, ROW) is ties
    assert rows_tie(row, row)


def drawn(each: AddRequest) -> tuple[Answer, Answer]:
    """An answer of the oracle and a copy to spoil."""
    answer = ask_oracle(each)
    return answer, copy.deepcopy(answer)


def test_a_wrong_token_is_no_tie() -> None:
    each = request("0", [5, 6, 7, 8], seed=3, ignore_eos=True, max_tokens=6, temperature=0.8, top_p=0.9)
    truth, answer = drawn(each)
    settle(answer, truth, each, ask_oracle)
    settle_prefix(answer, truth, each, ask_oracle)
    answer.token_ids[3] = (answer.token_ids[3] + 1) % 97
    with pytest.raises(AssertionError):
        settle(answer, truth, each, ask_oracle)
    with pytest.raises(AssertionError):
        settle_prefix(answer, truth, each, ask_oracle)


def test_a_token_that_was_as_likely_is_a_tie() -> None:
    """Two tokens are allowed; a bias makes them equal up to rounding, so either may be drawn."""
    plain = request("0", [5, 6, 7], allowed_token_ids=[10, 20], max_tokens=1, temperature=0.0, logprobs=97)
    row = ask_oracle(plain).logprobs[0]
    values = dict(zip(row[0], row[1], strict=True))
    each = copy.deepcopy(plain)
    each.params.logprobs = None
    each.params.logit_bias = {10: values[20] - values[10]}
    truth, answer = drawn(each)
    answer.token_ids = [30 - truth.token_ids[0]]
    settle(answer, truth, each, ask_oracle)
    each.params.logit_bias = {10: values[20] - values[10] + 1e-3}
    truth, answer = drawn(each)
    answer.token_ids = [30 - truth.token_ids[0]]
    with pytest.raises(AssertionError):
        settle(answer, truth, each, ask_oracle)


def test_other_ends_are_no_ties() -> None:
    each = request("0", [5, 6, 7, 8], seed=3, ignore_eos=True, max_tokens=6)
    truth, answer = drawn(each)
    answer.token_ids.pop()
    with pytest.raises(AssertionError):
        settle(answer, truth, each, ask_oracle)
    truth, answer = drawn(each)
    answer.finish_reason = "stop"
    with pytest.raises(AssertionError):
        settle(answer, truth, each, ask_oracle)


def test_a_failure_names_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    acquire = StagingRing.acquire

    def careless(self: StagingRing) -> Staging:
        return self._free_when_fenced.pop(0) if self._free_when_fenced else acquire(self)

    monkeypatch.setattr(StagingRing, "acquire", careless)
    found: list[RaceError] = []
    for seed in range(40):
        try:
            play(seed)
        except RaceError as error:
            found.append(error)
            break
    assert found, "the planted fault went unnoticed"
    command = re.fullmatch(r"again: python -m tests\.sim\.replay (\d+)", found[0].__notes__[0])
    assert command is not None
    with pytest.raises(RaceError) as again:
        replay.main([command[1]])
    assert str(again.value) == str(found[0])
    assert f"seed {command[1]}: " in capsys.readouterr().out


def test_a_loop_without_progress_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(self: EngineCore) -> list[object]:
        return []

    ask_oracle(request("0", [1]))  # the oracle's own steps are real
    scenario = Scenario(5)
    monkeypatch.setattr(Scenario, "max_turns", 30)
    monkeypatch.setattr("tests.sim.harness.expected", lambda requests: {})
    monkeypatch.setattr(EngineCore, "step", idle)
    with pytest.raises(AssertionError, match="without progress"):
        scenario.play()
