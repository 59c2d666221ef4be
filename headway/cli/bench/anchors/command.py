"""``headway bench anchors``: everything ANCHORS asks for, on the card it finds, into a dated report."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import tempfile
import timeit
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from headway import __version__
from headway.cli.bench.anchors import (
    ablations,
    experts,
    floors,
    gate,
    generation,
    kv_fp8,
    pooling,
    profiled,
    server,
    startup,
    structured,
)
from headway.cli.bench.anchors.context import TINY, Bench, Scale, engine_of, find_model, longest_context
from headway.cli.bench.anchors.table import FAILED, NOT_SERVED, REFUSED, Table, known_figures, known_of, markdown
from headway.cli.bench.anchors.vocabulary import choose_tokenizer
from headway.cli.bench.flags import takes
from headway.cli.errors import clean_errors
from headway.cli.options import human_int, run_ahead
from headway.core.errors import ConfigError, HeadwayError

KIND: Final = "headway anchors"
CPU: Final = "CPU"
DEFAULT_MODELS: Final = ("qwen3_06b", "llama_8b", "bert_base")
FULL_MODEL: Final = "qwen3_06b"
"""Structured output and the server are measured on this shape; the other models have the rows of their own table."""
GENERATING: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures whose models generate."""
TINY_CACHE_BYTES: Final = 16 * 2**20


@dataclass(kw_only=True)
class AnchorArgs:
    """The options."""

    model: Annotated[
        list[str], typer.Option(help="Known shape or folder with a config.json; repeatable. Default: all known.")
    ] = field(default_factory=list)
    only: Annotated[list[str], typer.Option(help="Figures wanted, with * and ?; repeatable. Default: all.")] = field(
        default_factory=list
    )
    runs: Annotated[int, typer.Option(help="Runs; the report has their medians.", parser=human_int)] = 1
    ablations: Annotated[
        bool, typer.Option("--ablations", help="What each technique buys, instead of the anchors.")
    ] = False
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("bench/reports")
    device: Annotated[str, typer.Option(help="As for an engine.")] = "auto"
    run_ahead: Annotated[str, typer.Option(help="Measured depth.", parser=run_ahead, metavar="INTEGER|auto")] = "auto"
    commit: Annotated[str | None, typer.Option(help="What is measured; default: ask git.")] = None
    tiny: Annotated[bool, typer.Option("--tiny", help="Sizes for a test; the figures mean nothing.")] = False

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ConfigError(f"--runs must be at least 1; got {self.runs}")


@clean_errors
@takes(AnchorArgs)
def anchors(args: AnchorArgs) -> None:
    """Measure this engine by the workloads of its goals and write a report: JSON, and Markdown beside it."""
    card, tables, timeline = card_name(args.device), [], None
    typer.echo(f"{card}: {compared(card)}", err=True)
    for name in args.model or DEFAULT_MODELS:
        known = {} if args.tiny else known_figures(Path(name).name, card)
        table = Table(Path(name).name, args.only, known)
        tables.append(table)
        with tempfile.TemporaryDirectory() as work:
            bench = make_bench(args, name, table, card, Path(work))
            if pools(bench):
                pooling.measure(bench)
            elif args.ablations:
                ablations.measure(bench)
            else:
                timeline = measure(bench, card) or timeline
    report = make_report(args, card, tables, timeline)
    path = write(report, args.out)
    typer.echo(f"wrote {path} and {path.with_suffix('.md').name}")
    bad = [row for row in report["rows"] if row["status"] in (FAILED, REFUSED)]
    missing = sum(row["status"] == NOT_SERVED for row in report["rows"])
    if missing:
        typer.echo(f"headway: {missing} figures are not served; the report says why", err=True)
    if bad:
        typer.echo(f"headway: {len(bad)} figures failed or were refused; the report says why", err=True)
        raise typer.Exit(1)


def make_bench(args: AnchorArgs, name: str, table: Table, card: str, work: Path) -> Bench:
    """Sizes, shape, tokenizer and engine arguments of one model's measurement.

    Raises:
        ConfigError: no such model, or sizes that only a GPU can run in reasonable time without a GPU.
    """
    if card.startswith(CPU) and not args.tiny:
        raise ConfigError(
            "these workloads are sized for a GPU, and this is a CPU; --tiny runs small ones, to see that it works"
        )
    scale = TINY if args.tiny else Scale()
    tokenizer, words = choose_tokenizer(scale.vocab_49k, work)
    typer.echo(f"{table.model}: tokenizer {words}", err=True)
    engine: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32" if args.device == "cpu" else "bfloat16",
        "device": args.device,
        "max_model_len": longest_context(find_model(name), scale),
        "max_num_seqs": scale.max_num_seqs,
        "enable_prefix_caching": False,
        "run_ahead": args.run_ahead,
    }
    if args.tiny:
        engine["kv_cache_memory_bytes"] = TINY_CACHE_BYTES
    folder = find_model(name)
    own = engine_of(folder)
    full = (args.tiny and not own) or table.model == FULL_MODEL
    bench = Bench(table, scale, folder, tokenizer, work, args.runs, engine | own, full)
    speed = floors.bandwidth(card)
    if speed is not None and not pools(bench):
        table.set_floors(floors.of_steps(bench, speed))
    return bench


def pools(bench: Bench) -> bool:
    """Whether the shape is measured by the vectors it gives: an encoder, or a decoder whose engine is told to pool."""
    fields = json.loads((bench.folder / "config.json").read_text(encoding="utf-8"))
    names = fields.get("architectures") or [""]
    return bench.engine.get("runner") == "pooling" or not str(names[0]).endswith(GENERATING)


def measure(bench: Bench, card: str) -> dict[str, Any] | None:
    """All groups of one model, most of them with one engine each; gives a timeline, if there is one."""
    table, timeline = bench.table, None
    floors.measure(bench, card)
    wrong = generation.measure(bench)
    others = [
        *profiled.announce(bench),
        *startup.announce(bench),
        *experts.announce(bench),
        *(server.announce(bench) if bench.full else []),
    ]
    if table.wants(*others) and not table.wants(*generation.announce(bench)):
        wrong = gate.check(bench)
    kv_fp8.announce(bench)
    if wrong is None:
        timeline = profiled.measure(bench, card)
        startup.measure(bench)
        kv_fp8.measure(bench)
        experts.measure(bench, card)
    else:
        table.refuse_all(wrong)
    if bench.full:
        wrong_49k = structured.measure(bench)
        if wrong_49k is not None:
            table.mark(structured.announce(bench), REFUSED, wrong_49k)
        if wrong is None and wrong_49k is None:
            server.measure(bench)
        else:
            table.mark(server.announce(bench), REFUSED, wrong or wrong_49k or "")
    return timeline


def card_name(device: str) -> str:
    """What the figures are of.

    Raises:
        HeadwayError: CUDA is asked for and there is none.
    """
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise HeadwayError(f"--device {device}: torch sees no CUDA device; --device cpu runs without")
    if torch.cuda.is_available() and not device.startswith(("cpu", "sim")):
        return str(torch.cuda.get_device_name(device if ":" in device else None))
    return f"{CPU}, {platform.machine()}"


def compared(card: str) -> str:
    """What the figures stand beside, in words: goals and the other engine's figures are one card's."""
    speed, known = floors.bandwidth(card), bool(known_of(card))
    beside = "goals and vLLM's figures are this card's" if known else "no goals: those there are are another card's"
    said = (
        "not known" if speed is None else f"{speed / 1e12:.2f} TB/s, {'written down' if known else 'measured just now'}"
    )
    return f"bandwidth for floors {said}; {beside}"


def make_report(args: AnchorArgs, card: str, tables: list[Table], timeline: dict[str, Any] | None) -> dict[str, Any]:
    """All that is written."""
    import torch

    versions = {"headway": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return {
        "kind": KIND,
        "card": card,
        "bytes_per_second": floors.bandwidth(card),
        "compared": compared(card),
        "commit": args.commit or git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "python_loop_s": python_loop_s(),
        "command": command_line(args),
        "num_runs": args.runs,
        "complete": not (args.only or args.model or args.ablations or args.tiny),
        "rows": [row.as_dict() for table in tables for row in table.rows()],
        "timeline": timeline,
    }


def python_loop_s() -> float:
    """Seconds of a loop of plain Python, the best of three: starts and host times depend on the host as much as on the card."""
    return round(min(timeit.repeat("for i in range(3_000_000): x += i", "x = 0", number=1, repeat=3)), 3)


def command_line(args: AnchorArgs) -> str:
    """How to repeat it, without where it was written to."""
    words = ["headway", "bench", "anchors"]
    for name in ("model", "only"):
        words += [word for value in getattr(args, name) for word in (f"--{name}", value)]
    words += [f"--{name}" for name in ("ablations", "tiny") if getattr(args, name)]
    words += ["--runs", str(args.runs), "--run-ahead", str(args.run_ahead), "--device", args.device]
    return shlex.join(words)


def git_commit() -> str:
    """Of the folder we are in, "+" behind it if something is changed; "unknown" without git."""
    try:
        asked = [["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]]
        commit, changes = (
            subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}+" if changes else commit


def write(report: dict[str, Any], folder: Path) -> Path:
    """Write both files; gives the JSON's path. The time is in the name, so that no report replaces another."""
    stamp = report["date"][:16].replace(":", "").replace("T", "-")
    card = "".join(c if c.isalnum() else "-" for c in report["card"].lower().removeprefix("nvidia ")).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stamp}-{card}-anchors.json"
    number = 2
    while path.exists():  # another run of the same minute
        path, number = folder / f"{stamp}-{card}-anchors-{number}.json", number + 1
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    return path
