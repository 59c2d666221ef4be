"""Steady decode costs the host the same number of calls whatever the number of rows, and leaves nothing to collect."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from headway.core.config import EngineArgs
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import request
from tests.engine.paced_device import PacedDevice

SETTLE = 40


@pytest.fixture
def core(tiny_model: Path) -> Iterator[EngineCore]:
    """Over a device that is slow enough for the depth to stay 1, and computes nothing."""
    args = EngineArgs(
        model=str(tiny_model), dtype="float32", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64,
        block_size=256, kv_cache_memory_bytes=1 << 24, run_ahead=1,
    )  # fmt: skip
    core = build_engine(args, progress=False, device=PacedDevice(1.0))
    core._runner.executor.body.results[:, :, 0] = (
        1  # what the device would write: every row samples token 0 and goes on
    )
    yield core
    core.shutdown()


def decode(core: EngineCore, rows: int) -> None:
    """``rows`` requests past their prompts."""
    for row in range(rows):
        core.add(request(f"{rows}-{row}", [5, 6, 7], max_tokens=250, ignore_eos=True))
    for _ in range(SETTLE):
        core.step()


def end(core: EngineCore, rows: int) -> None:
    for row in range(rows):
        core.abort(f"{rows}-{row}")
    while core.has_work():
        core.step()


def count_calls(core: EngineCore, steps: int) -> int:
    """Calls of Python functions in so many steps."""
    calls = 0

    def seen(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    gc.disable()  # what others (hypothesis) hang onto collections would be counted, too
    sys.setprofile(seen)
    try:
        for _ in range(steps):
            core.step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def test_a_steps_calls_do_not_depend_on_its_rows(core: EngineCore) -> None:
    """Blocks are large here: a row that needs one costs its request's calls."""
    calls = {}
    for rows in (1, 8):
        decode(core, rows)
        calls[rows] = count_calls(core, 20)
        end(core, rows)
    assert calls[1] == calls[8]


def test_steady_decode_leaves_nothing_to_the_collector(core: EngineCore) -> None:
    decode(core, 8)
    gc.collect()
    before = [each["collections"] for each in gc.get_stats()]
    for _ in range(150):
        assert core.step()
    assert [each["collections"] for each in gc.get_stats()] == before
    end(core, 8)
