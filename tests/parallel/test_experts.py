"""Experts spread over ranks: tokens are one rank's, whether ranks share the tokens (parts) or have their own (replicas)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, EngineDeadError, ModelError
from headway.core.messages import AddRequest
from headway.core.seat import Seat
from headway.engine.boot import build_engine
from headway.engine.client import ThreadClient
from headway.engine.process import ProcessClient
from headway.engine.replicas import ReplicaClient
from headway.runner import halves
from headway.state.batch import StepBatch
from tests.engine.harness import Answer, request, run
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import CONFIG, KV_BLOCK_BYTES
from tests.parallel.families import write
from tests.parallel.test_engine import HALVES, THREADS, all_features, answers_of, compare, in_threads

SHARED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "distributed_timeout_seconds": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with a shared expert, and a layer without experts."""
    found = tmp_path_factory.mktemp("mixture")
    more = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    }
    write(
        CONFIG | more | {"architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 3, "mlp_only_layers": [1]},
        found,
    )
    return found


def arguments(folder: Path, **more: Any) -> EngineArgs:
    sizes: dict[str, Any] = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_seqs": 4,
        "max_num_batched_tokens": 40, "block_size": 8, "kv_cache_memory_bytes": 2**22, "run_ahead": 0,
    }  # fmt: skip
    return EngineArgs(**sizes | more)


def some(number: int = 7, most: int = 14) -> list[AddRequest]:
    """Prompts of 1 to 30 tokens, some alike; greedy and drawn; some with log-probabilities."""
    rng, made = random.Random(4), []
    common = [rng.randrange(3, 90) for _ in range(16)]
    for nth in range(number):
        prompt = (common if nth % 2 else []) + [rng.randrange(3, 90) for _ in range(rng.choice([1, 3, 14]))]
        more: dict[str, Any] = {
            "temperature": float(nth % 3 == 2),
            "max_tokens": rng.randint(2, most),
            "ignore_eos": True,
        }
        made.append(
            request(f"r{nth}", prompt, seed=nth, **more | ({"logprobs": 2, "prompt_logprobs": 1} if nth == 3 else {}))
        )
    return made


def answers(folder: Path, made: list[AddRequest], **more: Any) -> dict[str, Answer]:
    core = build_engine(arguments(folder, **more), progress=False)
    core.learn(VOCABULARY)
    found = run(core, made)
    core.check_integrity()
    core.shutdown()
    return found


@pytest.fixture(scope="module")
def oracle(folder: Path) -> dict[str, Answer]:
    return answers(folder, some(), enable_prefix_caching=False)


@pytest.fixture(scope="module")
def every_feature(folder: Path) -> dict[str, Answer]:
    """Sampling of all kinds, grammars, log-probabilities of prompts and answers."""
    return answers(folder, all_features(), enable_prefix_caching=False)


@pytest.mark.parametrize(("depth", "stages"), [(0, 1), (2, 1), (1, 2)])
def test_parts_with_whole_experts(folder: Path, every_feature: dict[str, Answer], depth: int, stages: int) -> None:
    more = THREADS | {"tensor_parallel_size": 2, "enable_expert_parallel": True, "pipeline_parallel_size": stages}
    compare(answers(folder, all_features(), run_ahead=depth, **more), every_feature)


def test_parts_with_whole_experts_in_halves(folder: Path, oracle: dict[str, Answer]) -> None:
    more = THREADS | HALVES | {"tensor_parallel_size": 2, "enable_expert_parallel": True, "device": "sim:4"}
    compare(answers(folder, some(), run_ahead=2, **more), oracle)


def replicas(folder: Path, make: Callable[[EngineArgs, Seat | None], Any] = in_threads, **more: Any) -> ReplicaClient:
    client = ReplicaClient(arguments(folder, **SHARED | more), make)
    client.learn(VOCABULARY)
    return client


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.soak), 2, 4])
def test_replicas_share_experts(folder: Path, oracle: dict[str, Answer], depth: int) -> None:
    """Prompts come in chunks; and a second epoch: all rest in between."""
    client = replicas(folder, run_ahead=depth, max_num_batched_tokens=24)
    try:
        compare(answers_of(client, some()), oracle)
        compare(answers_of(client, some()), oracle)
        stats = client.stats().replicas
        assert all(each.generation_tokens for each in stats), "both had work"
    finally:
        client.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_every_feature_on_replicas(folder: Path, every_feature: dict[str, Answer], depth: int) -> None:
    client = replicas(folder, run_ahead=depth)
    try:
        compare(answers_of(client, all_features()), every_feature)
    finally:
        client.close()


def test_an_idle_replica_runs_the_others_steps(folder: Path, oracle: dict[str, Answer]) -> None:
    client = replicas(folder, run_ahead=1)
    try:
        for each in some()[:2]:
            compare(answers_of(client, [each]), {each.request_id: oracle[each.request_id]})
    finally:
        client.close()


@pytest.mark.parametrize(
    ("more", "name"), [({"tensor_parallel_size": 2}, "parts"), ({"data_parallel_size": 3}, "three")]
)
def test_other_meshes(folder: Path, oracle: dict[str, Answer], more: dict[str, Any], name: str) -> None:
    """And none is left alone in a step when they are closed one after the other."""
    client = replicas(folder, run_ahead=2, **THREADS | more | {"distributed_timeout_seconds": 20})
    try:
        compare(answers_of(client, some()), oracle)
        client.add([request("long", [5, 6, 7], max_tokens=100, ignore_eos=True)])
        client.poll()
        client._state.clients[0].close()
    finally:
        client.close()
    ends = [each._shared.dead for each in client._state.clients if isinstance(each, ThreadClient)]
    assert ends == ["the engine is shut down"] * (more.get("data_parallel_size") or 2)


def test_preemption(folder: Path, every_feature: dict[str, Answer]) -> None:
    """Each replica's pool is too small for its requests; the others run on meanwhile."""
    client = replicas(folder, run_ahead=2, max_num_seqs=8, kv_cache_memory_bytes=18 * KV_BLOCK_BYTES * 3 // 2)
    try:
        compare(answers_of(client, all_features()), every_feature)
        assert client.stats().num_preemptions
    finally:
        client.close()


def test_drafts(folder: Path) -> None:
    made = [request(f"r{i}", [7, 8, 9, i, 7, 8, 9, i, 7, 8], seed=i, max_tokens=16, temperature=0.0) for i in range(4)]
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    client = replicas(folder, run_ahead=2, speculative_config=drafts)
    try:
        compare(answers_of(client, made), answers(folder, made))
        assert client.stats().num_draft_tokens
    finally:
        client.close()


@pytest.mark.parametrize(
    ("depth", "more"), [(0, {}), (2, {"max_num_batched_tokens": 24}), (1, {"tensor_parallel_size": 2})]
)
def test_replicas_halve_steps_that_replay_no_graphs(
    folder: Path, oracle: dict[str, Answer], depth: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has tokens of its own, so all know is a bound: no half is larger than half of it, and one may be padding alone."""
    cut, seen = halves.cut, list[tuple[int, ...]]()

    def noted(batch: StepBatch) -> Any:
        found = cut(batch)
        seen.append((batch.most_tokens, len(batch.input_ids), *(each.most_tokens for each in found[0])))
        for each in found[0]:
            assert len(each.input_ids) <= each.most_tokens or not batch.most_tokens
        return found

    monkeypatch.setattr(halves, "cut", noted)
    client = replicas(folder, run_ahead=depth, **THREADS | HALVES | more)
    try:
        compare(answers_of(client, some()), oracle)
        compare(answers_of(client, some()[:1]), {"r0": oracle["r0"]})
    finally:
        client.close()
    shared = [each for each in seen if each[0]]
    assert all(each[2] == each[3] == -(-each[0] // 2) for each in shared)
    assert any(most > 8 for most, *_ in shared), "steps with prompts"
    assert any(tokens == 1 for _, tokens, *_ in shared), "a replica with one row, or none"


@pytest.mark.parametrize(("seed", "depth", "more"), [(3, 2, HALVES), (4, 2, HALVES | {"enforce_eager": True})])
def test_on_the_simulated_device(
    folder: Path, oracle: dict[str, Answer], seed: int, depth: int, more: dict[str, Any]
) -> None:
    """Each replica has a device of its own that runs late; steps are cut into halves, in graphs and not."""
    client = replicas(folder, device=f"sim:{seed}", run_ahead=depth, **THREADS | more)
    try:
        compare(answers_of(client, some()[:4]), {f"r{nth}": oracle[f"r{nth}"] for nth in range(4)})
        replays = client.stats().num_graph_steps
        assert bool(replays) != ("enforce_eager" in more), "steps of decode rows alone replay graphs of the agreed size"
    finally:
        client.close()


def test_processes_and_a_killed_one(folder: Path, oracle: dict[str, Answer]) -> None:
    made: list[ProcessClient] = []

    def make(args: EngineArgs, seat: Seat | None) -> ProcessClient:
        made.append(ProcessClient(args, seat=seat))
        return made[-1]

    client = replicas(folder, make, run_ahead=2)
    try:
        compare(answers_of(client, some()), oracle)
        os.kill(made[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"replica \d of 2: the engine process was killed by signal 9"):
            while True:
                client.poll(timeout=20.0)
    finally:
        client.close()


def test_a_replica_that_does_not_start_ends_the_others(folder: Path, tmp_path: Path) -> None:
    """They wait for it while they load, for as long as loading may take."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    def make(args: EngineArgs, seat: Seat | None) -> ThreadClient:
        assert seat is not None
        return ThreadClient(replace(args, model=str(tmp_path)) if seat.rank else args, seat=seat)

    with pytest.raises(ModelError, match="no safetensors file"):
        replicas(folder, make)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"pipeline_parallel_size": 2, **THREADS}, "leave out pipeline_parallel_size"),
        (
            {"enable_dbo": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "as much for each half as for the whole",
        ),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replicas(folder, **wrong)
