"""Boots an engine of a large model without memory, GPU or compiler, and runs steps; prints what compiled. For ``test_warm_up``.

Tensors are on torch's meta device, operations are their Triton launches, Triton's driver says that it has a Hopper GPU, and its
compiler gives back at once a kernel that does nothing. A process of its own: the tests' has Triton's interpreter switched on.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.driver import driver

import headway.models.load
from headway.core.config import EngineArgs
from headway.core.plan import Bound
from headway.device.cpu import CpuDevice
from headway.engine.boot import build_engine
from headway.kernels.registry import Op
from headway.kernels.sample import RANDOM
from headway.kernels.skinny_linear.tiles import fused_rows
from headway.kernels.wide_linear.tiles import wide_tokens
from headway.models.layers.forms import Rules
from headway.runner.launch import LaunchShape
from headway.runner.step_body import StepBody
from headway.sampling.draw import ALL_PATHS, FILTERED
from headway.sampling.sampler import Variant
from tests.kernels.no_gpu import NoDriver

SIZES = ((5, 3, 2), (100, 40, 39), (2047, 40, 0), (2500, 3, 0), (8192, 200, 150))
"""(tokens, rows, rows of them that decode)."""
MODELS = Path(__file__).parents[2] / "headway/cli/bench/anchors/models"
MODEL = MODELS / "qwen3_06b"
TEXTS = ((5, 3, 5), (100, 2, 70), (700, 40, 128), (2300, 9, 500), (8192, 200, 300))
"""(tokens, rows, longest row) of steps of a model that pools."""


class NoKernel:
    """A compiled kernel. ``log`` takes the names of launched ones."""

    function = packed_metadata = None

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        self._log.append(self._name)


class NoDevice(CpuDevice):
    """A GPU as the engine sees it."""

    asynchronous = captures_graphs = compiles_kernels = True

    def __init__(self) -> None:
        super().__init__()
        self.torch_device, self.notes = torch.device("meta"), []

    def capture(self, body: Callable[[], object], *, first: Any = None, reused: bool = False) -> Any:
        body()
        return SimpleNamespace(replay=lambda: None)

    def memory_bytes(self) -> tuple[int, int]:
        return 130 * 2**30, 140 * 2**30


class Recorder:
    """Stands for Triton's compiler.

    Attributes:
        compiled: (kernel, thread) of each specialisation.
        launched: kernels that were launched.
    """

    def __init__(self, broken: str) -> None:
        self._broken = broken
        self.compiled: list[tuple[str, str]] = []
        self.launched: list[str] = []

    def compile(self, source: Any, target: Any, options: Any, **others: Any) -> NoKernel:
        name = source.fn.fn.__name__
        self.compiled.append((name, threading.current_thread().name))
        if name == self._broken:
            raise RuntimeError("no such instruction")
        return NoKernel(name, self.launched)


def patches(recorder: Recorder) -> list[AbstractContextManager[Any]]:
    """What makes the host's code run as if there were a GPU."""
    return [
        patch("triton.compiler.compile", recorder.compile),
        patch("headway.kernels.paged_attention.launch.num_sms", lambda device: 132),
        patch("headway.kernels.paged_attention.hopper.early_decode.num_sms", lambda device: 132),
        patch("headway.kernels.paged_attention.hopper.early_decode.runs_gluon", lambda device: True),
        patch("headway.models.decoder.rules_for", lambda device, dtype: Rules(few=fused_rows)),
        patch.object(Op, "__call__", lambda self, *args: self.implementation("cuda")(*args)),
        patch.object(headway.models.load, "fill_randomly", lambda model, seed: None),
    ]


def steps(body: StepBody) -> None:
    """Steps of sizes that no graph is for, and every mixture of sampling features."""
    for tokens, rows, decode_rows in SIZES:
        batch = body.unpack(LaunchShape(tokens, rows, decode_rows, tokens - decode_rows), Bound(4000))
        body.forward(replace(batch, max_seq_len_bound=500), only_rows=False)  # no row is split
        body.row_logits(batch, body.forward(batch, only_rows=False))
        logits = body.logits(body.forward(batch, only_rows=True))
        every_edit = range(body.sampler.every_edit + 1)
        for edits, flags, logprobs in product(every_edit, (0, RANDOM, FILTERED, ALL_PATHS), (-1, 3, 20)):
            body.back(batch, logits, Variant(edits, flags, logprobs))
        ids, slots = (body.packed[at : at + rows] for at in (4097, 8195))  # as a step's lists: aligned to nothing
        for entries in (1, 9, 100):
            body.sampler.logprobs.gather_prompt(logits, ids, slots, entries)
        body.sampler.penalties.rebuild(slots, body.config.max_model_len)


def pooled_steps(body: StepBody) -> None:
    """Steps of sizes that no graph is for."""
    for tokens, rows, longest in TEXTS:
        body.forward(body.unpack(LaunchShape(tokens, rows, 0, longest), Bound(longest)), only_rows=True)


@contextmanager
def hopper_texts() -> Iterator[None]:
    """What serves texts on Hopper alone is launched, too."""
    everywhere = lambda device: True  # noqa: E731
    rules = Rules(few=fused_rows, wide=wide_tokens)
    with (
        patch("headway.kernels.dense_attention.triton.runs_gluon", everywhere),
        patch("headway.kernels.wide_linear.hopper.launch.num_sms", lambda device: 132),
        patch("headway.models.encoder.rules_for", lambda device, dtype: rules),
    ):
        yield


def main(broken: str = "", kv_cache_dtype: str = "auto", model: str = MODEL.name) -> None:
    driver.set_active(NoDriver())
    recorder, told = Recorder(broken), {}
    args = EngineArgs(
        model=str(MODELS / model), load_format="dummy", dtype="bfloat16", kv_cache_memory_bytes=2**33,
        max_model_len=40960 if model == MODEL.name else 512, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    with ExitStack() as stack:
        for each in (*patches(recorder), hopper_texts()):
            stack.enter_context(each)
        try:
            core = build_engine(args, progress=False, device=NoDevice())
            body = core._runner.executor.body
            with torch.inference_mode():
                (pooled_steps if body.pools else steps)(body)
        except RuntimeError as error:
            told = {"error": [str(error), *getattr(error, "__notes__", [])]}
    print(json.dumps({"compiled": recorder.compiled, "launched": len(recorder.launched), **told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
