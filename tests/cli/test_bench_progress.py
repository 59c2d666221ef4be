"""``headway bench serve`` while it runs: what a pipe is shown, and what Ctrl-C leaves."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headway.cli.bench.online import Lines
from tests.cli.fake_server import Answer, serving
from tests.cli.test_bench_serve import bench


def test_a_pipe_gets_lines_of_progress(tmp_path: Path) -> None:
    with serving() as server:
        result = bench("--base-url", server.url, "--num-prompts", "20", "--random-input-len", "3")
        quiet = bench("--base-url", server.url, "--num-prompts", "20", "--random-input-len", "3", "--disable-tqdm")
    told = [line for line in result.stderr.splitlines() if " of 20 requests after " in line]
    counts = [int(line.split()[0]) for line in told]
    assert counts == sorted(set(counts)) and counts[-1] == 20
    assert {count * 10 // 20 for count in counts} >= set(range(1, 11)), (
        "a line for every tenth, however slow the machine"
    )
    assert "of 20" not in result.stdout and "of 20" not in quiet.stderr


def test_slow_progress_is_told_every_few_seconds() -> None:
    now, lines = [0.0], list[str]()
    progress = Lines(1000, lines.append, lambda: now[0])
    for _ in range(30):
        now[0] += 1.0
        progress.advance()
    assert [line.split()[0] for line in lines] == ["5", "10", "15", "20", "25", "30"]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_shows_what_has_come_so_far(workers: int, tmp_path: Path) -> None:
    """The server answers some requests and then no more; Ctrl-C ends the run, and the figures are those of the answered."""
    stuck = threading.Semaphore(0)
    numbers = itertools.count()

    def answer(_: dict[str, Any]) -> Answer:
        if next(numbers) < 6:
            return Answer()
        stuck.release()
        return Answer(holds=True)

    options = ["--num-prompts", "50", "--random-input-len", "3", "--ready-check-timeout-sec", "0", "--model", "m"]
    options += ["--num-workers", str(workers), "--max-concurrency", str(workers), "--save-result", "--result-filename"]
    with serving(answer) as server:
        command = [sys.executable, "-m", "headway", "bench", "serve", "--base-url", server.url, *options]
        with subprocess.Popen(
            [*command, str(tmp_path / "r")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            for _ in range(workers):
                assert stuck.acquire(timeout=60)
            process.send_signal(signal.SIGINT)
            shown, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert re.search(r"Successful requests: +6\n", shown) and "6 of 50 requests that had ended" in told
    assert json.loads((tmp_path / "r").read_text())["completed"] == 6
