"""``headway bench``: vLLM's benchmarks, same flags, same labels."""

from __future__ import annotations

import typer

from headway.cli.bench.anchors.command import anchors
from headway.cli.bench.embed import embed
from headway.cli.bench.flags import spread
from headway.cli.bench.offline import latency, throughput
from headway.cli.bench.online import serve

bench = typer.Typer(
    help="Measure throughput and latency, with a server or without.", no_args_is_help=True, rich_markup_mode=None
)
bench.command("throughput")(throughput)
bench.command("latency")(latency)
bench.command("serve", cls=spread("--goodput", "--header", "--metadata"))(serve)
bench.command("embed")(embed)
bench.command("anchors")(anchors)
