"""The ``headway`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from headway import __version__
from headway.cli.bench import bench
from headway.cli.chat import chat
from headway.cli.embed import embed
from headway.cli.env import env
from headway.cli.errors import clean_errors, set_up_logging
from headway.cli.foreign import Command
from headway.cli.generate import generate
from headway.cli.serve import serve
from headway.cli.syncs import syncs
from headway.cli.transcribe import transcribe
from headway.cli.tune import tune

app = typer.Typer(
    name="headway",
    help="LLM inference in which the host never waits for the device inside a step.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags off at 80 columns
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[  # noqa: ARG001 - handled by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine decides, and why.")] = False,
) -> None:
    set_up_logging(verbose)


app.command("serve", cls=Command)(clean_errors(serve))
app.command("generate", cls=Command)(clean_errors(generate))
app.command("chat", cls=Command)(clean_errors(chat))
app.command("embed", cls=Command)(clean_errors(embed))
app.command("transcribe")(clean_errors(transcribe))
app.add_typer(bench, name="bench")
app.command("syncs")(syncs)
app.command("tune")(clean_errors(tune))
app.command("env")(clean_errors(env))


def main() -> None:
    """Entry point."""
    app()
