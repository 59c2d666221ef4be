"""``headway bench anchors`` on a CPU and a tiny shape: the whole path, the gate, what is not served, the report."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headway.cli.bench.anchors import (
    ablations,
    command,
    context,
    floors,
    gate,
    generation,
    kv_fp8,
    pooling,
    profiled,
    server,
    startup,
    structured,
)
from headway.cli.bench.anchors.context import MODELS, TINY, Bench, Scale, engine_of, find_model
from headway.cli.bench.anchors.floors import bandwidth
from headway.cli.bench.anchors.table import KNOWN, Table, known_figures, markdown
from headway.cli.bench.anchors.vocabulary import choose_tokenizer
from headway.cli.main import app
from headway.core.errors import ConfigError, InvalidRequestError, RequestFailedError
from headway.core.outputs import CompletionOutput, RequestOutput
from tests.engine.fake_core import ROOT
from tests.engine.tiny_llama import CONFIG


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    return folder


def measure(model: Path, out: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    flags = ["--device", "cpu", "--tiny", "--model", str(model), "--out", str(out), "--commit", "abc", *arguments]
    result = CliRunner().invoke(app, ["bench", "anchors", *flags])
    [path] = out.glob("*.json")
    return result, json.loads(path.read_text())


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = {row["name"]: row for row in report["rows"]}
    assert len(rows) == len(report["rows"]), "names are unique"
    return rows


def test_the_whole_table(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = [sys.executable, "-m", "tests.cli.fake_server"]
    monkeypatch.setattr(server, "command", lambda bench, port: [*fake, str(port)])
    monkeypatch.setenv("PYTHONPATH", ROOT)
    result, report = measure(model, tmp_path)
    assert result.exit_code == 0, result.output
    assert {"card", "commit", "date", "versions", "command", "rows", "timeline"} <= set(report)
    assert (report["commit"], report["complete"]) == ("abc", False)
    assert report["command"] == f"headway bench anchors --model {model} --tiny --runs 1 --run-ahead auto --device cpu"
    rows = by_name(report)
    for name in (
        "itl_ms_greedy_bs2",
        "nano_tok_s",
        "nano_tok_s_kv_fp8",
        "offline_load_tok_s_kv_fp8",
        "itl_ms_greedy_bs2_kv_fp8",
        "prefill_tok_s",
        "ttft_ms_alone",
        "server_500_tok_s",
        "host_us_per_step_bs1",
    ):
        row = rows[f"tiny.{name}"]
        assert row["status"] == "measured"
        assert row["ours"] is not None
    assert rows["tiny.start_to_first_token_s"]["ours"] > 0
    assert rows["tiny.server_over_offline_pct"]["unit"] == "% of offline tok/s"
    assert {row["status"] for row in rows.values()} <= {"measured", "not served"}
    assert rows["tiny.busy_pct_bs1"]["status"] == "not served"
    assert all(
        row["goal"] is None and row["anchor"] is None for row in rows.values()
    )  # not this card's, not this size's
    missing = sum(row["status"] == "not served" for row in rows.values())
    assert f"headway: {missing} figures are not served; the report says why" in result.output
    [written] = tmp_path.glob("*.md")
    assert f"wrote {written.with_suffix('.json')} and {written.name}" in result.output
    assert "**not served**: needs a CUDA device" in written.read_text()


def test_processor_time_is_the_processes_own() -> None:
    """User and system time, as the system's own clock of the process has it; nothing of children that have ended."""
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    before = os.times()
    found = server.processor_seconds(os.getpid())
    after = os.times()
    tick = 2 / os.sysconf("SC_CLK_TCK")
    assert found is not None and before.children_user > 2 * tick
    assert before.user + before.system - tick <= found <= after.user + after.system + tick
    assert server.processor_seconds(2**30) is None


def test_runs_give_medians(model: Path, tmp_path: Path) -> None:
    result, report = measure(
        model, tmp_path, "--runs", "3", "--only", "itl_ms_greedy_bs1", "--only", "cost_pct_seeded*"
    )
    assert result.exit_code == 0, result.output
    rows = by_name(report)
    runs = rows["tiny.itl_ms_greedy_bs1"]["runs"]
    assert rows["tiny.itl_ms_greedy_bs1"]["ours"] == sorted(runs)[1]
    plain, seeded = rows["tiny.itl_ms_plain_bs2"]["ours"], rows["tiny.itl_ms_seeded_bs2"]["ours"]
    assert rows["tiny.cost_pct_seeded_bs2"]["ours"] == pytest.approx((seeded / plain - 1) * 100)


@pytest.mark.parametrize(("given", "fixed"), [(None, True), ({}, False), ({"adaptive": False}, True)])
def test_the_check_verifies_as_many_drafts_in_every_step(given: dict[str, Any] | None, fixed: bool) -> None:
    drafts = None if given is None else {"method": "ngram", "num_speculative_tokens": 3} | given
    bench = Bench(Table("tiny", [], {}), TINY, Path(), "", Path(), 1, {"speculative_config": drafts}, False)
    checked = gate.of_fixed_width(bench)
    assert (checked is bench) == fixed
    assert fixed or checked.engine["speculative_config"] == drafts | {"adaptive": False}  # type: ignore[operator]


def test_a_red_check_gives_no_number(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gate.answers

    def wrong(llm: Any, bench: Bench, *kinds: Any) -> list[list[int]]:
        found = right(llm, bench, *kinds)
        calls.append(1)
        if len(calls) == 2:
            found[1][3] += 1
        return found

    calls: list[int] = []
    monkeypatch.setattr(gate, "answers", wrong)
    result, report = measure(model, tmp_path, "--only", "itl_ms_greedy*", "--only", "server*", "--only", "start*")
    assert result.exit_code == 1
    rows = by_name(report)
    assert "tiny.itl_ms_greedy_bs1" in rows and "tiny.server_start_s" in rows
    for row in rows.values():
        assert (row["ours"], row["status"]) == (None, "refused")
        assert "row 1 differs from run_ahead=0 at token 3" in row["note"]


def test_a_red_check_of_constrained_rows_gives_no_number(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([[[1], [2]], [[1], [3]]] * 2)  # the load with keys and values in 8 bits has a check of its own
    monkeypatch.setattr(gate, "answers", lambda *_: next(answers))
    result, report = measure(model, tmp_path, "--only", "structured*", "--only", "offline*")
    assert result.exit_code == 1
    assert {(row["status"], row["ours"]) for row in report["rows"]} == {("refused", None)}


def test_the_check_runs_for_figures_of_other_groups(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "check", lambda bench: "red")
    result, report = measure(model, tmp_path, "--only", "host_us*")
    assert result.exit_code == 1
    assert {row["status"] for row in report["rows"]} == {"refused"}


def test_a_subset_measures_nothing_else(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (server, startup, profiled, structured):
        monkeypatch.setattr(module, "measure", _not_here(module))
    result, report = measure(model, tmp_path, "--only", "tiny.ttft*")
    assert result.exit_code == 0, result.output
    assert list(by_name(report)) == ["tiny.ttft_ms_alone"]


def _not_here(module: Any) -> Any:
    def measured(bench: Bench, *_: object) -> None:
        assert not bench.table.wants(*module.announce(bench))

    return measured


def test_ablations(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ablations._variant
    wanted = [word for name in ("*depth0*", "*no_*bs1", "*eager_prefill_ttft*") for word in ("--only", name)]
    seen = []

    def watched(*given: Any) -> None:
        seen.append(dict(os.environ))
        plain(*given)

    monkeypatch.setattr(ablations, "_variant", watched)
    result, report = measure(model, tmp_path, "--ablations", *wanted)
    assert result.exit_code == 0, result.output
    rows = by_name(report)
    assert rows["tiny.ablation_depth0_itl_ms_bs2"]["status"] == "measured"
    assert rows["tiny.ablation_no_graphs_itl_ms_bs1"]["status"] == "measured"
    assert rows["tiny.ablation_no_fused_layers_itl_ms_bs1"]["status"] == "measured"
    assert rows["tiny.ablation_eager_prefill_ttft_ms"]["status"] == "measured"
    switches = ("HEADWAY_EARLY_LAUNCH", "HEADWAY_FUSED_LAYERS", "HEADWAY_PREFILL_GRAPHS")
    off = [[name for name in switches if name in environment] for environment in seen]
    assert sorted(off) == sorted([[], [], *([name] for name in switches)]), "each variant switches off one technique"


def test_a_server_that_does_not_start_fails_its_rows_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.exit('the model does not fit')"
    monkeypatch.setattr(server, "command", lambda bench, port: [sys.executable, "-c", code])
    result, report = measure(model, tmp_path, "--only", "server*", "--only", "ttft*")
    assert result.exit_code == 1
    rows = by_name(report)
    assert rows["tiny.ttft_ms_alone"]["status"] == "measured"
    assert rows["tiny.server_inf_req_s"]["status"] == "failed"
    assert "status 1: the model does not fit" in rows["tiny.server_inf_req_s"]["note"]


def test_the_servers_command_has_the_engines_arguments(tmp_path: Path) -> None:
    engine = {"load_format": "dummy", "enable_prefix_caching": False, "run_ahead": "auto", "max_num_seqs": 4}
    bench = Bench(Table("m"), TINY, tmp_path, "tok", tmp_path, 1, engine, True)
    words = server.command(bench, 81)[3:]
    assert words == [
        "serve", str(tmp_path), "--port", "81", "--load-format", "dummy", "--no-enable-prefix-caching", "--run-ahead",
        "auto", "--max-num-seqs", "4", "--tokenizer", "tok",
    ]  # fmt: skip


def test_the_table() -> None:
    table = Table("m", ["a*", "m.c"], {"a": {"goal": 2.0, "anchor": 4.0}, "c": {"goal": 10.0}})
    table.announce(["a", "b"], "ms")
    table.announce(["c", "ax"], "tok/s", "higher")
    for value in (1.0, 9.0, 2.0):
        table.add("a", value)
    table.add("b", 5.0)
    table.add("c", 9.0)
    with table.measuring(["ax", "b"]):
        raise InvalidRequestError("cannot")
    table.add("ax", 1.0)  # too late
    rows = {row.name: row for row in table.rows()}
    assert list(rows) == ["m.a", "m.b", "m.c", "m.ax"]
    assert (rows["m.a"].ours, rows["m.a"].met, rows["m.c"].met, rows["m.b"].met) == (2.0, True, False, None)
    assert (rows["m.ax"].ours, rows["m.ax"].status, rows["m.ax"].note) == (None, "not served", "cannot")
    assert not table.wants("b") and table.wants("b", "c")
    table.refuse_all("red")
    assert all(row.ours is None for row in table.rows())
    report = {
        "card": "x",
        "date": "d",
        "commit": "c",
        "versions": {},
        "num_runs": 1,
        "command": "h",
        "python_loop_s": 0.1,
    }
    text = markdown({**report, "rows": [row.as_dict() for row in rows.values()]})
    assert "**refused**: red" in text


def test_markdown_shows_ratio_and_goal() -> None:
    table = Table("m", (), {"a": {"floor": 1.0, "anchor": 4.0, "goal": 2.0}})
    table.announce(["a"], "ms")
    table.add("a", 1.0)
    report = {
        "card": "x",
        "date": "d",
        "commit": "c",
        "versions": {"torch": "1"},
        "num_runs": 1,
        "command": "h",
        "python_loop_s": 0.1,
    }
    text = markdown({**report, "rows": [row.as_dict() for row in table.rows()]})
    assert "| a | ms | 1 | 1 | 4 | 0.25 | 2 | yes |" in text


def full_bench(name: str, tmp_path: Path) -> Bench:
    return Bench(
        Table(name, (), known_figures(name, "NVIDIA H200")), Scale(), find_model(name), "t", tmp_path, 1,
        engine_of(find_model(name)),
        name == command.FULL_MODEL,
    )  # fmt: skip


def test_every_known_figure_is_measured_by_somebody(tmp_path: Path) -> None:
    known = json.loads(KNOWN.read_text())["models"]
    for name, figures in known.items():
        bench = full_bench(name, tmp_path)
        if command.pools(bench):
            assert set(figures) == set(pooling.announce(bench))
            continue
        modules = (generation, profiled, startup, kv_fp8, *((server, structured) if bench.full else ()))
        announced = {figure for module in modules for figure in module.announce(bench)}
        assert set(figures) <= announced


def test_known_figures_are_of_one_card_only() -> None:
    assert known_figures("qwen3_06b", "NVIDIA H200")["itl_ms_greedy_bs1"] == {"floor": 0.27, "anchor": 1.6, "goal": 0.6}
    for card in ("NVIDIA L4", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"):
        assert known_figures("qwen3_06b", card) == {} and bandwidth(card) is None
        assert command.compared(card) == "bandwidth for floors not known; no goals: those there are are another card's"
    assert command.compared("NVIDIA H200") == (
        "bandwidth for floors 4.44 TB/s, written down; goals and vLLM's figures are this card's"
    )


@pytest.mark.parametrize("name", ["qwen3_06b", "llama_8b"])
def test_floors_follow_from_the_shape(name: str, tmp_path: Path) -> None:
    """The floors written down are bytes over bandwidth at the mean length of the ITL rows."""
    speed = bandwidth("NVIDIA H200")
    assert speed is not None
    bench = full_bench(name, tmp_path)
    for rows in (1, 8, 64, 256):
        floor = known_figures(name, "NVIDIA H200")[f"itl_ms_greedy_bs{rows}"]["floor"]
        assert floors.step_bytes(bench, rows, 128 + 320) / speed * 1e3 == pytest.approx(floor, rel=0.05)


def test_a_made_up_tokenizer(tmp_path: Path) -> None:
    from headway.api.tokenizer import load_tokenizer

    name, words = choose_tokenizer(400, tmp_path)
    tokenizer = load_tokenizer(name)
    assert words == "made up, 400 tokens"
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode("Gr\u00fc\u00dfe, [1]")) == "Gr\u00fc\u00dfe, [1]"
    assert len({tokenizer.token_bytes(i) for i in range(1, 400)}) == 399
    assert tokenizer.eos_token_ids == (0,)


def test_answers_to_a_grammar_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, good in (("[1, -2,\n 3", True), ("  [", True), ("{1", False), ("[1]x", False)):
        assert bool(structured.BEGINNING.fullmatch(text)) == good


class CannedLLM:
    """Answers with ready texts; as many tokens as given."""

    def __init__(self, answers: list[tuple[str, int]]) -> None:
        self.answers = answers
        self.model_info = SimpleNamespace(vocab_size=300)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[RequestOutput]:
        return [
            RequestOutput("r", None, [1], [CompletionOutput(0, text, list(range(count)))], True)
            for _, (text, count) in zip(prompts, self.answers)
        ]


def test_an_answer_that_ends_early_gives_no_figure() -> None:
    llm: Any = CannedLLM([("", 4), ("", 3)])
    assert context.seconds(llm, [[1]], context.plain(4)) > 0
    with pytest.raises(RequestFailedError, match="ended early: 3 of 4"):
        context.seconds(llm, [[1], [1]], context.plain(4))


def test_wrong_and_lost_constrained_answers_are_counted(tmp_path: Path) -> None:
    bench = Bench(Table("m"), replace(TINY, structured_rows=(6,)), tmp_path, "t", tmp_path, 1, {}, True)
    full = TINY.variant_long
    right = [("[1, 2", full), ("abc, d", full), ("{anything", full)]
    for answers, wrong in (
        ([*right, *right], 0),
        ([("[1, x", full), *right[1:], *right], 1),
        ([right[0], ("ab1", full), right[2], ("[1", full - 1), *right[1:]], 2),
    ):
        llm: Any = CannedLLM(answers)
        assert structured.count_wrong(bench, llm) == wrong


@pytest.mark.parametrize("found", [{"failed": 1}, {"total_output_tokens": 15}, {}])
def test_a_run_with_lost_tokens_gives_no_figure(
    found: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(args: Any, show: bool) -> dict[str, Any]:
        keys = (key for key, _, _ in server.FIGURES.values())
        return {
            **dict.fromkeys(keys, 1.0),
            "failed": 0,
            "total_output_tokens": 16,
            "errors": {},
            "lag_p99_ms": 9.0,
            "output_tokens_counted_by_server": True,
            **found,
        }

    @contextmanager
    def running(bench: Bench) -> Any:
        yield 1, SimpleNamespace(pid=0), 0.5

    monkeypatch.setattr(server, "bench_serve", measured)
    monkeypatch.setattr(server, "running", running)
    (tmp_path / "config.json").write_text("{}")
    bench = Bench(Table("m"), TINY, tmp_path, "t", tmp_path, 1, {}, True)
    server.measure(bench)
    rows = {row.name: row for row in bench.table.rows()}
    row = rows["m.server_inf_req_s"]
    if found:
        assert row.status == "failed"
        assert "of 4 requests failed" in row.note
    else:
        assert (row.status, row.ours) == ("measured", 1.0), row.note
        assert "the load generator was late by 9.0 ms" in row.note


def test_wrong_options(model: Path, tmp_path: Path) -> None:
    for arguments in (["--model", "nothing-like-it", "--tiny"], ["--runs", "0"], ["--model", str(model)]):
        result = CliRunner().invoke(app, ["bench", "anchors", "--device", "cpu", "--out", str(tmp_path), *arguments])
        assert result.exit_code == 2
        assert result.stderr.count("headway:") == 1
    with pytest.raises(ConfigError, match=", ".join(sorted(folder.name for folder in MODELS.iterdir()))):
        find_model("x")


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "gc", gc)
    context.free_memory()
    assert gc.get_freeze_count() == 0


def test_reports_of_one_minute_stand_beside_each_other(tmp_path: Path) -> None:
    report = {
        "date": "2026-01-02T03:04:05+00:00",
        "card": "NVIDIA H200",
        "rows": [],
        "commit": "c",
        "command": "x",
        "num_runs": 1,
        "complete": True,
        "versions": {},
        "python_loop_s": 0.1,
        "timeline": None,
    }
    first, second = (
        command.write({**report, "commit": "a"}, tmp_path),
        command.write({**report, "commit": "b"}, tmp_path),
    )
    assert (
        first != second
        and json.loads(first.read_text())["commit"] == "a"
        and json.loads(second.read_text())["commit"] == "b"
    )
    assert second.with_suffix(".md").exists()
