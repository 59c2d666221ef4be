"""Structured output on a real GPU: graphs of whole steps with grammars give the CPU's tokens, and nothing waits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.messages import AddRequest
from headway.runner.graphs import DecodeGraphs
from headway.runner.launch import LaunchShape
from headway.sampling.sampler import GRAMMAR_EDIT, Variant
from tests.engine.harness import request
from tests.engine.test_depths import close
from tests.engine.test_structured import STARVED, check
from tests.engine.tiny_grammars import LOOP, PATTERN, SCHEMA, automaton
from tests.gpu.guard import no_waits
from tests.gpu.test_engine_on_cuda import engine, run, tiny_model

__all__ = ["tiny_model"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


def batch() -> list[AddRequest]:
    """Grammars and plain rows, nothing else: what the graphs are captured for."""
    rng, made = random.Random(3), []
    grammars = [("regex", PATTERN), ("json", json.dumps(SCHEMA)), ("regex", LOOP), None]
    for i in range(48):
        params: dict[str, Any] = {"temperature": rng.choice([0.0, 1.0, 1.5]), "max_tokens": rng.choice([3, 30, 60])}
        params |= rng.choice([{}, {"top_k": 20}, {"min_p": 0.05, "top_p": 0.95}])
        grammar: Any = grammars[i % 4]
        if grammar is not None:
            params["automaton"] = automaton(*grammar)
        made.append(request(str(i), [rng.randrange(97) for _ in range(rng.randrange(1, 40))], seed=i, **params))
    return made


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [0, 2, 4])
def test_grammars_give_the_tokens_of_the_cpu(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, depth: int, enforce_eager: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    replayed: list[Variant] = []
    replay = DecodeGraphs.replay

    def watched(self: DecodeGraphs, shape: LaunchShape, variant: Variant) -> Any:
        replayed.append(variant)
        return replay(self, shape, variant)

    truth = run(engine(tiny_model, device="cpu", run_ahead=0), batch())
    monkeypatch.setattr(DecodeGraphs, "replay", watched)
    with no_waits(monkeypatch):
        answers = run(engine(tiny_model, run_ahead=depth, enforce_eager=enforce_eager), batch())
    for request_id, answer in answers.items():
        close(answer, truth[request_id], tolerance=1e-3)
    assert check(batch(), answers) > 5
    assert enforce_eager or any(variant.edits == GRAMMAR_EDIT for variant in replayed)


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_a_row_with_nothing_to_draw_fails_alone(tiny_model: Path, enforce_eager: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    starved = [request(f"starved {i}", [1, 2, 3], **params) for i, (params, _) in enumerate(STARVED)]
    truth = run(engine(tiny_model, device="cpu", run_ahead=0), batch()[:12])
    answers = run(engine(tiny_model, run_ahead=2, enforce_eager=enforce_eager), [*starved, *batch()[:12]])
    for i, (_, fields) in enumerate(STARVED):
        answer = answers.pop(f"starved {i}")
        assert answer.finish_reason == "error" and all(field in str(answer.error) for field in fields)
    for request_id, answer in answers.items():
        close(answer, truth[request_id], tolerance=1e-3)
