"""Options of other engines are refused with what stands for them here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.foreign import INSTEAD
from headway.cli.main import app

KNOWN = set(re.findall(r"--[a-z0-9-]+", Path(__file__).with_name("cli_options.txt").read_text("utf-8")))


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "embed"])
def test_an_option_of_another_engine_says_what_to_use(command: str) -> None:
    for arguments in (["smollm2", "--mem-fraction-static", "0.9"], ["--mem-fraction-static=0.9", "smollm2"]):
        result = CliRunner().invoke(app, [command, *arguments])
        assert result.exit_code == 2
        assert "No such option: --mem-fraction-static: use --gpu-memory-utilization" in result.output


def test_options_that_are_only_misspelt_get_suggestions() -> None:
    result = CliRunner().invoke(app, ["serve", "smollm2", "--max-num-seq", "3"])
    assert result.exit_code == 2 and "--max-num-seqs" in result.output


def test_only_options_that_there_are_get_recommended() -> None:
    assert not INSTEAD.keys() & KNOWN
    for option, instead in INSTEAD.items():
        assert set(re.findall(r"--[a-z0-9-]+", instead)) <= KNOWN, option
