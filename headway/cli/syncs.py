"""``headway syncs``: find where a PyTorch program's host waits for its GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def syncs(
    target: Annotated[list[str], typer.Argument(help="What to run, after --: python script.py arguments.")],
    json: Annotated[Path | None, typer.Option(help="Write findings and timeline as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with a timeline.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write SARIF 2.1.0, for code scanning.")] = None,
    fail_on: Annotated[
        int | None, typer.Option(help="Exit with status 3 at this many lines with waits not allowed.")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="An earlier --json report; what is in it is not new.")] = None,
    fail_on_new: Annotated[
        bool, typer.Option("--fail-on-new", help="Exit with status 3 if a line waits that --baseline does not have.")
    ] = False,
    allow: Annotated[Path | None, typer.Option(help="TOML list of places where waiting is right.")] = None,
    write_allow: Annotated[
        Path | None, typer.Option(help="Write an allow list of all that was found, to go through.")
    ] = None,
    lint: Annotated[bool, typer.Option("--lint", help="Run nothing: read files for idioms that may wait.")] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Pretend CUDA on a machine without it; no times.")
    ] = False,
    driver: Annotated[str, typer.Option(help="Driver boundary: auto, cupti, profiler or off.")] = "auto",
) -> None:
    """Find where a PyTorch program waits for its GPU.

    Runs it and reports each wait of its host, with line, time and cure. In a GitHub workflow the lines are annotated too.
    """
    from headway.syncs import cli

    options = cli.Options(
        json_file=json,
        html_file=html,
        sarif_file=sarif,
        fail_on=fail_on,
        baseline=baseline,
        fail_on_new=fail_on_new,
        allow_file=allow,
        write_allow=write_allow,
        lint=lint,
        simulate=simulate,
        driver=driver,
    )
    raise typer.Exit(cli.syncs(target, options))
