"""``headway syncs``: find where a PyTorch program's host waits for its GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def syncs(
    target: Annotated[list[str], typer.Argument(help="What to run, after --: python script.py arguments.")],
    json: Annotated[Path | None, typer.Option(help="Write findings and timeline as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with a timeline.")] = None,
    fail_on: Annotated[int | None, typer.Option(help="Exit with status 3 at this many waits not allowed.")] = None,
    allow: Annotated[Path | None, typer.Option(help="TOML list of places where waiting is right.")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Pretend CUDA on a machine without it; no times.")
    ] = False,
    driver: Annotated[str, typer.Option(help="Driver boundary: auto, cupti, profiler or off.")] = "auto",
) -> None:
    """Run a PyTorch program and report each wait of its host for the GPU, with line, time and cure."""
    from headway.syncs import cli

    raise typer.Exit(cli.syncs(target, json, html, fail_on, allow, simulate=simulate, driver=driver))
