"""Each figure of the anchors has the value of its name: on an engine whose clock runs as many seconds as the test says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.cli.bench.anchors import ablations, context, gate, generation, kv_fp8, pooling, server, startup, structured
from headway.cli.bench.anchors.context import TINY, Bench, plain, random_prompts
from headway.cli.bench.anchors.table import Table
from headway.core.outputs import CompletionOutput, RequestOutput
from headway.core.params import SamplingParams
from headway.core.task import Task
from tests.engine.tiny_llama import CONFIG

SCALE = replace(
    TINY, rows=(1, 2, 5), variant_rows=3, nano=4, nano_lengths=(5, 5), prefill=(6, 16), alone=20, load=(7, 8, 4)
)
PROMPT_SECONDS, STEP_SECONDS = 0.25, 0.5


def cost(params: SamplingParams) -> float:
    """What one row adds to a step, of half seconds."""
    if params.structured_outputs is not None:
        return 2.0 if params.structured_outputs.json is not None else 3.0
    features = {
        "logprobs": 0.25,
        "top_k": 0.5,
        "presence_penalty": 0.75,
        "seed": 1.0,
        "bad_words": 1.25,
        "logit_bias": 1.5,
    }
    given = (each for name, each in features.items() if getattr(params, name))
    return next(given, 0.125)


class Machine:
    """An engine and its clock: a quarter of a second a token of a prompt, a step half a second and what its rows add."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[list[list[int]], list[SamplingParams]]] = []
        self.opened: list[dict[str, Any]] = []
        self.model_info = SimpleNamespace(vocab_size=300, tasks=(Task.EMBED,))
        self.room = 10**9  # rows that there is memory for
        self.preempted = 0

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(num_preemptions=self.preempted)

    @contextmanager
    def open(self, bench: Bench, **given: Any) -> Iterator[Machine]:
        self.opened.append({**bench.engine, "folder": bench.folder.name, **given})
        yield self

    def generate(
        self, prompts: list[list[int]], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        assert use_tqdm is False
        self.calls.append((prompts, list(params)))
        self.preempted += max(0, len(prompts) - self.room)
        self.now += PROMPT_SECONDS * sum(map(len, prompts))
        self.now += STEP_SECONDS * max(each.max_tokens or 0 for each in params) * (1 + sum(map(cost, params)))
        return [
            RequestOutput(
                request_id="", prompt=None, prompt_token_ids=prompt, finished=True,
                outputs=[CompletionOutput(index=0, text="", token_ids=[len(prompt)] * (each.max_tokens or 0))],
            )
            for prompt, each in zip(prompts, params, strict=True)
        ]  # fmt: skip

    def encode(self, prompts: list[list[int]], pooling_task: Task, use_tqdm: bool) -> None:
        assert pooling_task is Task.EMBED and not use_tqdm
        self.calls.append((prompts, []))
        self.now += PROMPT_SECONDS * sum(map(len, prompts))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    clock = SimpleNamespace(perf_counter=lambda: made.now)
    for module in (context, pooling):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Bench, "open", lambda self, **given: made.open(self, **given))
    return made


def bench_of(tmp_path: Path, full: bool = True, runs: int = 2) -> Bench:
    folder = tmp_path / "shape"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    return Bench(Table("shape"), SCALE, folder, "tokenizer", tmp_path, runs, {"run_ahead": 4}, full)


def step(added: float) -> float:
    return 1e3 * STEP_SECONDS * (1 + added)


def runs_of(bench: Bench) -> dict[str, list[float]]:
    return {row.name.partition(".")[2]: row.runs for row in bench.table.rows()}


def test_generation(machine: Machine, tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    assert generation.measure(bench) is None
    found = runs_of(bench)
    for rows in SCALE.rows:
        assert found.pop(f"itl_ms_greedy_bs{rows}") == pytest.approx([step(rows / 8)] * 2)
    free = step(3 / 8)
    assert found.pop("itl_ms_plain_bs3") == pytest.approx([free] * 2)
    for feature, each in zip(generation.FEATURES, (0.5, 0.25, 0.75, 1.0, 1.25, 1.5), strict=True):
        assert found.pop(f"itl_ms_{feature}_bs3") == pytest.approx([step(3 * each)] * 2)
        assert found.pop(f"cost_pct_{feature}_bs3") == pytest.approx([(step(3 * each) / free - 1) * 100])
    prompts = 6 * 16 * PROMPT_SECONDS
    assert found.pop("prefill_tok_s") == pytest.approx([6 * 16 / (prompts + 0.5 * (1 + 6 / 8))] * 2)
    assert found.pop("ttft_ms_alone") == pytest.approx([1e3 * (20 * PROMPT_SECONDS + 0.5 * 1.125)] * 2)
    assert found.pop("nano_tok_s") == pytest.approx([4 * 5 / (4 * 5 * PROMPT_SECONDS + 5 * 0.5 * (1 + 4 / 8))] * 2)
    assert not found
    assert [each["run_ahead"] for each in machine.opened] == [0, 4], "the check's own, and the measured one"
    alone = [prompts for prompts, _ in machine.calls if list(map(len, prompts)) == [20]]
    assert len(alone) == 2 * generation.ALONE_REPEATS and len({str(prompts) for prompts in alone}) == len(alone)


def test_rows_that_were_preempted_give_no_figure(machine: Machine, tmp_path: Path) -> None:
    machine.room = 2
    bench = bench_of(tmp_path, full=False, runs=1)
    generation.measure(bench)
    found = {row.name.partition(".")[2]: row for row in bench.table.rows()}
    assert found["itl_ms_short_bs2"].runs and not found["itl_ms_short_bs5"].runs
    assert "preempted for want of memory" in found["itl_ms_short_bs5"].note


def test_shapes_whose_features_are_not_measured(machine: Machine, tmp_path: Path) -> None:
    bench = bench_of(tmp_path, full=False, runs=1)
    generation.measure(bench)
    found = runs_of(bench)
    assert [*found] == [f"itl_ms_{kind}_bs{rows}" for kind in ("greedy", "short") for rows in SCALE.rows] + [
        "nano_tok_s", "prefill_tok_s", "ttft_ms_alone",
    ]  # fmt: skip
    lengths = {params[0].max_tokens for prompts, params in machine.calls if len(prompts) == 5 and len(prompts[0]) == 8}
    assert lengths == {1, SCALE.short, SCALE.long, SCALE.variant_short, SCALE.variant_long}
    one = bench_of(tmp_path, full=False)
    one.table._only = ["itl_ms_short_bs5"]
    generation.measure(one)
    assert runs_of(one) == {"itl_ms_short_bs5": pytest.approx([step(5 / 8)] * 2)}


def test_grammars(machine: Machine, tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    bench.table._only = ["structured_*_ms_*", "structured_*_cost_*", structured.OFFLINE_LOAD]
    assert structured.measure(bench) is None
    found = runs_of(bench)
    steps = {"none": 2 * 0.125, "json_all": 2 * 2.0, "regex_all": 2 * 3.0, "json_one": 2.0 + 0.125}
    for kind, added in steps.items():
        assert found.pop(f"structured_{kind}_ms_bs2") == pytest.approx([step(added)] * 2), kind
        if kind != "none":
            ratio = step(added) / step(0.25)
            assert found.pop(f"structured_{kind}_cost_pct_bs2") == pytest.approx([(ratio - 1) * 100])
    load = 7 * 4 / (7 * 8 * PROMPT_SECONDS + 4 * 0.5 * (1 + 7 / 8))
    assert found.pop(structured.OFFLINE_LOAD) == pytest.approx([load] * 2) and not found
    assert {each["folder"] for each in machine.opened} == {"shape_300"}
    assert [each["run_ahead"] for each in machine.opened] == [0, 4]


def test_keys_and_values_in_8_bits(machine: Machine, tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    kv_fp8.measure(bench)
    found = runs_of(bench)
    for rows in (2, 5):
        assert found.pop(f"itl_ms_greedy_bs{rows}_kv_fp8") == pytest.approx([step(rows / 8)] * 2)
    assert found.pop("nano_tok_s_kv_fp8") == pytest.approx([20 / (5.0 + 2.5 * 1.5)] * 2)
    assert found.pop("offline_load_tok_s_kv_fp8") == pytest.approx([28 / (14.0 + 2.0 * 1.875)] * 2) and not found
    assert {each["kv_cache_dtype"] for each in machine.opened} == {"fp8"}
    assert [(each["folder"], each["run_ahead"]) for each in machine.opened] == [
        ("shape", 0), ("shape", 4), ("shape_300", 0), ("shape_300", 4),
    ]  # fmt: skip


def test_what_each_technique_buys(machine: Machine, tmp_path: Path) -> None:
    bench = bench_of(tmp_path, runs=1)
    ablations.measure(bench)
    found = runs_of(bench)
    assert "ablation_no_fast_prefill_ttft_ms" not in found, "every layer of the shape caches"
    for variant in ablations.variants_of(bench):
        for rows in SCALE.rows:
            assert found.pop(f"ablation_{variant}_itl_ms_bs{rows}") == pytest.approx([step(rows / 8)]), variant
        assert found.pop(f"ablation_{variant}_ttft_ms") == pytest.approx([1e3 * (5.0 + 0.5 * 1.125)])
        assert found.pop(f"ablation_{variant}_prefill_tok_s") == pytest.approx([96 / (24.0 + 0.5 * 1.75)])
    assert not found
    measured = [each for each in machine.opened if each["run_ahead"] != 0 or "enforce_eager" not in each]
    assert sorted(each["run_ahead"] for each in measured) == [0, 1, 2] + [4] * 6
    assert sum(bool(each.get("enforce_eager")) for each in machine.opened) == 2, "an oracle of its own, and the variant"


def test_vectors(machine: Machine, tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    bench = replace(bench, scale=replace(SCALE, texts=40, max_model_len=2000))
    config = {**CONFIG, "vocab_size": 300, "max_position_embeddings": 400}
    (bench.folder / "config.json").write_text(json.dumps(config))
    pooling.measure(bench)
    assert runs_of(bench) == {
        f"req_s_len{length}": pytest.approx([1 / (PROMPT_SECONDS * length)] * 2) for length in (32, 128, 398)
    }
    assert [len(prompts) for prompts, _ in machine.calls] == [5, 40, 40, 5, 40, 40, 1, 10, 10], "of long ones a quarter"


def test_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm every time, cold once, with an empty cache; the check says what a child that gave no token said."""
    seen: list[dict[str, str]] = []

    def first_token(_: Bench, environment: dict[str, str]) -> float:
        seen.append(environment)
        return len(seen) / 4

    monkeypatch.setattr(startup, "first_token", first_token)
    bench = bench_of(tmp_path)
    startup.measure(bench)
    assert runs_of(bench) == {"start_to_first_token_s": [0.25, 0.75], "cold_start_to_first_token_s": [0.5]}
    cache = tmp_path / "empty_triton_cache"
    assert seen == [{}, {"TRITON_CACHE_DIR": str(cache)}, {}] and not [*cache.iterdir()]


def test_a_servers_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure of a rate, and notes where the server was not saturated."""
    bench = bench_of(tmp_path, runs=1)
    asked = []
    numbers = {"request_throughput": 1.5, "output_throughput": 2.5, "median_ttft_ms": 3.5, "p99_ttft_ms": 4.5,
               "median_itl_ms": 5.5, "p99_itl_ms": 6.5}  # fmt: skip

    async def served(args: Any, show: bool) -> dict[str, Any]:
        asked.append(args)
        return {**numbers, "failed": 0, "total_output_tokens": 28, "errors": {}, "output_tokens_counted_by_server": True,
                "lag_p99_ms": 0.0, "last_start": 2.0, "duration": 2.75}  # fmt: skip

    @contextmanager
    def running(_: Bench) -> Iterator[Any]:
        yield 4321, SimpleNamespace(pid=7), 12.5

    spent = iter([1.0, 1.7, 5.0, 5.35])
    monkeypatch.setattr(server, "bench_serve", served)
    monkeypatch.setattr(server, "running", running)
    monkeypatch.setattr(server, "processor_seconds", lambda _: next(spent))
    bench.table.announce([structured.OFFLINE_LOAD], "tok/s", "higher")
    bench.table.add(structured.OFFLINE_LOAD, 10.0)
    server.measure(bench)
    found = runs_of(bench)
    for rate, cpu in (("inf", 100.0), ("500", 50.0)):
        names = ("req_s", "tok_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
        assert [found[f"server_{rate}_{name}"] for name in names] == [[1.5], [2.5], [3.5], [4.5], [5.5], [6.5]]
        assert found[f"server_{rate}_frontend_cpu_ms"] == pytest.approx([cpu])
    assert found["server_start_s"] == [12.5] and found["server_over_offline_pct"] == [25.0]
    notes = {row.name.partition(".")[2]: row.note for row in bench.table.rows()}
    assert notes["server_inf_req_s"] == ""
    assert notes["server_500_req_s"] == "the last request was sent after 2.00 s, the last answer took 0.75 s more"
    warm, *rest = asked
    assert (warm.num_prompts, warm.request_rate) == (7, float("inf"))
    assert [(each.num_prompts, each.request_rate, each.seed) for each in rest] == [(7, float("inf"), 0), (7, 500.0, 0)]
    for each in asked:
        assert (each.port, each.random_input_len, each.random_output_len, each.random_vocab_size) == (4321, 8, 4, 300)
        assert each.ignore_eos


def test_sampling_of_what_is_measured() -> None:
    """Exactly so many tokens; a grammar's end is its own, and a pattern's least length holds it up."""
    params = plain(9)
    assert (params.temperature, params.max_tokens, params.detokenize, params.ignore_eos) == (0.0, 9, False, True)
    [json_row] = structured.kinds_of("json_all", 1)
    [regex_row] = structured.kinds_of("regex_all", 1)
    assert not plain(9, **json_row).ignore_eos and plain(9, **json_row).min_tokens == 0
    assert not plain(9, **regex_row).ignore_eos and plain(9, **regex_row).min_tokens == 9
    assert plain(9, temperature=0.5, max_tokens=3).temperature == 0.5 and plain(9, max_tokens=3).max_tokens == 3
    one, *others = structured.kinds_of("json_one", 4)
    assert one["structured_outputs"].json == structured.SCHEMA and others == [{"temperature": 0.8}] * 3
    ids = [token for prompt in random_prompts(random.Random(0), 40, 50, 7) for token in prompt]
    assert len(ids) == 2000 and {*ids} == set(range(7))
    wide = [token for prompt in random_prompts(random.Random(0), 40, 500, 50_000) for token in prompt]
    assert 9_990 < max(wide) < context.WORDS


def test_what_the_check_found() -> None:
    assert gate.difference([[1, 2, 3, 4]], [[1, 2, 3, 4]]) is None
    found = gate.difference([[1], [1, 2, 3, 4, 5]], [[1], [1, 9, 8, 7, 6]])
    assert found == "red test: row 1 differs from run_ahead=0 at token 1: [2, 3, 4], not [9, 8, 7]"
    assert gate.difference([[1, 2]], [[1]]) == "red test: row 0 differs from run_ahead=0 at token 1: [2], not []"
