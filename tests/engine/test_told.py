"""What an engine tells the front end of its model, what several engines tell together, and how ranks learn of an end."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.errors import EngineDeadError
from headway.core.histogram import Histogram
from headway.core.messages import AddRequest, EngineStats, ModelInfo, RequestUpdate, StepTrace, StepUpdates, Update
from headway.core.seat import Seat
from headway.core.task import Task
from headway.engine import world as worlds
from headway.engine.pooling import RERANKER_INSTRUCTION, pooling_info, pooling_of
from headway.engine.replicas import ReplicaClient, _together, added
from headway.engine.world import World
from headway.parallel.group import RankError
from headway.parallel.keys import OwnKeys
from headway.parallel.mesh import Mesh
from headway.pooling.spec import PoolingSpec
from headway.runner.admission import MAX_EOS_IDS
from headway.weights.sentence import SentenceFiles
from tests.engine.fake_core import model_info
from tests.engine.harness import MakeEngine, request
from tests.engine.tiny_llama import EOS, VOCAB, save_tiny_llama

# -- generation --------------------------------------------------------------------------------------------------------

SAID: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}


def told_of(make_engine: MakeEngine, folder: Path, said: dict[str, Any], **args: Any) -> ModelInfo:
    save_tiny_llama(folder)
    (folder / "generation_config.json").write_text(json.dumps(said))
    return make_engine(model=str(folder), kv_cache_memory_bytes=2**20, **args).info


def test_the_makers_advice_on_sampling_is_handed_on(make_engine: MakeEngine, tmp_path: Path) -> None:
    said = SAID | {"do_sample": True, "max_length": 20, "top_p": None}
    info = told_of(make_engine, tmp_path, said)
    assert info.generation_defaults == {name: value for name, value in SAID.items() if name != "top_p"}
    assert told_of(make_engine, tmp_path, SAID, generation_config="vllm").generation_defaults == {}


@pytest.mark.parametrize(
    ("said", "ends"),
    [({}, EOS), ({"eos_token_id": 7}, [7]), ({"eos_token_id": [7, 2]}, [7, 2]), ({"eos_token_id": 0}, [0]),
     ({"eos_token_id": [VOCAB, -1, VOCAB - 1]}, [VOCAB - 1]),
     ({"eos_token_id": list(range(2 * MAX_EOS_IDS))}, list(range(MAX_EOS_IDS)))],
)  # fmt: skip
def test_tokens_that_end_an_answer(
    make_engine: MakeEngine, tmp_path: Path, said: dict[str, Any], ends: list[int]
) -> None:
    """Those of generation_config.json come first; none that there is not, and no more than slots have room for."""
    assert told_of(make_engine, tmp_path, said).eos_token_ids == ends


def test_an_engine_tells_its_sizes(make_engine: MakeEngine, tmp_path: Path) -> None:
    args = {"max_model_len": 40, "max_num_seqs": 3, "max_num_batched_tokens": 24, "max_logprobs": 5, "device": "cpu"}
    info = told_of(make_engine, tmp_path, {}, **args)
    assert (info.model, info.architecture, info.dtype, info.kv_cache_dtype) == (
        str(tmp_path), "LlamaForCausalLM", "float32", "float32",
    )  # fmt: skip
    assert (info.device, info.vocab_size, info.max_model_len, info.max_num_seqs, info.max_logprobs) == (
        "cpu", VOCAB, 40, 3, 5,
    )  # fmt: skip
    assert info.num_kv_tokens == 3 * 40 and info.tasks == (Task.GENERATE,)
    assert info.pooling is None and info.vision is None and info.hearing is None and not info.encoder


# -- pooling -----------------------------------------------------------------------------------------------------------


def pools(
    spec: PoolingSpec, *, files: Any = None, config: Any = None, settings: Any = None, arch: str = "BertModel"
) -> Any:
    model: Any = SimpleNamespace(
        spec=SimpleNamespace(pooling=spec, architecture=arch, num_token_types=2, adapters=("query", "passage")),
        head_width=8,
    )
    checkpoint: Any = SimpleNamespace(
        sentence=files, config=config or {}, token_heads=SimpleNamespace(pickled="convert it")
    )
    found = pooling_info(EngineArgs(model="nowhere", runner="pooling", pooler_config=settings), model, checkpoint, 64)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("spec", "width", "token_width", "kind", "score_by"),
    [
        (PoolingSpec(kind="embed", methods=("mean",)), 8, 8, "mean", "vectors"),
        (PoolingSpec(kind="embed", methods=("last",)), 8, 0, "last", "vectors"),
        (PoolingSpec(kind="embed", methods=("cls", "max")), 8, 0, "cls+max", "vectors"),
        (PoolingSpec(kind="embed", methods=("all",)), 0, 8, "all", "tokens"),
        (PoolingSpec(kind="classify", methods=("cls",), labels=("a", "b")), 8, 0, "cls", ""),
        (PoolingSpec(kind="classify", methods=("cls",), labels=("a",)), 8, 0, "cls", "pair"),
        (PoolingSpec(kind="token_classify", methods=("all",)), 0, 8, "all", ""),
    ],
)
def test_what_vectors_mean(spec: PoolingSpec, width: int, token_width: int, kind: str, score_by: str) -> None:
    found = pools(spec)
    assert (found.width, found.token_width, found.pooling_type, found.score_by) == (width, token_width, kind, score_by)
    assert (found.num_token_types, found.adapters, found.missing) == (2, ("query", "passage"), "convert it")


def test_what_files_say_of_vectors() -> None:
    spec = PoolingSpec(kind="embed", methods=("mean",), normalize=True, activation="sigmoid", labels=("x",))
    usual = pools(spec)
    assert (usual.normalize, usual.activation, usual.labels, usual.sparse) == (True, "sigmoid", ("x",), False)
    assert (usual.prompts, usual.default_prompt_name, usual.include_prompt, usual.similarity) == (
        {},
        None,
        True,
        "cosine",
    )
    assert (usual.lower_case, usual.step_tag_id, usual.returned_token_ids, usual.matryoshka_dimensions) == (
        False,
        None,
        (),
        (),
    )
    assert (usual.token_weights, usual.token_widths, usual.token_embed_start) == (False, {}, 0)
    files = SentenceFiles(
        prompts={"query": "q: "}, default_prompt_name="query", include_prompt=False, similarity="dot", lower_case=True
    )
    config = {"task_instructions": {"query": "other", "text": "t: "}, "matryoshka_dimensions": [4, 8]}
    found = pools(spec, files=files, config=config, settings={"step_tag_id": 5, "returned_token_ids": [3, 1]})
    assert found.prompts == {"query": "q: ", "text": "t: "}, "the sentence's own before the tasks'"
    assert (found.default_prompt_name, found.include_prompt, found.similarity, found.lower_case) == (
        "query",
        False,
        "dot",
        True,
    )
    assert (found.step_tag_id, found.returned_token_ids, found.matryoshka_dimensions) == (5, (3, 1), (4, 8))
    assert pools(spec, config={"task_instructions": ["x"], "matryoshka_dimensions": 4}).matryoshka_dimensions == ()
    assert pools(PoolingSpec(kind="sparse", methods=("max",), head_first=True)).sparse


def test_heads_for_tokens_have_widths_of_their_own() -> None:
    parts = ((Task.TOKEN_EMBED, 5), (Task.TOKEN_CLASSIFY, 1))
    found = pools(PoolingSpec(kind="embed", methods=("cls",), token_parts=parts))
    assert (found.token_weights, found.token_embed_start) == (True, 1)
    assert found.token_widths == {"token_embed": 5, "token_classify": 1}
    assert not pools(PoolingSpec(kind="embed", methods=("cls",), token_parts=parts[:1])).token_weights


@pytest.mark.parametrize(
    ("arch", "files", "config", "templated"),
    [
        ("Qwen3ForCausalLM", SentenceFiles(score_tokens=(7, 3)), {}, True),
        ("Qwen3ForCausalLM", None, {"classifier_from_token": ["no", "yes"]}, True),
        ("Qwen3ForCausalLM", SentenceFiles(), {}, False), ("Qwen2ForCausalLM", SentenceFiles(score_tokens=(7, 3)), {}, False),
    ],
)  # fmt: skip
def test_rerankers_that_answer_have_a_template(arch: str, files: Any, config: dict[str, Any], templated: bool) -> None:
    found = pools(PoolingSpec(kind="classify", labels=("a",)), files=files, config=config, arch=arch)
    assert found.score_instruction == (RERANKER_INSTRUCTION if templated else "")
    assert all((f"{{{name}}}" in found.score_template) == templated for name in ("instruction", "query", "document"))


@pytest.mark.parametrize(("head_first", "width"), [(False, 11), (True, 5)])
def test_texts_in_chunks_need_sums(head_first: bool, width: int) -> None:
    """As wide as what is pooled: hidden states, or what the head makes of them."""
    spec = PoolingSpec(kind="embed", methods=("mean",), head_first=head_first)

    def floats(cached: bool) -> list[int]:
        model: Any = SimpleNamespace(spec=SimpleNamespace(cache=SimpleNamespace(is_empty=not cached)), head_width=5)
        made = pooling_of(model, spec)
        assert made.tasks == (Task.EMBED, Task.TOKEN_EMBED)
        return [table.width for table in made.tables(11) if table.dtype is torch.float32]

    assert (floats(cached=True), floats(cached=False)) == ([width], [])


# -- several engines ---------------------------------------------------------------------------------------------------


def test_every_figure_of_several_engines() -> None:
    """Counts are added up, shares averaged, depths the deepest; clocks are there where all have one."""
    each: list[EngineStats] = []
    for factor in (1, 10):
        stats = EngineStats(has_device_clock=True)
        for number, name in enumerate(EngineStats.__struct_fields__, 2):
            held = getattr(stats, name)
            if isinstance(held, Histogram):
                setattr(stats, name, Histogram((1.0, 2.0), [factor, 0, number], float(number * factor)))
            elif isinstance(held, dict) or held is None:
                setattr(stats, name, {"a": number * factor, f"only {factor}": 1})
            elif type(held) in (int, float):
                setattr(stats, name, type(held)(number * factor))
        stats.num_accepted_tokens_per_pos = [3 * factor, 2] if factor == 1 else [3 * factor]
        stats.recent_steps = [StepTrace(factor, 1, 1, False, 0.0, 0.0, 0.0, 0.0)]
        each.append(stats)
    both = added(each)
    for number, name in enumerate(EngineStats.__struct_fields__, 2):
        found, one = getattr(both, name), getattr(each[0], name)
        if name == "kv_cache_usage":
            assert found == 5.5 * number
        elif name == "run_ahead":
            assert found == 10 * number
        elif isinstance(one, Histogram):
            assert found == Histogram((1.0, 2.0), [11, 0, 2 * number], 11.0 * number)
        elif isinstance(one, dict):
            assert found == {"a": 11 * number, "only 1": 1, "only 10": 1}, name
        elif type(one) in (int, float):
            assert found == 11 * number, name
    assert both.num_accepted_tokens_per_pos == [33, 2] and [step.step for step in both.recent_steps] == [1, 10]
    assert both.replicas == each and both.has_device_clock
    each[1].has_device_clock = False
    assert not added(each).has_device_clock and added([EngineStats(), EngineStats()]).rows_per_step == Histogram()


def test_what_the_door_is_told_of_several_engines() -> None:
    infos = [model_info(), msgspec.structs.replace(model_info(), max_num_seqs=3, num_kv_tokens=7, max_model_len=50)]
    found = _together(infos)
    assert (found.max_num_seqs, found.num_kv_tokens, found.max_model_len) == (8 + 3, 1000 + 7, 50)
    assert found.notes == ["2 replicas"] and found.model == "fake"


class Replica:
    """An engine that says what it is told to."""

    info = model_info()

    def __init__(self) -> None:
        self.added, self.aborted = list[str](), list[str]()
        self.said = list[Update]()
        self.changed, self.error, self.closed = threading.Condition(), "", False
        self.seconds: float | None = 2.0

    def learn(self, vocabulary: Any) -> None:
        self.vocabulary = vocabulary

    def add(self, requests: list[AddRequest]) -> None:
        self.added += [each.request_id for each in requests]

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def say(self, updates: StepUpdates | None = None, error: str = "") -> None:
        with self.changed:
            self.said, self.error = [] if updates is None else updates.parts(), error
            self.changed.notify_all()

    def poll(self, timeout: float | None = None) -> list[Update]:
        with self.changed:
            self.changed.wait_for(lambda: self.said or self.error or self.closed, timeout)
            if self.error or self.closed:
                raise EngineDeadError(self.error or "closed")
            found, self.said = self.said, []
            return found

    def has_work(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.added))

    def processor_seconds(self) -> float | None:
        return self.seconds

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def replicas(number: int = 2) -> tuple[ReplicaClient, list[Replica]]:
    made: list[Replica] = []

    def make(args: EngineArgs, seat: Seat | None) -> Any:
        made.append(Replica())
        return made[-1]

    return ReplicaClient(EngineArgs(model="x", device="cpu", data_parallel_size=number), make), made


def ended(*names: str) -> StepUpdates:
    updates = StepUpdates()
    updates.add([RequestUpdate(request_id=name, new_token_ids=[1], finish_reason="stop") for name in names])
    return updates


def test_requests_go_to_one_replica_each_and_are_aborted_there() -> None:
    client, made = replicas()
    client.add([request(f"r{i}", [i]) for i in range(5)])
    assert client.has_work() and sorted(len(each.added) for each in made) == [2, 3]
    client.abort(["r0", "r1", "r1", "unknown"])
    assert [sorted(each.aborted) for each in made] == [sorted({"r0", "r1"} & set(each.added)) for each in made]
    loads = client._state.router.loads
    assert sum(loads) == 3 and client.stats().num_running == 5
    left = [name for each in made for name in each.added if name not in ("r0", "r1")]
    for each in made:
        mine = [name for name in each.added if name in left]
        if mine:
            each.say(ended(*mine))
            found = client.poll(10.0)
            assert [update.request_id for update in found] == mine  # type: ignore[union-attr]
    assert loads == [0, 0] and not client.has_work() and client.poll(0.0) == []
    client.close()
    assert all(each.closed for each in made)
    for use in (
        lambda: client.add([request("z", [1])]),
        lambda: client.abort(["z"]),
        lambda: client.poll(0.0),
        client.stats,
    ):
        with pytest.raises(EngineDeadError, match="shut down"):
            use()


def test_processor_time_is_known_where_that_of_all_is() -> None:
    client, made = replicas(3)
    assert client.processor_seconds() == 6.0
    made[1].seconds = None
    assert client.processor_seconds() is None
    client.close()


@pytest.mark.parametrize("blames_first", [True, False])
def test_the_replica_that_died_is_named_and_not_the_one_that_missed_it(blames_first: bool) -> None:
    client, made = replicas()
    blame, cause = ("RankError: rank 0 said nothing", "its card is lost")
    made[0].say(error=blame if blames_first else cause)
    made[1].say(error=cause if blames_first else blame)
    with pytest.raises(EngineDeadError, match=f"replica {int(blames_first)} of 2: {cause}"):
        while True:
            client.poll(10.0)
    client.close()


def test_replicas_that_do_not_start_end_the_others() -> None:
    """What one says of itself is told before what another says of it."""
    made: list[Replica] = []

    def make(args: EngineArgs, seat: Seat | None) -> Any:
        assert seat is not None and seat.size == 3
        if seat.rank < 2:
            raise (RankError if seat.rank == 0 else ValueError)(f"replica {seat.rank}")
        made.append(Replica())
        return made[-1]

    args = EngineArgs(model="x", device="cpu", data_parallel_size=3, enable_expert_parallel=True)
    with pytest.raises(ValueError, match="replica 1"):
        ReplicaClient(args, make)
    assert [each.closed for each in made] == [True]


# -- the end of a world ------------------------------------------------------------------------------------------------


def test_the_first_reason_of_an_end_stays_and_all_are_told() -> None:
    ours, told = World(Mesh(2, 1)), list[str]()
    ours._groups.append(SimpleNamespace(stop=lambda: told.append("group")))  # type: ignore[arg-type]
    ours._transports.append(SimpleNamespace(abort=lambda: told.append("transport")))  # type: ignore[arg-type]
    ours.check()
    ours.lose("rank 1 was killed")
    ours.lose("something else")
    assert told == ["group", "transport"] * 2
    for look in (ours.check, lambda: _raised(ours.explain(RankError("a connection broke")))):
        with pytest.raises(RankError, match=r"^rank 1 was killed$"):
            look()


def _raised(error: Exception) -> None:
    raise error


def test_an_error_that_nobody_explains_is_the_reason_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "REASON_SECONDS", 0.01)
    ours = World(Mesh(2, 1))
    assert str(ours.explain(RankError("a connection broke"))) == "a connection broke" == ours.lost
    alone = World(Mesh())
    error = RankError("a connection broke")
    assert alone.explain(error) is error and alone.lost is None


@pytest.mark.parametrize(
    ("mesh", "starts", "told"),
    [(Mesh(replicas=2), True, True), (Mesh(replicas=2), False, False), (Mesh(2), True, False)],
)
def test_replicas_are_told_of_one_that_does_not_start(mesh: Mesh, starts: bool, told: bool) -> None:
    """While they start; later each finds out by itself, and ranks of one model are watched."""
    keys = OwnKeys()
    ours, other = World(mesh, keys), World(Mesh(replica=1, replicas=2), keys)
    if not starts:
        ours.started()
    ours.fail(ValueError("no memory"))
    if told:
        with pytest.raises(RankError, match=r"rank 0 .*did not start: ValueError: no memory"):
            other.check()
        late = World(Mesh(replica=1, replicas=2), keys)
        late.started()
        late.check()
    else:
        other.check()


def test_the_least_of_what_all_give() -> None:
    keys, found = OwnKeys(), dict[int, list[int]]()

    def run(rank: int) -> None:
        ours = World(Mesh(3, 1, rank), keys)
        found[rank] = [ours.least(10 - rank), ours.least(rank), ours.least_of_leaders(7)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rank: [8, 0, 7] for rank in range(3)}
    assert World(Mesh()).least(5) == 5


def test_messages_go_to_all_followers() -> None:
    ours, sent = World(Mesh(3)), list[tuple[int, int, bytes]]()

    def post(number: int) -> Any:
        return SimpleNamespace(send=lambda kind, data: sent.append((number, kind, data)))

    ours.posts += [post(0), post(1)]
    ours.send(4, b"x")
    assert sent == [(0, 4, b"x"), (1, 4, b"x")]


def test_halves_overlap_where_there_is_something_to_overlap() -> None:
    waits: Any = SimpleNamespace(asynchronous=True)
    assert World(Mesh()).turns(waits) is None
    ours = World(Mesh(2, 2))
    ours.tensor = ours._group("t", 0, 1, torch.device("cpu"))
    assert ours.turns(waits) is None, "stages have one half after the other"
    ours.close()
