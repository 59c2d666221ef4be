"""The examples of docs/server.md and the README work as they stand, and the lists of the former are true."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from headway.core.config import EngineArgs
from headway.server.fields import HARMLESS, REFUSED
from headway.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest
from headway.server.settings import ServerSettings
from tests.house.source import ROOT
from tests.server.live import Live

TEXT = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
COMMANDS = [
    command
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for command in re.split(r"\n(?=curl)", block.strip())
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS += [
    line
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("curl")
]


def test_both_pages_show_curl() -> None:
    assert any("max_completion_tokens" in command and "Hello!" in command for command in COMMANDS)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", COMMANDS)
def test_curl(command: str, smollm2: Live) -> None:
    words = shlex.split(command.replace("http://127.0.0.1:8000", smollm2.url))
    assert words[0] == "curl"
    done = subprocess.run([*words, "--fail-with-body"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    if "stream" in command:
        assert done.stdout.rstrip().endswith("data: [DONE]") and '"usage":{' in done.stdout
    else:
        assert json.loads(done.stdout)


def test_python(smollm2: Live) -> None:
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    code = code.replace("http://127.0.0.1:8000", smollm2.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_every_setting_has_its_flag_in_the_table() -> None:
    names = ServerSettings.__dataclass_fields__
    missing = [name for name in names if f"--{name.replace('_', '-')}" not in TEXT]
    assert not missing
    assert not set(names) & set(EngineArgs.__dataclass_fields__), "one command takes both"


def test_fields_are_described() -> None:
    known = set(CompletionRequest.__struct_fields__) | set(ChatRequest.__struct_fields__)
    known |= set(ResponsesRequest.__struct_fields__)
    assert set(HARMLESS) <= known
    assert all(f"`{name}" in TEXT for name in HARMLESS)
    assert not (set(REFUSED) & known) - {"prompt", "background", "best_of"}, "refused and taken by the same route"


def test_the_tests_that_docs_security_names_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    file = ""
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)?(?:::(test_\w+))?`", text)
    named = [(path, test) for path, test in named if path or test]
    assert len(named) > 30
    for path, test in named:
        file = path or file  # "::test" alone goes on in the same file
        home = ROOT / "tests" / (file if "/" in file else f"server/{file}")
        assert home.is_file(), file
        assert not test or f"def {test}(" in home.read_text(encoding="utf-8"), f"{file}::{test}"
