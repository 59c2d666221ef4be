"""Tokens do not depend on how many ranks run a model: parts, stages, replicas, micro-batches, at every depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, EngineDeadError, UnsupportedModelError
from headway.core.messages import AddRequest, EngineStats, RequestUpdate
from headway.core.seat import Seat
from headway.engine import replicas as routing
from headway.engine.boot import build_engine
from headway.engine.client import ThreadClient
from headway.engine.replicas import ReplicaClient, Router, added, replica_args
from headway.parallel.turns import Turns
from headway.runner.launch import Launch
from headway.runner.step_body import StepBody
from headway.sampling.sampler import Variant
from tests.engine.harness import Answer, MakeEngine, request, run
from tests.engine.test_depths import FEATURES, close, requests_for
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.parallel.waits import watched

THREADS: dict[str, Any] = {"distributed_executor_backend": "threads", "distributed_timeout_seconds": 90}
HALVES: dict[str, Any] = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
KINDS: dict[str, dict[str, Any]] = {
    "tp2": THREADS | {"tensor_parallel_size": 2},
    "pp2": THREADS | {"pipeline_parallel_size": 2},
    "tp2-pp2": THREADS | {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "halves": HALVES,
    "tp2-halves": THREADS | HALVES | {"tensor_parallel_size": 2},
    "pp2-halves": THREADS | HALVES | {"pipeline_parallel_size": 2},
}


def all_features(seed: int = 2) -> list[AddRequest]:
    """Every sampling feature, grammars, log-probabilities of prompts and answers."""
    return requests_for(list(FEATURES.values()), seed=seed)


def played(args: EngineArgs, made: list[AddRequest]) -> tuple[dict[str, Answer], EngineStats]:
    """What an engine of its own says, and its counts."""
    core = build_engine(args, progress=False)
    core.learn(VOCABULARY)
    try:
        found = run(core, made)
        core.check_integrity()
        return found, core.stats()
    finally:
        core.shutdown()


def compare(answers: dict[str, Answer], oracle: dict[str, Answer]) -> None:
    assert answers.keys() == oracle.keys()
    for request_id, answer in answers.items():
        close(answer, oracle[request_id], tolerance=1e-4)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> dict[str, Answer]:
    args = EngineArgs(
        model=str(tiny_model), dtype="float32", device="cpu", max_model_len=128, max_num_seqs=8, block_size=8,
        max_num_batched_tokens=64, run_ahead=0, enable_prefix_caching=False,
    )  # fmt: skip
    core = build_engine(args, progress=False)
    core.learn(VOCABULARY)
    found = run(core, all_features())
    core.shutdown()
    return found


CASES = [
    ("tp2", 0),
    ("tp2", 4),
    ("pp2", 0),
    ("pp2", 2),
    ("tp2-pp2", 1),
    ("halves", 2),
    ("tp2-halves", 1),
    ("pp2-halves", 4),
]


@pytest.mark.parametrize(("kind", "depth"), CASES)
def test_every_feature(make_engine: MakeEngine, oracle: dict[str, Answer], kind: str, depth: int) -> None:
    """More requests than slots, and prompts that are cut into chunks."""
    core = make_engine(run_ahead=depth, max_num_batched_tokens=24, **KINDS[kind])
    compare(run(core, all_features()), oracle)


@pytest.mark.parametrize(
    ("kind", "ranks", "depth"),
    [("tp2", 2, 1), ("pp2", 2, 4), ("halves", 1, 1), ("tp2-pp2", 4, 2), ("tp2-halves", 2, 2)],
)
def test_preemption(make_engine: MakeEngine, oracle: dict[str, Answer], kind: str, ranks: int, depth: int) -> None:
    memory = 18 * KV_BLOCK_BYTES // ranks
    core = make_engine(run_ahead=depth, max_num_batched_tokens=24, kv_cache_memory_bytes=memory, **KINDS[kind])
    compare(run(core, all_features()), oracle)
    assert core.stats().num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_every_kind_at_every_depth(make_engine: MakeEngine, oracle: dict[str, Answer], kind: str, depth: int) -> None:
    compare(run(make_engine(run_ahead=depth, max_num_batched_tokens=24, **KINDS[kind]), all_features()), oracle)


@pytest.mark.parametrize(
    ("kind", "depth"),
    [("tp2", 0), ("tp2", 2), ("pp2", 0), ("pp2", 1), ("tp2-pp2", 4), ("tp2-halves", 2), ("pp2-halves", 1)],
)
def test_drafts_are_verified_on_all_ranks(make_engine: MakeEngine, kind: str, depth: int) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    made = [request(f"r{i}", [7, 8, 9, i, 7, 8, 9, i, 7, 8], seed=i, max_tokens=20, temperature=0.0) for i in range(4)]
    wanted = run(make_engine(), made)
    core = make_engine(run_ahead=depth, speculative_config=drafts, **KINDS[kind])
    compare(run(core, made), wanted)
    assert core.stats().num_draft_tokens > 0


@pytest.mark.parametrize(
    ("kind", "seed", "depth"),
    [
        ("tp2", 11, 2),
        ("pp2", 12, 3),
        ("halves", 13, 2),
        ("tp2-halves", 14, 1),
        pytest.param("pp2-halves", 15, 4, marks=pytest.mark.soak),
    ],
)
def test_on_the_simulated_device(tiny_model: Path, kind: str, seed: int, depth: int) -> None:
    """Each rank has a device of its own that runs late: no host wait but for results, and no race, in graphs or not."""
    made = all_features()[::3]
    args = EngineArgs(
        model=str(tiny_model), dtype="float32", device=f"sim:{seed}", max_model_len=128, max_num_seqs=4, block_size=8,
        max_num_batched_tokens=32, run_ahead=depth, kv_cache_memory_bytes=64 * KV_BLOCK_BYTES, **KINDS[kind],
    )  # fmt: skip
    plain = EngineArgs(
        model=str(tiny_model), dtype="float32", device="cpu", max_model_len=128, block_size=8, run_ahead=0
    )
    found = []
    for each in (plain, args):
        with watched() as waits:
            core = build_engine(each, progress=False)
            core.learn(VOCABULARY)
            found.append(run(core, made))
            core.check_integrity()
            assert core.stats().num_graph_steps or each is plain
            core.shutdown()
            waits.check(each.num_ranks)
    compare(found[1], found[0])
    assert waits.seen, "the device was meant to be late"


def test_halves_of_prompts_overlap(
    tiny_model: Path, oracle: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs do not know how many of their rows decode, so steps with prompts replay none, and all ranks halve them."""
    steps, halved, eager, turn = list[int](), list[object](), StepBody.eager, Turns.run

    def launched(body: StepBody, launch: Launch, variant: Variant, counted: bool) -> Any:
        steps.append(launch.shape.tokens)
        return eager(body, launch, variant, counted)

    def both(turns: Turns, first: Any, second: Any) -> Any:
        halved.append(turns)
        return turn(turns, first, second)

    args = EngineArgs(
        model=str(tiny_model), dtype="float32", device="sim:17", max_model_len=128, max_num_seqs=2, block_size=8,
        max_num_batched_tokens=32, run_ahead=1, kv_cache_memory_bytes=64 * KV_BLOCK_BYTES, **KINDS["tp2-halves"],
    )  # fmt: skip
    core = build_engine(args, progress=False)
    core.learn(VOCABULARY)
    made = all_features()[:2]
    with monkeypatch.context() as patch:
        patch.setattr(StepBody, "eager", launched)
        patch.setattr(Turns, "run", both)
        compare(run(core, made), {each.request_id: oracle[each.request_id] for each in made})
    stats = core.stats()
    core.shutdown()
    prompts = -(-sum(len(each.prompt_token_ids) for each in made) // 32)
    assert len(steps) >= 2 * prompts, "on both ranks"
    assert len(halved) == sum(tokens > 1 for tokens in steps)
    assert stats.num_graph_steps, "of decode rows"


def test_ranks_agree_on_which_steps_replay_graphs(
    tiny_model: Path, oracle: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From how many tokens on launches are hidden is a guess by a rank's own weights, which need not be as many everywhere."""
    guesses = iter([1, 10**9])
    monkeypatch.setattr("headway.engine.boot.hidden_from", lambda spec: next(guesses))
    args = EngineArgs(
        model=str(tiny_model), dtype="float32", device="sim:16", max_model_len=128, max_num_seqs=4, block_size=8,
        max_num_batched_tokens=32, run_ahead=1, kv_cache_memory_bytes=64 * KV_BLOCK_BYTES,
        **KINDS["tp2"] | {"distributed_timeout_seconds": 10},
    )  # fmt: skip
    core = build_engine(args, progress=False)
    core.learn(VOCABULARY)
    made = all_features()[:3]
    compare(run(core, made), {each.request_id: oracle[each.request_id] for each in made})
    core.shutdown()


# -- replicas ------------------------------------------------------------------------------------------------------------


def in_threads(args: EngineArgs, seat: Seat | None) -> ThreadClient:
    return ThreadClient(args, seat=seat)


def replicas(tiny_model: Path, number: int, **more: Any) -> ReplicaClient:
    args = EngineArgs(
        model=str(tiny_model), dtype="float32", device="cpu", max_model_len=128, block_size=8, max_num_seqs=8,
        kv_cache_memory_bytes=2**20, data_parallel_size=number, **more,
    )  # fmt: skip
    client = ReplicaClient(args, in_threads)
    client.learn(VOCABULARY)
    return client


def answers_of(client: ReplicaClient, made: list[AddRequest]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    client.add(made)
    while client.has_work():
        for update in client.poll(timeout=20.0):
            assert isinstance(update, RequestUpdate)
            answers.setdefault(update.request_id, Answer()).take(update)
    return answers


def test_replicas_give_the_same_tokens(tiny_model: Path, oracle: dict[str, Answer]) -> None:
    client = replicas(tiny_model, 2)
    try:
        compare(answers_of(client, all_features()), oracle)
        stats = client.stats()
        assert stats.generation_tokens == sum(each.generation_tokens for each in stats.replicas)
        assert all(each.num_steps for each in stats.replicas), "both had work"
        assert client.info.max_num_seqs == 16
    finally:
        client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.poll()


def test_a_dead_replica_ends_all(tiny_model: Path) -> None:
    client = replicas(tiny_model, 2)
    client.add([request(f"r{i}", [1, 2, 3], max_tokens=100, ignore_eos=True) for i in range(4)])
    client._state.clients[1].close()
    with pytest.raises(EngineDeadError, match="replica 1 of 2"):
        while True:
            client.poll(timeout=20.0)
    with pytest.raises(EngineDeadError, match="replica 1 of 2"):
        client.add([request("late", [1])])
    client.close()


def test_requests_go_where_their_prefix_lies() -> None:
    router = Router(3)
    talks = [[seed] * 64 + list(range(64)) for seed in range(3)]
    first = [router.route(request("a", talk)) for talk in talks]
    assert sorted(first) == [0, 1, 2], "of equals each in turn"
    again = [router.route(request("b", [*talk, 5, 6, 7])) for talk in talks]
    assert again == first
    for _ in range(3):
        router.route(request("c", talks[0]))
    busy = [router.route(request("d", talks[0])) for _ in range(6)]
    assert set(busy) != {first[0]}, "a prefix is not worth any queue"
    assert sum(router.loads) == 15


def test_prefixes_in_use_are_remembered_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "REMEMBERED", 3)
    router = Router(3)
    mine = router.route(request("a", [7] * 64))
    for number in range(20):
        router.route(request("b", [100 + number] * 64))
        router.loads = [int(nth == mine) for nth in range(3)]  # another one is the idlest
        assert router.route(request("a", [7] * 64)) == mine, "asked for after each of the others"
        assert len(router._where) <= 3
    for number in range(3):
        router.route(request("b", [200 + number] * 64))
    assert len(router._where) == 3 and {*router._where}.isdisjoint(routing._pieces(request("a", [7] * 64)))


def test_a_salt_has_routes_of_its_own() -> None:
    """Where a prompt is answered tells nobody that somebody else has sent it."""
    router, found = Router(3), []
    for salt in (None, "one", "two"):
        each = request("a", list(range(128)))
        each.cache_salt = salt
        found.append(router.route(each))
    assert sorted(found) == [0, 1, 2]


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_no_two_ranks_of_any_replicas_share_a_card(tensor: int, pipeline: int, first: int) -> None:
    sizes: dict[str, Any] = {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": 3,
    }
    each = replica_args(EngineArgs(model="x", device=f"cuda:{first}", **sizes))
    cards = [int(args.device.partition(":")[2]) + rank for args in each for rank in range(tensor * pipeline)]
    assert cards == list(range(first, first + 3 * tensor * pipeline))
    assert all(args.data_parallel_size == 1 and args.num_ranks == tensor * pipeline for args in each)


def test_short_prompts_go_to_the_idlest() -> None:
    router = Router(2)
    assert {router.route(request("a", [1])) for _ in range(2)} == {0, 1}
    router.done(1)
    assert router.route(request("b", [1])) == 1


def test_figures_of_replicas_are_added() -> None:
    from headway.core.messages import EngineStats

    each = [
        EngineStats(num_steps=2, kv_cache_usage=0.5, waits={"a": 1}),
        EngineStats(num_steps=3, waits={"a": 2, "b": 1}),
    ]
    both = added(each)
    assert (both.num_steps, both.kv_cache_usage, both.waits) == (5, 0.25, {"a": 3, "b": 1})
    assert both.replicas == each


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tensor_parallel_size": 0}, "positive integer"),
        ({"tensor_parallel_size": 3, **THREADS}, "cannot deal out 4 heads.*possible: 1, 2, 4"),
        ({"pipeline_parallel_size": 3, **THREADS}, "more than the model's 2 layers"),
        ({"enable_expert_parallel": True}, "no experts to deal out"),
        ({"distributed_executor_backend": "ray", "nnodes": 2, "tensor_parallel_size": 2}, "finds hosts by itself"),
        ({"distributed_executor_backend": "spawn"}, "must be mp, ray or threads"),
        ({"tensor_parallel_size": 2, "device": "sim:1"}, "are threads"),
        ({"nnodes": 2, "tensor_parallel_size": 1}, "does not divide"),
        ({"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2}, "node_rank"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "load balancer"),
        ({"quantization": "gguf", "tensor_parallel_size": 2}, "columns"),
    ],
)
def test_what_cannot_be_is_refused(make_engine: MakeEngine, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=says):
        make_engine(**wrong)
