"""Each flag arrives where it is meant for, and each figure that is told is the one its name says, exactly: clocks here go by
steps that a test gives."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

import headway
from headway.api.hearing.transcript import Segment, Transcript
from headway.cli.bench import metrics, online
from headway.cli.bench.datasets import make_items, request_body
from headway.cli.bench.load import MAX_REFUSAL_BYTES, LoadResult, Planned, Record, _Call
from headway.cli.bench.serve_args import ServeArgs
from headway.cli.main import app
from headway.core.config import EngineArgs
from headway.core.outputs import CompletionOutput, RequestOutput
from headway.core.params import SamplingParams
from headway.core.task import Task
from headway.server import launch, logs

ENGINE = ("--dtype", "float32", "--seed", "5", "--max-num-seqs", "9")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


class Clock:
    """Seconds that the test gives, one reading after the other."""

    def __init__(self, readings: Sequence[float]) -> None:
        self.left = list(readings)

    def __call__(self) -> float:
        return self.left.pop(0)


class Engine:
    """An ``LLM`` that notes what it is asked."""

    made: ClassVar[list[dict[str, Any]]] = []
    calls: ClassVar[list[tuple[Any, Any, dict[str, Any]]]] = []
    tasks = (Task.EMBED,)

    def __init__(self, **given: Any) -> None:
        Engine.made.append(given)
        self.model_info = SimpleNamespace(vocab_size=50, tasks=self.tasks, max_model_len=64, model="m")
        self._asked = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompts: list[Any], params: Any, **more: Any) -> list[RequestOutput]:
        Engine.calls.append((prompts, params, more))
        each = params if isinstance(params, list) else [params] * len(prompts)
        return [
            _output(prompt, [[7] * (one.max_tokens or 0)] * one.n) for prompt, one in zip(prompts, each, strict=True)
        ]

    def encode(self, prompts: list[Any], **more: Any) -> list[Any]:
        Engine.calls.append((prompts, None, more))
        return [SimpleNamespace(prompt_token_ids=[1, 2, 3]) for _ in prompts]

    def transcribe(self, files: list[str], options: Any) -> list[Transcript]:
        Engine.calls.append((files, options, {}))
        segment = Segment(0, 0.5, 61.25, " hi  --> ", [1], 0.0, -0.5)
        return [Transcript(f"said {file}", "en", 2.0, [segment], []) for file in files]

    def stats(self) -> Any:
        """Each time 1, 10, 100... more of everything."""
        self._asked += 1
        n = self._asked
        return SimpleNamespace(
            num_accepted_tokens_per_pos=[1], num_drafts=10 * n, num_draft_tokens=40 * n, num_accepted_tokens=20 * n * n,
            num_steps=3 * n * n, schedule_seconds=1.0 * n, launch_seconds=0.25 * n, apply_seconds=0.125 * n,
        )  # fmt: skip


def _output(prompt: list[int], texts: list[list[int]]) -> RequestOutput:
    completions = [CompletionOutput(index=i, text="", token_ids=ids) for i, ids in enumerate(texts)]
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=prompt, outputs=completions, finished=True)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    Engine.made, Engine.calls = [], []
    monkeypatch.setattr(headway, "LLM", Engine)
    return Engine


def _made(model: str, **more: Any) -> dict[str, Any]:
    given = EngineArgs(model=model, dtype="float32", seed=5, max_num_seqs=9, **more)
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}


def test_throughput(engine: type[Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headway.cli.bench.offline.perf_counter", Clock([10.0, 14.0]))
    file = tmp_path / "figures.json"
    result = invoke(
        "bench", "throughput", "m", *ENGINE, "--input-len", "20", "--output-len", "3", "--num-prompts", "6", "--n", "2",
        "--disable-detokenize", "--output-json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert engine.made == [_made("m")]
    warm, measured = engine.calls
    assert warm == ([measured[0][0][:16]], SamplingParams(max_tokens=16, ignore_eos=True), {"use_tqdm": False})
    params = SamplingParams(n=2, temperature=1.0, ignore_eos=True, max_tokens=3, detokenize=False)
    assert measured[1:] == (params, {"use_tqdm": True})
    assert [len(prompt) for prompt in measured[0]] == [20] * 6
    ids = [token for prompt in measured[0] for token in prompt]
    assert min(ids) == 0 and max(ids) == 49 and len({*map(tuple, measured[0])}) == 6
    assert json.loads(file.read_text()) == {
        "elapsed_time": 4.0, "num_requests": 6, "total_num_tokens": 156, "requests_per_second": 1.5,
        "tokens_per_second": 39.0, "output_tokens_per_second": 9.0, "spec_decode_num_drafts": 10,
        "spec_decode_num_draft_tokens": 40, "spec_decode_num_accepted_tokens": 60, "spec_decode_acceptance_length": 7.0,
    }  # fmt: skip
    assert result.stdout.splitlines() == [
        "Drafted: 40 tokens, accepted: 60, acceptance length: 7.00",
        "Throughput: 1.50 requests/s, 39.00 total tokens/s, 9.00 output tokens/s",
        "Total num prompt tokens:  120",
        "Total num output tokens:  36",
    ]


def test_throughput_of_nanos_workload(engine: type[Engine]) -> None:
    """256 requests, a context of 4096 unless another is given, and no bar: nano-vllm's bench shows none."""
    for more, length in (((), 4096), (("--max-model-len", "2000"), 2000)):
        result = invoke("bench", "throughput", "m", "--nano", *more)
        assert result.exit_code == 0, result.output
        assert engine.made[-1]["max_model_len"] == length
        prompts, params, given = engine.calls[-1]
        assert len(prompts) == len(params) == 256 and given == {"use_tqdm": False}
        assert all(each.detokenize for each in params)
    assert invoke("bench", "throughput", "m", "--num-prompts", "1").exit_code == 0
    assert engine.made[-1]["max_model_len"] is None
    assert engine.calls[-1][1].max_tokens == 128 and len(engine.calls[-1][0][0]) == 1024
    assert engine.calls[-1][1].detokenize


def test_latency(engine: type[Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calls before measuring take no part: neither in times nor in drafts."""
    clock = Clock([0.0, 5.0, 6.0, 6.0, 8.0, 8.0, 11.0])  # a call that warms up reads it once
    monkeypatch.setattr("headway.cli.bench.offline.perf_counter", clock)
    file = tmp_path / "figures.json"
    result = invoke(
        "bench", "latency", "m", *ENGINE, "--input-len", "4", "--output-len", "2", "--batch-size", "3", "--n", "2",
        "--num-iters-warmup", "1", "--num-iters", "3", "--output-json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert engine.made == [_made("m")] and len(engine.calls) == 4
    params = SamplingParams(n=2, temperature=1.0, ignore_eos=True, max_tokens=2, detokenize=True)
    for prompts, given, more in engine.calls:
        assert [len(prompt) for prompt in prompts] == [4] * 3 and given == params and more == {"use_tqdm": False}
    assert len({json.dumps(prompts) for prompts, _, _ in engine.calls}) == 4
    found = json.loads(file.read_text())
    assert found["latencies"] == [1.0, 2.0, 3.0] and found["avg_latency"] == 2.0
    assert found["percentiles"] == {"10": 1.2, "25": 1.5, "50": 2.0, "75": 2.5, "90": 2.8, "99": 2.98}
    assert found["spec_decode_num_accepted_tokens"] == 100, "of the third reading since the second"
    assert "Avg latency: 2.0 seconds\n10% percentile latency: 1.2 seconds\n" in result.stdout


def test_texts_that_are_embedded_in_a_bench(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = importlib.import_module("headway.cli.bench.embed")
    monkeypatch.setattr(module, "perf_counter", Clock([1.0, 3.0, 3.0, 7.0]))
    monkeypatch.setattr(module, "process_time", Clock([0.0, 1.0, 1.0, 1.5]))
    file = tmp_path / "figures.json"
    result = invoke(
        "bench",
        "embed",
        "m",
        *ENGINE,
        "--input-len",
        "7",
        "--input-len",
        "64",
        "--num-prompts",
        "20",
        "--output-json",
        str(file),
    )
    assert result.exit_code == 0, result.output
    assert engine.made == [_made("m")]
    assert [len(prompts) for prompts, _, _ in engine.calls] == [16, 20, 16, 20]
    assert [len(prompts[0]) for prompts, _, _ in engine.calls] == [7, 7, 64, 64]
    assert all(more == {"pooling_task": Task.EMBED, "use_tqdm": False} for _, _, more in engine.calls)
    one, two = json.loads(file.read_text())
    assert one == {
        "input_len": 7, "num_prompts": 20, "elapsed_time": 2.0, "requests_per_second": 10.0, "tokens_per_second": 30.0,
        "num_steps": 9, "engine_host_us_per_request": 68750.0, "process_us_per_request": 50000.0,
    }  # fmt: skip
    assert two["input_len"] == 64 and two["tokens_per_second"] == 15.0 and two["process_us_per_request"] == 25000.0
    assert result.stdout.splitlines()[0] == (
        "     7 tokens:       10.0 requests/s           30 tokens/s  68750.0 us of the engine's host work a request"
    )
    words = invoke("bench", "embed", "m", "--input-len", "7", "--num-prompts", "2", "--text")
    assert words.exit_code == 1, "the clock is empty: asked after the texts were made"
    assert [len(text.split()) for text in engine.calls[-1][0]] == [5, 5]
    for arguments, message in (
        (("--input-len", "65"), "--input-len 65 is longer than max_model_len=64"),
        (("--input-len", "0"), "--input-len must be at least 1; got 0"),
    ):
        refused = invoke("bench", "embed", "m", *arguments)
        assert refused.exit_code == 2 and message in refused.output
    for task in (Task.GENERATE, Task.SCORE):
        monkeypatch.setattr(engine, "tasks", (task,))
        refused = invoke("bench", "embed", "m")
        assert refused.exit_code == 2 and f"m serves {task.value}" in refused.output


def test_transcribing(engine: type[Engine], tmp_path: Path) -> None:
    result = invoke(
        "transcribe", "a.wav", "b.wav", "--model", "m", *ENGINE, "--format", "json", "--language", "de", "--translate",
        "--prompt", "before", "--temperature", "0.5", "--word-timestamps", "--condition-on-previous-text",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert engine.made == [_made("m")]
    files, options, _ = engine.calls[0]
    assert files == ["a.wav", "b.wav"]
    assert (options.language, options.task, options.prompt, options.temperature) == ("de", "translate", "before", 0.5)
    assert options.word_timestamps and options.condition_on_previous_text
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["file"], row["text"]) for row in rows] == [("a.wav", "said a.wav"), ("b.wav", "said b.wav")]
    plain = invoke("transcribe", "a.wav", "b.wav")
    assert plain.stdout == "said a.wav\nsaid b.wav\n" and engine.made[-1]["model"] == "openai/whisper-base"
    _, options, _ = engine.calls[-1]
    assert (options.language, options.task, options.prompt, options.temperature) == (None, "transcribe", "", 0.0)
    assert not options.word_timestamps and not options.condition_on_previous_text
    target = tmp_path / "out.srt"
    assert invoke("transcribe", "a.wav", "--format", "srt", "--output", str(target)).stdout == ""
    assert target.read_text(encoding="utf-8") == "1\n00:00:00,500 --> 00:01:01,250\nhi ->\n"
    assert invoke("transcribe", "a.wav", "-f", "vtt").stdout == "WEBVTT\n\n00:00:00.500 --> 00:01:01.250\nhi ->\n"


def test_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the environment join those of the flags and do not reach the engine's process; a node of a higher rank serves
    nobody."""
    seen: list[Any] = []

    def served(load: Any, settings: Any, model: str) -> int:
        seen.append((load(), settings, model, os.environ.get("HEADWAY_API_KEY")))
        return 3

    monkeypatch.setattr(launch, "serve", served)
    monkeypatch.setattr(logs, "set_up", seen.append)
    monkeypatch.setattr("headway.api.async_llm.AsyncLLM", lambda **given: given)
    monkeypatch.setenv("HEADWAY_API_KEY", "key-number-2 key-number-3")
    result = invoke(
        "serve", "m", *ENGINE, "--api-key", "key-number-1", "--port", "81", "--max-queue", "7", "--log-format", "json"
    )
    assert result.exit_code == 3, result.output
    form, (given, settings, model, left) = seen
    assert form == "json" and given == _made("m") and model == "m" and left is None
    assert settings.api_key == [f"key-number-{i}" for i in (1, 2, 3)] and (settings.port, settings.max_queue) == (81, 7)
    monkeypatch.setattr("headway.engine.node.run_node", lambda args: 4 + args.node_rank)
    node = invoke("serve", "m", "--nnodes", "2", "--node-rank", "1", "--tensor-parallel-size", "2")
    assert node.exit_code == 5 and seen[2:] == ["text"], node.output


FIGURES = {
    "completed": 11, "failed": 2, "duration": 3.125, "total_input_tokens": 14, "total_output_tokens": 15,
    "request_throughput": 16.5, "request_goodput": 17.5, "output_throughput": 18.5, "max_output_tokens_per_s": 19.5,
    "max_concurrent_requests": 20, "total_token_throughput": 21.5, "spec_decode_num_drafts": 22,
    "spec_decode_num_draft_tokens": 23, "spec_decode_num_accepted_tokens": 24, "spec_decode_acceptance_length": 1.75,
    "mean_ttft_ms": 25.5, "median_ttft_ms": 26.5, "std_ttft_ms": 27.5, "p90_ttft_ms": 28.5, "p99.5_ttft_ms": 29.5,
}  # fmt: skip


def test_each_line_of_the_block() -> None:
    settings = metrics.Settings(12.5, 13, ["ttft"], [90.0, 99.5], {})
    lines = metrics.block(FIGURES, settings).splitlines()
    rows = [(label.strip(), value.strip()) for label, colon, value in (line.rpartition(":") for line in lines) if colon]
    assert rows == [
        ("Successful requests", "11"), ("Failed requests", "2"), ("Maximum request concurrency", "13"),
        ("Request rate configured (RPS)", "12.50"), ("Benchmark duration (s)", "3.12"), ("Total input tokens", "14"),
        ("Total generated tokens", "15"), ("Request throughput (req/s)", "16.50"), ("Request goodput (req/s)", "17.50"),
        ("Output token throughput (tok/s)", "18.50"), ("Peak output token throughput (tok/s)", "19.50"),
        ("Peak concurrent requests", "20.00"), ("Total token throughput (tok/s)", "21.50"), ("Drafted tokens", "23"),
        ("Accepted tokens", "24"), ("Acceptance length", "1.75"), ("Mean TTFT (ms)", "25.50"),
        ("Median TTFT (ms)", "26.50"), ("P90 TTFT (ms)", "28.50"), ("P99.5 TTFT (ms)", "29.50"),
    ]  # fmt: skip
    assert {len(line) for line in lines if line.endswith(("=", "-"))} == {50}
    few = {name: value for name, value in FIGURES.items() if "spec" not in name} | {"request_goodput": None}
    text = metrics.block(few, metrics.Settings(float("inf"), None, [], [], {}))
    for absent in ("concurrency:", "configured", "goodput", "Drafted", "TTFT"):
        assert absent not in text
    none = metrics.block(FIGURES | {"spec_decode_acceptance_length": None}, settings)
    assert next(line for line in none.splitlines() if "Acceptance" in line).endswith(" nan")


def test_what_a_reader_must_know() -> None:
    found = {"errors": {f"e{i}": i for i in range(1, 8)}, "output_tokens_counted_by_server": True}
    quiet = metrics.warnings({**found, "errors": {}, "lag_p99_ms": 5.0, "client_busy": 0.9}, 3)
    assert quiet == []
    notes = metrics.warnings({**found, "lag_p99_ms": 5.1, "client_busy": 0.91}, 3)
    assert notes == [
        "7 x e7", "6 x e6", "5 x e5", "4 x e4", "3 x e3",
        "the load generator was late by 5.1 ms (99th percentile); use more than --num-workers 3",
        "the load generator was busy 91% of the time; use more than --num-workers 3",
    ]  # fmt: skip


def _record(index: int, start: float, **more: Any) -> Record:
    return Record(index, due=start - 0.5, start=start, **more)


def test_what_failed_and_what_nothing_is_known_of() -> None:
    """Failed requests count as such and nowhere else; lengths that the server did not say are those that were planned."""
    records = [
        _record(0, 2.0, ttft=0.5, latency=1.0, num_chunks=2, output_tokens=4, itl=[0.5], counted=True, prompt_tokens=9),
        _record(1, 2.5, error="gone", output_tokens=50, latency=90.0, prompt_tokens=70),
        _record(2, 2.25, ttft=0.25, latency=0.25, num_chunks=1, output_tokens=1, counted=False),
    ]
    found = metrics.figures(records, [5, 6, 7], 1.0, metrics.Settings(1.0, None, [], [50], {}))
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"gone": 1})
    assert (found["duration"], found["last_start"]) == (2.0, 1.5), "from the start to the last good answer's end"
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (16, 5)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (
        1.0,
        2.5,
        10.5,
    )
    assert found["request_goodput"] is None and found["output_tokens_counted_by_server"] is False
    assert found["max_concurrent_requests"] == 2
    assert found["mean_tpot_ms"] == pytest.approx(0.5 / 3 * 1e3), "of one token there is no time per token"
    assert found["mean_ttft_ms"] == 375.0 and found["p50_e2el_ms"] == 625.0 and found["std_itl_ms"] == 0.0
    assert found["max_output_tokens_per_s"] == 3.0, "two at 2.5 and 2.5 + .25 makes one, then two in the next second"
    assert found["lag_p99_ms"] == 500.0
    limited = metrics.figures(records, [5, 6, 7], 1.0, metrics.Settings(1.0, 2, [], [], {}))
    assert limited["lag_p99_ms"] == 0.0, "held back on purpose"
    nothing = metrics.figures([records[1]], [5, 6], 1.0, metrics.Settings(1.0, None, [], [50], {}))
    assert nothing["duration"] == 0.0 and nothing["request_throughput"] == 0.0 and nothing["p50_ttft_ms"] == 0.0
    assert metrics.detailed(records, [5, 6, 7]) == {
        "input_lens": [9, 70, 7], "output_lens": [4, 50, 1], "ttfts": [0.5, 0.0, 0.25], "itls": [[0.5], [], []],
        "generated_texts": ["", "", ""], "errors": ["", "gone", ""],
    }  # fmt: skip


def test_what_a_result_says_of_its_run() -> None:
    args = ServeArgs(
        backend="vllm", label="night", model="shown", tokenizer=None, request_rate=2.0, burstiness=0.5, max_concurrency=6,
        num_workers=4, num_prompts=2, input_len=3,
    )  # fmt: skip
    records = [_record(i, 0.0, ttft=0.5, latency=2.0, num_chunks=2, output_tokens=2) for i in range(2)]
    found = online._figures(args, "asked", make_items(args), LoadResult(0.0, records, 6.0))
    names = ("backend", "endpoint_type", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
             "max_concurrency")  # fmt: skip
    assert [found[name] for name in names] == ["vllm", "vllm", "night", "asked", None, 2, 2.0, 0.5, 6]
    assert (found["client_cpu_seconds"], found["client_busy"]) == (6.0, 0.75)
    assert "ramp_up_strategy" not in found and "detailed" not in found and found["total_input_tokens"] == 6
    plan = online._plan(args, [Planned(1, 0.5, b"{}")], 3)
    assert (plan.url, plan.path, plan.max_concurrency) == ("http://127.0.0.1:8000", "/v1/completions", 3)
    assert (plan.timeout, plan.keep_texts, plan.headers) == (21600.0, False, args.headers())
    assert plan.requests == [Planned(1, 0.5, b"{}")]


def test_a_files_name_says_what_is_in_it(tmp_path: Path) -> None:
    found = {"request_rate": 2.5, "model_id": "who/name/", "date": "d", "detailed": {"input_lens": [3]}}
    path = online.save(ServeArgs(result_dir=tmp_path / "new", backend="vllm", save_result=True), found)
    assert path == tmp_path / "new" / "vllm-2.5qps-name-d.json"
    assert json.loads(path.read_text()) == {name: value for name, value in found.items() if name != "detailed"}
    args = ServeArgs(result_dir=tmp_path, label="l", save_result=True, save_detailed=True, metadata=["a=b"])
    path = online.save(args, found)
    assert path.name == "l-2.5qps-name-d.json" and json.loads(path.read_text())["input_lens"] == [3]
    assert json.loads(path.read_text())["a"] == "b" and "\n " in path.read_text()
    online.save(args, found)
    assert path.read_text().count('"date"') == 1, "written anew"


def test_each_option_of_a_request() -> None:
    item = make_items(ServeArgs(num_prompts=1, input_len=3, output_len=8))[0]
    numbers: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 0.75,
               "frequency_penalty": 1.5, "repetition_penalty": 1.25}  # fmt: skip
    body = json.loads(request_body(ServeArgs(**numbers, logprobs=3, ignore_eos=True), "m", item))
    assert body == {
        "model": "m", "max_tokens": 8, **numbers, "stream": True, "stream_options": {"include_usage": True},
        "prompt": item.prompt, "logprobs": 3, "ignore_eos": True,
    }  # fmt: skip
    bare = json.loads(request_body(ServeArgs(extra_body='{"max_tokens": 2}'), "m", item))
    assert bare["max_tokens"] == 2 and bare["temperature"] == 0.0 and not {"logprobs", "ignore_eos"} & {*bare}
    text = dataclasses.replace(item, prompt="hello")
    chat = json.loads(request_body(ServeArgs(backend="openai-chat", tokenizer="t", logprobs=0), "m", text))
    assert chat["messages"] == [{"role": "user", "content": "hello"}] and chat["max_completion_tokens"] == 8
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 0) and "max_tokens" not in chat


def test_a_refusals_text_is_cut() -> None:
    call = _Call(Record(0), keeps_text=False)
    for _ in range(3):
        call.take(500, b"x" * (MAX_REFUSAL_BYTES // 2 + 1), 1.0)
    assert len(call._refusal) == MAX_REFUSAL_BYTES
    call.finish(500)
    assert (call.record.error or "").startswith("HTTP 500: ") and call.record.latency == 0.0
