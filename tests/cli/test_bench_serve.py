"""``headway bench serve`` against a fake server: what is sent, when, what is counted and what is shown."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from headway.cli.bench import metrics
from headway.cli.bench.datasets import arrivals, make_items, rates
from headway.cli.bench.flags import repeated
from headway.cli.bench.load import Plan, Planned, Record, run
from headway.cli.bench.serve_args import ServeArgs
from headway.cli.main import app
from headway.core.errors import ConfigError
from tests.api.fakes import ByteTokenizer
from tests.cli.fake_server import Answer, completion, event, serving

LABELS = [
    "Successful requests", "Failed requests", "Maximum request concurrency", "Request rate configured (RPS)",
    "Benchmark duration (s)", "Total input tokens", "Total generated tokens", "Request throughput (req/s)",
    "Request goodput (req/s)", "Output token throughput (tok/s)", "Peak output token throughput (tok/s)",
    "Peak concurrent requests", "Total token throughput (tok/s)",
    "Mean TTFT (ms)", "Median TTFT (ms)", "P50 TTFT (ms)", "P99.9 TTFT (ms)",
    "Mean TPOT (ms)", "Median TPOT (ms)", "P50 TPOT (ms)", "P99.9 TPOT (ms)",
    "Mean ITL (ms)", "Median ITL (ms)", "P50 ITL (ms)", "P99.9 ITL (ms)",
    "Mean E2EL (ms)", "Median E2EL (ms)", "P50 E2EL (ms)", "P99.9 E2EL (ms)",
]  # fmt: skip


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


def measured(url: str, path: Path, *arguments: str) -> dict[str, Any]:
    """Figures of a run, which must succeed."""
    result = bench("--base-url", url, "--save-result", "--result-dir", str(path), "--result-filename", "r", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads((path / "r").read_text())
    return found


def test_the_block_users_know(tmp_path: Path) -> None:
    with serving() as server:
        result = bench(
            "--base-url", server.url, "--num-prompts", "6", "--request-rate", "1000", "--max-concurrency", "2",
            "--random-input-len", "5", "--random-output-len", "3", "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--metric-percentiles", "50,99.9", "--goodput", "ttft:60000 e2el:60000",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    rows = dict(line.split(":", 1) for line in lines if ":" in line)
    assert list(rows) == LABELS
    assert int(rows["Successful requests"]) == 6
    assert int(rows["Total input tokens"]) == 42  # the server says 7 a prompt
    assert int(rows["Total generated tokens"]) == 18
    assert float(rows["Request goodput (req/s)"]) == float(rows["Request throughput (req/s)"])


@pytest.mark.parametrize("workers", [1, 2])
def test_every_request_is_sent_once(workers: int, tmp_path: Path) -> None:
    with serving() as server:
        found = measured(
            server.url, tmp_path, "--num-prompts", "20", "--random-input-len", "4", "--num-workers", str(workers),
            "--ready-check-timeout-sec", "0", "--model", "m", "--ignore-eos", "--header", "X-A=b=c",
            "--extra-body", '{"top_k": 5}', "--temperature", "0.5",
        )  # fmt: skip
        prompts = [tuple(request["prompt"]) for request in server.requests]
        assert sorted(prompts) == sorted(
            tuple(item.prompt) for item in make_items(ServeArgs(num_prompts=20, random_input_len=4))
        )
    assert found["completed"] == 20
    assert found["output_tokens_counted_by_server"] is True
    [request] = [r for r in server.requests if tuple(r["prompt"]) == prompts[0]]
    assert request == {
        "path": "/v1/completions", "model": "m", "prompt": list(prompts[0]), "max_tokens": 128, "temperature": 0.5,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "top_k": 5,
    }  # fmt: skip
    assert server.headers[0]["x-a"] == "b=c"


def test_chat_requests(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello", "output_tokens": 9}\n\n{"prompt": "hello"}\n')
    first = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    parts = [first, *(event({"choices": [{"delta": {"content": "x"}}]}) for _ in range(3)), event(b"[DONE]")]
    with serving(lambda _: Answer(parts)) as server:
        found = measured(
            server.url, tmp_path, "--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", str(file),
            "--custom-output-len", "4", "--num-prompts", "3", "--num-warmups", "2",
        )  # fmt: skip
    sent = server.requests[3:]  # after one to see whether it is ready, and the warm-up
    assert {r["path"] for r in sent} == {"/v1/chat/completions"}
    assert {r["model"] for r in sent} == {"fake-model"}
    assert all(r["messages"] == [{"role": "user", "content": "hello"}] for r in sent)
    assert sorted(r["max_completion_tokens"] for r in sent) in ([4, 4, 9], [4, 9, 9])
    assert found["total_output_tokens"] == 9  # the opening chunk of each brings no token
    assert found["output_tokens_counted_by_server"] is False


def test_failures_are_counted_and_fail_the_command() -> None:
    answers = {
        0: Answer(),
        1: Answer([b'{"error": {"message": "the queue is full"}}'], status=429, framing="length"),
        2: Answer(cut=300),
        3: Answer([event({"error": {"message": "engine died"}}), event(b"[DONE]")]),
        4: Answer([*completion(2)[:-1]]),
        5: Answer([event(b"[DONE]")]),
        6: Answer([event(b"{oops"), event(b"[DONE]")]),
        7: Answer(cut=0),
    }
    with serving(lambda request: answers[request["prompt"][0]]) as server:
        items = [json.dumps({"prompt": [i], "output_tokens": 3}).encode() for i in range(8)]
        plan = Plan(
            server.url, "/v1/completions", {}, [Planned(i, 0.0, body) for i, body in enumerate(items)], None, 60
        )
        records = asyncio.run(run(plan)).records
    errors = [record.error or "" for record in records]
    for error, part in zip(
        errors,
        [
            "",
            "HTTP 429: the queue is full",
            "in the middle",
            "engine died",
            "without [DONE]",
            "no token",
            "not a chunk",
            "in the middle",
        ],
        strict=True,
    ):
        assert part in error, errors
    assert errors[0] == ""
    settings = metrics.Settings(math.inf, None, ["ttft"], [99], {})
    found = metrics.figures(records, [1] * 8, records[0].start, settings)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (1, 7, 3)
    assert found["errors"]["HTTP 429: the queue is full"] == 1


def test_a_failed_request_shows_in_the_exit_status(tmp_path: Path) -> None:
    with serving(lambda r: Answer(cut=250 if r["prompt"][0] % 2 else None)) as server:
        result = bench(
            "--base-url", server.url, "--num-prompts", "10", "--random-input-len", "2",
            "--ready-check-timeout-sec", "0", "--model", "m",
        )  # fmt: skip
    assert result.exit_code == 1
    assert "Failed requests:" in result.stdout
    assert "x the server closed the connection in the middle of its answer" in result.stderr


def test_a_request_that_takes_too_long_has_failed() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up
        writer.close()
        gone.set()

    gone = asyncio.Event()

    async def main() -> list[Record]:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        plan = Plan(f"http://127.0.0.1:{port}", "/x", {}, [Planned(0, 0.0, b"{}")], None, 0.01)
        records = (await run(plan)).records
        await gone.wait()
        server.close()
        return records

    [record] = asyncio.run(main())
    assert record.error == "no end after 0.01 s"


def test_a_server_that_is_not_there_or_refuses(tmp_path: Path) -> None:
    with serving(lambda _: Answer([b"no such model"], status=404, framing="length")) as server:
        result = bench("--base-url", server.url, "--num-prompts", "1")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "the server is not ready: HTTP 404: no such model" in result.stderr
        assert len(server.requests) == 1
    result = bench("--base-url", server.url, "--num-prompts", "1", "--ready-check-timeout-sec", "0")
    assert result.exit_code == 1
    assert "no connection to" in result.stderr


def test_a_server_that_becomes_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.cli.bench.online.RETRY_SECONDS", 0.0)
    left = [503, 503, 503]

    def answer(_: dict[str, Any]) -> Answer:
        return Answer([b"loading"], status=left.pop(), framing="length") if left else Answer()

    with serving(answer) as server:
        result = bench("--base-url", server.url, "--num-prompts", "2", "--random-input-len", "3")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("waiting for") == 1


@pytest.mark.parametrize("seed", range(4))
def test_figures_do_not_depend_on_where_the_bytes_are_cut(seed: int) -> None:
    with serving(lambda _: Answer(completion(6, tokens_per_chunk=2), borders=seed)) as server:
        plan = Plan(server.url, "/v1/completions", {}, [Planned(i, 0.0, b"{}") for i in range(3)], None, 60)
        records = asyncio.run(run(plan)).records
    for record in records:
        assert record.error is None
        assert (record.num_chunks, len(record.itl), record.output_tokens, record.prompt_tokens) == (6, 5, 12, 7)
        assert record.latency == pytest.approx(record.ttft + sum(record.itl))


def test_no_more_than_max_concurrency_are_open() -> None:
    plan = [Planned(i, 0.0, b"{}") for i in range(12)]
    with serving() as server:
        asyncio.run(run(Plan(server.url, "/v1/completions", {}, plan, 3, 60)))
        assert server.num_connections == 3
        assert len(server.requests) == 12


def made_records(rng: random.Random, count: int) -> list[Record]:
    records = []
    for i in range(count):
        itl = [rng.random() / 10 for _ in range(rng.randint(0, 9))]
        ttft = rng.random()
        chunks = len(itl) + 1
        start = 100 + rng.random() * 3
        records.append(
            Record(i, start, start, ttft, itl, ttft + sum(itl), chunks, chunks * 2, prompt_tokens=5, counted=True)
        )
    return records


def test_the_figures_against_their_definitions() -> None:
    records = made_records(random.Random(3), 40)
    settings = metrics.Settings(10.0, None, list(metrics.TITLES), [25, 99], {"ttft": 500.0, "tpot": 20.0})
    found = metrics.figures(records, [None] * 40, 100.0, settings)
    duration = max(r.start + r.latency for r in records) - 100.0
    assert found["duration"] == pytest.approx(duration)
    assert found["last_start"] == pytest.approx(max(r.start for r in records) - 100.0)
    assert found["output_throughput"] == pytest.approx(sum(r.output_tokens for r in records) / duration)
    assert found["total_input_tokens"] == 200
    gaps = [gap * 1e3 for r in records for gap in r.itl]
    assert found["median_itl_ms"] == pytest.approx(np.median(gaps))
    assert found["p25_itl_ms"] == pytest.approx(np.percentile(gaps, 25))
    each = [(r.latency - r.ttft) / (r.output_tokens - 1) * 1e3 for r in records]
    assert found["mean_tpot_ms"] == pytest.approx(np.mean(each))
    assert found["p99_e2el_ms"] == pytest.approx(np.percentile([r.latency * 1e3 for r in records], 99))
    good = sum(r.ttft <= 0.5 and t <= 20 for r, t in zip(records, each))
    assert 0 < good < 40
    assert found["request_goodput"] == pytest.approx(good / duration)
    moments = sorted(r.start for r in records)
    assert found["max_concurrent_requests"] == max(
        sum(r.start <= m < r.start + r.latency for r in records) for m in moments
    )
    arrived = [r.start + r.ttft + sum(r.itl[:k]) - 100 for r in records for k in range(len(r.itl) + 1)]
    assert found["max_output_tokens_per_s"] == pytest.approx(2 * max(np.bincount(np.floor(arrived).astype(int))))


def test_a_late_load_generator_says_so() -> None:
    records = made_records(random.Random(0), 10)
    for record in records:
        record.due = record.start - 0.02
    found = metrics.figures(records, [None] * 10, 100.0, metrics.Settings(10.0, None, [], [], {}))
    assert found["lag_p99_ms"] == pytest.approx(20)
    assert any("was late by 20.0 ms" in note for note in metrics.warnings(found, 1))


def test_the_clock_starts_when_all_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection of garbage takes a tenth of a second in a large process; it must not be charged to the server."""
    moments: list[float] = []
    monkeypatch.setattr("headway.cli.bench.load.quieten", lambda: moments.append(time.perf_counter()))
    with serving() as server:
        result = asyncio.run(run(Plan(server.url, "/v1/completions", {}, [Planned(0, 0.0, b"{}")], None, 60)))
    assert moments[0] < result.begin <= result.records[0].start


def test_arrivals_come_from_the_seed() -> None:
    times = arrivals([50.0] * 4000, 1.0, 7)
    assert times == arrivals([50.0] * 4000, 1.0, 7) != arrivals([50.0] * 4000, 1.0, 8)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(80)
    assert arrivals([math.inf] * 3, 1.0, 7) == [0, 0, 0]
    gaps = np.diff([0, *times])
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)  # Poisson
    even = np.diff([0, *arrivals([50.0] * 4000, 100.0, 7)])
    assert even.std() / even.mean() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_the_rate_grows(strategy: str) -> None:
    ramp = {"ramp_up_strategy": strategy, "ramp_up_start_rps": 10.0, "ramp_up_end_rps": 90.0}
    found = rates(ServeArgs(num_prompts=4000, **ramp))  # type: ignore[arg-type]
    assert (
        found == sorted(found) and found[0] == pytest.approx(10, rel=0.01) and found[-1] == pytest.approx(90, rel=0.01)
    )
    middle = 50 if strategy == "linear" else 30
    assert found[2000] == pytest.approx(middle, rel=0.01)
    times = arrivals(found, 1.0, 7)
    assert times[-1] == pytest.approx(sum(1 / rate for rate in found))
    gaps = np.diff([0, *times])
    assert 1 / gaps[:200].mean() == pytest.approx(10, rel=0.3) and 1 / gaps[-200:].mean() == pytest.approx(90, rel=0.3)
    assert rates(ServeArgs(num_prompts=3, request_rate=5.0)) == [5.0] * 3


def test_a_result_with_its_requests_a_label_and_notes(tmp_path: Path) -> None:
    with serving() as server:
        command = (
            "--num-prompts", "3", "--input-len", "4", "--output-len", "2", "--label", "night", "--save-detailed",
            "--append-result", "--metadata", "gpu=H200", "tp=1", "--ramp-up-strategy", "linear", "--ramp-up-start-rps",
            "100", "--ramp-up-end-rps", "1000", "--top-p", "0.9", "--top-k", "5", "--logprobs", "2", "--served-model-name",
            "other", "--model", "shown", "--goodput", "ttft:60000", "e2el:60000",
        )  # fmt: skip
        for _ in range(2):
            result = bench("--base-url", server.url, "--result-filename", str(tmp_path / "r"), *command)
            assert result.exit_code == 0, result.output
    one, two = map(json.loads, (tmp_path / "r").read_text().splitlines())
    assert one.keys() == two.keys() and (one["label"], one["gpu"], one["tp"]) == ("night", "H200", "1")
    assert (one["model_id"], one["ramp_up_strategy"], one["ramp_up_end_rps"]) == ("shown", "linear", 1000)
    assert one["generated_texts"] == ["xxx"] * 3 and one["errors"] == [""] * 3
    assert one["input_lens"] == [7] * 3 and one["output_lens"] == [3] * 3
    assert len(one["ttfts"]) == 3 and [len(gaps) for gaps in one["itls"]] == [2] * 3
    sent = server.requests[-1]
    assert (sent["model"], sent["top_p"], sent["top_k"], sent["logprobs"]) == ("other", 0.9, 5, 2)
    assert len(sent["prompt"]) == 4 and sent["max_tokens"] == 2


def test_values_in_a_row_belong_to_their_option() -> None:
    assert repeated(["--goodput=a:1", "b:2"], ("--goodput",)) == ["--goodput=a:1", "--goodput", "b:2"]
    words = ["--goodput", "a:1", "b:2", "--port", "1", "--goodput", "c:3", "--header=X=1", "--header", "Y=2", "Z=3"]
    assert repeated(words, ("--goodput", "--header")) == [
        "--goodput", "a:1", "--goodput", "b:2", "--port", "1", "--goodput", "c:3", "--header=X=1", "--header", "Y=2",
        "--header", "Z=3",
    ]  # fmt: skip


def test_conversations_of_sharegpt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headway.api.tokenizer.load_tokenizer", lambda name: ByteTokenizer())
    file = tmp_path / "conversations.json"
    turns = [("question one", "an answer"), ("hm", "too short a question"), ("too short an answer", "no"), ("alone",)]
    turns += [("x" * 1100, "too long a question"), ("question two", "another answer")]
    rows = [{"id": "1", "conversations": [{"from": "human", "value": text} for text in pair]} for pair in turns]
    file.write_text(json.dumps(rows))
    options: dict[str, Any] = {"dataset_name": "sharegpt", "dataset_path": file, "tokenizer": "t", "num_prompts": 3}
    items = make_items(ServeArgs(**options))
    assert {(item.prompt, item.output_len) for item in items} == {("question one", 10), ("question two", 15)}
    assert {item.output_len for item in make_items(ServeArgs(**options, output_len=7))} == {7}
    for text in ("[]", "{", '[{"conversations": 1}]', '["x"]'):
        file.write_text(text)
        with pytest.raises(ConfigError):
            make_items(ServeArgs(**options))


def test_random_prompts() -> None:
    args = ServeArgs(
        num_prompts=300, random_input_len=100, random_output_len=10, random_range_ratio=0.5, random_prefix_len=6,
        random_vocab_size=50,
    )  # fmt: skip
    items = make_items(args)
    assert items == make_items(args) != make_items(ServeArgs(num_prompts=300, seed=1))
    lengths = [len(item.prompt) - 6 for item in items]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert {item.output_len for item in items} == set(range(5, 16))
    assert len({tuple(item.prompt[:6]) for item in items}) == 1
    assert len({tuple(item.prompt) for item in items}) == 300
    assert all(0 <= token < 50 for item in items for token in item.prompt)  # type: ignore[operator]


def test_prefixes_are_repeated() -> None:
    args = ServeArgs(
        dataset_name="prefix_repetition", num_prompts=40, prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=3, prefix_repetition_num_prefixes=4, prefix_repetition_output_len=9,
    )  # fmt: skip
    items = make_items(args)
    heads = [tuple(item.prompt[:8]) for item in items]
    assert sorted(heads.count(head) for head in set(heads)) == [10] * 4
    assert all(len(item.prompt) == 11 and item.output_len == 9 for item in items)


def test_with_a_tokenizer_prompts_are_text_of_that_length(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = ByteTokenizer([bytes([97 + i % 26]) for i in range(256)] + [b"<eos>"])
    monkeypatch.setattr(letters, "encode", lambda text, add_special_tokens=True: [ord(c) - 97 for c in text])
    monkeypatch.setattr("headway.api.tokenizer.load_tokenizer", lambda name: letters)
    items = make_items(ServeArgs(num_prompts=5, random_input_len=20, tokenizer="t"))
    assert all(isinstance(item.prompt, str) and len(item.prompt) == item.num_tokens == 20 for item in items)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", 'no "prompt"'),
        ('{"prompt": []}', 'no "prompt"'),
        ('{"prompt": [true]}', 'no "prompt"'),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens"),
        ("", "holds no prompt"),
    ],
)
def test_a_wrong_file_of_prompts(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        make_items(ServeArgs(dataset_name="custom", dataset_path=file))


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "tgi"}, {"dataset_name": "sharegpt"}, {"dataset_name": "custom"}, {"backend": "openai-chat"},
        {"num_prompts": 0}, {"random_range_ratio": 1.0}, {"request_rate": 0.0}, {"burstiness": math.nan},
        {"percentile_metrics": "ttft,foo"}, {"metric_percentiles": "101"}, {"metric_percentiles": "x"},
        {"endpoint": "v1"}, {"extra_body": "{"}, {"extra_body": "[]"}, {"header": ["a"]}, {"goodput": ["itl:4"]},
        {"goodput": ["ttft"]}, {"base_url": "x://y"}, {"max_concurrency": 1, "num_workers": 2},
        {"random_input_len": 0}, {"metadata": ["a"]}, {"metadata": ["a=1"]}, {"save_detailed": True},
        {"metadata": ["detailed=1"], "save_result": True}, {"input_len": 7, "dataset_name": "prefix_repetition"},
        {"ramp_up_strategy": "sudden"}, {"ramp_up_start_rps": 1.0},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 2.0, "ramp_up_end_rps": 1.0},
        {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 0.0, "ramp_up_end_rps": 1.0},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 1.0},
        {"dataset_name": "sharegpt", "dataset_path": Path("x")},
    ],
)  # fmt: skip
def test_wrong_options(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeArgs(**arguments)


def test_wrong_options_are_one_line_and_status_2() -> None:
    result = bench("--dataset-name", "nonsense")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "random, prefix_repetition, custom" in result.stderr


def test_the_api_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert ServeArgs().headers() == {"Authorization": "Bearer secret"}
    assert ServeArgs(header=["Authorization=x"]).headers() == {"Authorization": "x"}
