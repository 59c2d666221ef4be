"""Requests that generate nothing: vectors of the tiny Llama's hidden states, at every depth, whole and in chunks."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from headway.core.errors import ConfigError
from headway.core.messages import AddRequest, RequestUpdate
from headway.core.params import SamplingParams
from headway.core.plan import Floats
from headway.core.task import Task
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.engine.extras import Pooling
from headway.state.batch import StepBatch
from headway.state.slots import SlotArena, Table
from tests.engine.forced_drafts import forced
from tests.engine.harness import request
from tests.engine.naive import NaiveLlama
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim.harness import arguments, folder_of_model, simulated


class LastToken:
    """The last token's hidden state, of length 1."""

    wants_all = False
    token_width = 0

    def __init__(self, width: int) -> None:
        self.width = width

    def tokens(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        return F.normalize(hidden.float(), dim=-1)


class Mean:
    """The mean over all tokens, of length 1. Sums are kept in the slots between chunks, and begin anew where a text does."""

    wants_all = True
    token_width = 0

    def __init__(self, arena: SlotArena, width: int) -> None:
        self.width, self._arena = width, arena

    def tokens(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        sums = self._arena.view("mean_sums")
        start, end = batch.query_start[:-1, None], batch.query_start[1:, None]
        token = torch.arange(len(hidden), device=hidden.device)
        mine = ((token >= start) & (token < end)).to(hidden.dtype)  # [R, T]
        slot = batch.row_slots.clamp(min=0).long()
        first = batch.seq_lens - (end - start)[:, 0]  # position of each row's first token
        before = torch.where((first > 0)[:, None], sums.index_select(0, slot), 0.0)
        found = before + mine @ hidden
        live = (batch.row_slots >= 0) & (batch.seq_lens > 0)
        spare = torch.where(live[:, None], found - sums.index_select(0, slot), 0.0)
        sums.index_add_(0, slot, spare)
        return F.normalize(found, dim=-1)


LAST = Pooling((Task.EMBED,), lambda arena, hidden: LastToken(hidden))
MEAN = Pooling((Task.EMBED, Task.CLASSIFY), Mean, lambda hidden: [Table("mean_sums", hidden, torch.float32)])
POOLINGS = {"last": LAST, "mean": MEAN}


def text(name: str, tokens: list[int], task: Task = Task.EMBED) -> AddRequest:
    return AddRequest(
        request_id=name, prompt_token_ids=tokens, params=SamplingParams(), seed=0, eos_token_ids=[], task=task
    )


def texts(number: int, longest: int = 100) -> list[AddRequest]:
    """Some share a prefix of whole blocks."""
    rng = random.Random(number)
    found = [[rng.randrange(97) for _ in range(rng.choice([1, 3, 8, 30, longest]))] for _ in range(number)]
    found[-1] = found[0][:16] + found[-1]
    found[-2] = (found[-1] * longest)[:longest]
    return [text(str(i), tokens) for i, tokens in enumerate(found)]


def truth(tokens: list[int], kind: str) -> torch.Tensor:
    hidden = NaiveLlama(folder_of_model()).hidden(tokens)
    return F.normalize(hidden[-1] if kind == "last" else hidden.mean(0), dim=-1)


def embed(core: EngineCore, batch: list[AddRequest]) -> dict[str, Floats]:
    """The vector of each request; nothing else may come."""
    for each in batch:
        core.add(each)
    found: dict[str, Floats] = {}
    for _ in range(3000):
        if not core.has_work():
            break
        for update in core.step():
            assert update.error is None and update.pooled is not None and update.finish_reason == "stop", update
            assert update.request_id not in found and not update.new_token_ids
            found[update.request_id] = np.frombuffer(update.pooled, np.float32)
    assert not core.has_work()
    core.check_integrity()
    return found


def on_cpu(pooling: Pooling, **overrides: Any) -> EngineCore:
    return build_engine(arguments({"device": "cpu", **overrides}), progress=False, pooling=pooling)


@pytest.mark.parametrize("kind", POOLINGS)
def test_vectors_are_those_of_the_plain_model_at_every_depth(kind: str) -> None:
    """More texts than slots, chunks, prefixes that are cached, the longest text there can be; the same bits at each depth."""
    batch = texts(20, 128)
    bits = {}
    for depth in (0, 1, 2, 4):
        core = on_cpu(POOLINGS[kind], run_ahead=depth, max_num_batched_tokens=24)
        found = embed(core, batch)
        for each in batch:
            assert found[each.request_id].tolist() == pytest.approx(
                truth(each.prompt_token_ids, kind).tolist(), abs=2e-5
            )
        bits[depth] = {name: vector.tobytes() for name, vector in found.items()}
        assert (core.stats().prefix_cache_hits > 0) == (kind == "last"), "a mean needs every token's hidden state"
        assert core.stats().prompt_tokens == sum(len(each.prompt_token_ids) for each in batch)
        core.shutdown()
    assert all(each == bits[0] for each in bits.values())


@pytest.mark.parametrize(
    ("depth", "kind", "graphs"), [(0, "mean", False), (1, "last", True), (2, "mean", True), (4, "last", False)]
)
def test_on_the_simulated_device(depth: int, kind: str, graphs: bool) -> None:
    """With aborts while rows are in flight: the next owners of their slots get vectors of their own."""
    batch = texts(14, 60)
    sizes = {"max_num_batched_tokens": 24, "max_num_seqs": 3, "kv_cache_memory_bytes": 17 * KV_BLOCK_BYTES}
    with simulated(depth, pooling=POOLINGS[kind], run_ahead=depth, enforce_eager=not graphs, **sizes) as (
        core,
        _,
        watch,
    ):
        for each in batch[:5]:
            core.add(each)
        core.step()
        for name in ("0", "1", "3"):
            core.abort(name)
        found = embed(core, batch[5:])
        assert watch.num_steps == core.stats().num_steps and (core.stats().num_graph_steps > 0) == graphs
    for name, vector in found.items():
        expected = truth(batch[int(name)].prompt_token_ids, kind).tolist()
        assert vector.tolist() == pytest.approx(expected, abs=2e-5), name
    assert {*found} >= {str(i) for i in range(5, 14)} and "3" not in found


def test_tasks_that_are_not_served_are_refused_and_others_go_on() -> None:
    core = on_cpu(LAST)
    core.add(request("generate", [1, 2]))
    core.add(text("classify", [1, 2], Task.CLASSIFY))
    core.add(text("long", [1] * 129))
    core.add(text("empty", []))
    core.add(text("good", [1, 2]))
    updates = {update.request_id: update for update in [*core.step(), *core.step()]}
    assert updates["good"].pooled and updates["good"].error is None
    for name in ("generate", "classify"):
        assert updates[name].error == f"this model serves embed, not the task {name!r}"
        assert updates[name].error_parameter == "task"
    assert "128" in (updates["long"].error or "") and updates["long"].error_parameter == "prompt"
    assert "no tokens" in (updates["empty"].error or "")
    core.check_integrity()
    core.shutdown()


def test_tasks_and_vectors_cross_to_another_process() -> None:
    asked = text("a", [1, 2], Task.TOKEN_EMBED)
    told = RequestUpdate(request_id="a", new_token_ids=[], finish_reason="stop", pooled=b"\x00\x00\x80\x3f")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=AddRequest) == asked
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=RequestUpdate) == told


def test_an_engine_that_generates_does_not_pool() -> None:
    core = build_engine(arguments({"device": "cpu"}), progress=False)
    core.add(text("a", [1, 2]))
    (update,) = core.step()
    assert update.error == "this model serves generate, not the task 'embed'" and core.info.tasks == (Task.GENERATE,)
    core.shutdown()


def test_an_engine_that_pools_drafts_nothing() -> None:
    with pytest.raises(ConfigError, match="nothing to draft"):
        build_engine(arguments({"device": "cpu"}), progress=False, pooling=LAST, drafts=forced([], {}, 2, "all"))
