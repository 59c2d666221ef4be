"""From the start of a process to its first token, imports and all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from headway.cli.bench.anchors.context import Bench
from headway.core.errors import RequestFailedError

WORD: Final = b"first token\n"
"""What the child says."""
TIMEOUT: Final = 300.0
NAMES: Final = ("start_to_first_token_s", "cold_start_to_first_token_s")


def announce(bench: Bench) -> list[str]:
    """The figures of this module."""
    bench.table.announce(NAMES, "s")
    return list(NAMES)


def measure(bench: Bench) -> None:
    """Warm: kernels in Triton's cache, as on any start but a machine's first. Cold: with an empty cache."""
    warm, cold = announce(bench)
    for run in range(bench.runs):
        if bench.table.wants(warm):
            with bench.table.measuring([warm]):
                bench.table.add(warm, first_token(bench, {}))
        if bench.table.wants(cold) and run == 0:
            with bench.table.measuring([cold]):
                cache = bench.work / "empty_triton_cache"
                cache.mkdir(exist_ok=True)
                bench.table.add(cold, first_token(bench, {"TRITON_CACHE_DIR": str(cache)}))


def first_token(bench: Bench, environment: dict[str, str]) -> float:
    """Seconds from the start of a process to its first token.

    Raises:
        RequestFailedError: it gave none; with the end of what it said.
    """
    given = json.dumps({"model": str(bench.folder), "tokenizer": bench.tokenizer, **bench.engine})
    start = time.perf_counter()
    with (bench.work / "start.log").open("w+b") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.bench.anchors.first_token"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **environment},
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        watchdog = threading.Timer(TIMEOUT, child.kill)
        watchdog.start()
        try:
            child.stdin.write(given.encode())
            child.stdin.close()
            said = child.stdout.readline()
            elapsed = time.perf_counter() - start
            child.stdout.close()
            child.wait()
        finally:
            watchdog.cancel()
            child.kill()
            child.wait()
        if said != WORD:
            text = Path(log.name).read_text(encoding="utf-8", errors="replace")
            raise RequestFailedError(f"no first token: {' '.join(text[-400:].split())}")
    return elapsed
