"""Ranks whose kernels are Triton's, not their references: what launches look at must fit parts, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from headway.kernels.registry import OPS
from headway.kernels.testing import interpreter_loops
from tests.engine.harness import MakeEngine, request, run
from tests.parallel.test_engine import KINDS

pytestmark = pytest.mark.usefixtures("interpreted_quickly")
KERNELS = (
    "apply_edits", "step_unpack", "embed", "rms_norm", "add_rms_norm", "rope_kv_write", "paged_attention", "silu_mul", "sample",
    "slot_advance",
)  # fmt: skip
"""Of a plain decoder's step."""


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has one state for the whole process, so ranks that are threads take turns."""
    turn = threading.RLock()

    def alone(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run_alone(*arguments: Any) -> Any:
            with turn, interpreter_loops():
                return kernel(*arguments)

        return run_alone

    for name in KERNELS:
        monkeypatch.setattr(OPS[name], "_cpu_impl", alone(OPS[name].implementation("cuda")))


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("kind", ["tp2", pytest.param("pp2", marks=pytest.mark.soak)])
def test_tokens_are_those_of_one_rank(make_engine: MakeEngine, kind: str) -> None:
    """Greedy rows alone, whose logits stay on their ranks; then beside one that is drawn with penalties."""
    greedy = [request(f"g{i}", [5 + i, 9, 3], seed=i, max_tokens=3, temperature=0.0) for i in range(2)]
    drawn = [request("d", [4, 4, 8], seed=7, max_tokens=3, temperature=0.9, top_k=9, repetition_penalty=1.2)]
    found, wanted = make_engine(max_num_seqs=3, **KINDS[kind]), make_engine(max_num_seqs=3)
    for asked in (greedy, greedy + drawn):
        answers, expected = run(found, asked), run(wanted, asked)
        assert {name: each.token_ids for name, each in answers.items()} == {n: e.token_ids for n, e in expected.items()}
