"""Flags come from the fields, so no field can be forgotten."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headway.cli.errors import clean_errors
from headway.cli.options import engine_kwargs, engine_parameters, field_help, human_int, run_ahead, with_options
from headway.core.config import EngineArgs
from headway.core.params import SamplingParams

runner = CliRunner()


def collect(*arguments: str) -> tuple[EngineArgs, dict[str, Any]]:
    """What a command gets to see."""
    seen: list[tuple[EngineArgs, dict[str, Any]]] = []

    @with_options(sampling=True)
    def command(*, engine: EngineArgs, sampling: dict[str, Any]) -> None:
        seen.append((engine, sampling))

    app = typer.Typer(rich_markup_mode=None)
    app.command()(clean_errors(command))
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return seen[0]


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("-1", -1), ("25.6k", 25600), ("32K", 32768), ("1.5M", 1572864), ("2g", 2 * 10**9)]
)
def test_integers_as_vllm_reads_them(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e3", "seven", "3T"])
def test_other_integers_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        human_int(text)


def test_run_ahead() -> None:
    assert (run_ahead("auto"), run_ahead("2")) == ("auto", 2)


def test_without_flags_the_defaults_hold() -> None:
    assert collect() == (EngineArgs(), {})


def test_every_engine_field_has_a_flag_and_a_description() -> None:
    names = {parameter.name.removeprefix("engine_") for parameter in engine_parameters()}
    assert names == {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(field_help(EngineArgs)) == names
    texts = field_help(SamplingParams)
    assert texts["stop"].startswith("strings that end the text")
    assert texts["presence_penalty"] == texts["frequency_penalty"]


def test_engine_flags() -> None:
    engine, _ = collect(
        "folder", "--max-model-len", "4k", "--no-enable-prefix-caching", "--enforce-eager", "--run-ahead", "2",
        "--gpu-memory-utilization", "0.5", "--multiprocess", "--dtype", "float32", "--seed", "3",
    )  # fmt: skip
    assert engine == EngineArgs(
        model="folder", max_model_len=4000, enable_prefix_caching=False, enforce_eager=True, run_ahead=2,
        gpu_memory_utilization=0.5, multiprocess=True, dtype="float32", seed=3,
    )  # fmt: skip
    assert EngineArgs(**engine_kwargs(engine)) == engine


def test_the_model_may_be_named_either_way() -> None:
    assert collect("--model", "m")[0].model == "m"
    assert collect("m", "--model", "m")[0].model == "m"


def test_sampling_flags() -> None:
    _, sampling = collect(
        "--temperature", "0", "--top-k", "5", "--stop", "a", "--stop", "b", "--stop-token-ids", "3", "--ignore-eos",
        "--sampling-seed", "9", "--no-skip-special-tokens", "--max-tokens", "1k",
    )  # fmt: skip
    assert sampling == {
        "temperature": 0.0, "top_k": 5, "stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": True,
        "seed": 9, "skip_special_tokens": False, "max_tokens": 1000,
    }  # fmt: skip
    assert SamplingParams(**sampling).stop == ["a", "b"]


def test_drafts_are_asked_for_in_json() -> None:
    engine, _ = collect("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    assert engine.speculative_config is not None and engine.speculative_config.num_speculative_tokens == 3
    assert EngineArgs(**engine_kwargs(engine)) == engine
