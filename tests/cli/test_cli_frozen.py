"""The command line is a promise: any change to it shows in tests/cli/cli_options.txt, and is made there on purpose.

To accept a change, write what this test prints into that file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from headway.cli.main import app

FROZEN = Path(__file__).with_name("cli_options.txt")


def lines(command: Any, path: str) -> Iterator[str]:
    """One line per argument and option: command, names, default."""
    for parameter in command.params:
        names = (
            [*parameter.opts, *parameter.secondary_opts]
            if parameter.param_type_name == "option"
            else [parameter.name.upper()]
        )
        default = (
            "" if parameter.default in (None, [], ()) or callable(parameter.default) else f" = {parameter.default}"
        )
        yield f"{path} {' '.join(names)}{default}"
    for name, child in getattr(command, "commands", {}).items():
        yield from lines(child, f"{path} {name}")


def test_the_command_line_is_as_agreed() -> None:
    found = "\n".join(lines(typer.main.get_command(app), "headway")) + "\n"
    assert found == FROZEN.read_text(encoding="utf-8"), found
