"""--trace: the page of a piece of work, and a refusal where nothing can be traced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway import syncs
from headway.cli.trace import write_timeline
from headway.core.errors import ConfigError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")


def test_a_page_of_the_work(tmp_path: Path) -> None:
    page = tmp_path / "trace.html"

    def work() -> None:
        x = torch.ones(8, device="cuda")
        x.sum().item()
        with syncs.allowed("the end"):
            x.tolist()

    said = write_timeline(page, "headway bench latency", work, simulate=True)
    assert said == f"trace: {page}: 1 host waits, 1 of back-pressure or otherwise allowed"
    text = page.read_text()
    assert "headway bench latency" in text and "test_trace.py" in text and not re.search(r"src=|https?://", text)


def test_an_engine_elsewhere_is_named(tmp_path: Path) -> None:
    page = tmp_path / "trace.html"
    write_timeline(page, "x", lambda: subprocess.run([sys.executable, "-c", ""], check=True), simulate=True)
    assert "leave out --multiprocess" in page.read_text()


def test_without_cuda_it_is_refused_and_the_work_not_done(tmp_path: Path) -> None:
    done: list[int] = []
    with pytest.raises(ConfigError, match="--trace: nothing to watch"):
        write_timeline(tmp_path / "trace.html", "x", lambda: done.append(1))
    assert not done


def test_an_error_of_the_work_is_the_callers(tmp_path: Path) -> None:
    def work() -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        write_timeline(tmp_path / "trace.html", "x", work, simulate=True)
