"""Commands where a card, a terminal or a library would be needed: what they ask of these, and what they say without."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import io
import random
import signal
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from headway.cli import embed, env, streaming
from headway.cli.bench import drafts, load, online, worker
from headway.cli.bench.datasets import Vocabulary
from headway.cli.bench.drafts import DraftCounts
from headway.cli.bench.load import LoadResult, Plan, Planned
from headway.cli.bench.serve_args import ServeArgs
from headway.cli.chat_remote import RemoteSpeaker, refuse_engine_options
from headway.cli.http_wire import TransportError
from headway.cli.main import app
from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.params import SamplingParams
from headway.syncs import cli as syncs_cli
from tests.cli.fake_server import Answer, serving


def test_every_option_of_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], syncs_cli.Options]] = []

    def syncs(target: list[str], options: syncs_cli.Options) -> int:
        seen.append((target, options))
        return 3

    monkeypatch.setattr(syncs_cli, "syncs", syncs)
    paths = {"json_file": "--json", "html_file": "--html", "sarif_file": "--sarif", "baseline": "--baseline",
             "allow_file": "--allow", "write_allow": "--write-allow"}  # fmt: skip
    words = [word for name, flag in paths.items() for word in (flag, name)]
    flags = ["--fail-on", "2", "--fail-on-new", "--lint", "--simulate", "--driver", "off"]
    result = CliRunner().invoke(app, ["syncs", *words, *flags, "--", "python", "x.py", "--html"])
    assert result.exit_code == 3, result.output
    CliRunner().invoke(app, ["syncs", "--", "python"])
    (target, options), (_, plain) = seen
    assert target == ["python", "x.py", "--html"]
    assert {name: getattr(options, name) for name in paths} == {name: Path(name) for name in paths}
    assert (options.fail_on, options.driver) == (2, "off")
    assert options.fail_on_new and options.lint and options.simulate
    assert plain == syncs_cli.Options() and plain.driver == "auto"


def test_tuning_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """All the numbers of rows once and in order; the compiler's process ends whatever happens; the card's file is written."""
    said: list[Any] = []
    kernels = "headway.kernels."
    left = SimpleNamespace(junction="qkv", size=(8, 4))
    found = SimpleNamespace(failed=["a", "b"], left=[left], entries={"kind": {"l": 1}})

    def noted(what: Any, answer: Any) -> Any:
        said.append(what)
        return answer

    class Compiler:
        def close(self) -> None:
            said.append("closed")

    def tune_groups(
        config: Any,
        groups: Any,
        rows: list[int],
        device: torch.device,
        compiler: Any,
        *,
        most: int,
        until: float,
        say: Any,
    ) -> Any:
        assert torch.is_inference_mode_enabled()
        said.append((config, groups, rows, device, type(compiler), most, until))
        say("saying")
        if rows == [7]:
            raise RuntimeError("broke")
        return found

    monkeypatch.setattr(
        "headway.weights.open_checkpoint", lambda name, load_format: SimpleNamespace(config=(name, load_format))
    )
    monkeypatch.setattr("headway.models.load.products", lambda config: noted(config, ["group"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(kernels + "hopper.runs_gluon", lambda device: device.index == 3)
    monkeypatch.setattr(kernels + "compiler_process.CompilerProcess", Compiler)
    monkeypatch.setattr(kernels + "linear_forms.tune.tune_groups", tune_groups)
    monkeypatch.setattr(kernels + "linear_forms.card.card_of", lambda device: f"card {device.index}")
    monkeypatch.setattr(kernels + "linear_forms.table.save_tuned", lambda *both: noted(both, "F"))
    monkeypatch.setattr("headway.cli.tune.time.monotonic", lambda: 100.0)
    result = CliRunner().invoke(
        app, ["tune", "m", "--rows", "8", "--rows", "2", "--rows", "8", "--seconds", "5", "--most", "4"]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "saying", "failed, not used: a", "failed, not used: b",
        "not measured, no time was left: qkv [8, 4]; starts choose by the rule", "written to F",
    ]  # fmt: skip
    model, cuda = ("m", "dummy"), torch.device("cuda", 3)
    assert said == [
        model, (model, ["group"], [2, 8], cuda, Compiler, 4, 105.0), "closed", ("card 3", {"kind": {"l": 1}}),
    ]  # fmt: skip
    said.clear()
    assert CliRunner().invoke(app, ["tune", "m", "--rows", "7"]).exit_code == 1
    assert said[-1] == "closed" and said[1][5:] == (12, 400.0)
    said.clear()
    CliRunner().invoke(app, ["tune", "m"])
    assert said[1][2] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    monkeypatch.setattr(kernels + "hopper.runs_gluon", lambda _: False)
    assert "for which there is nothing to choose" in CliRunner().invoke(app, ["tune", "m"]).output


def test_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "gguf":
            raise importlib.metadata.PackageNotFoundError
        return f"of {package}"

    def no_compiler() -> None:
        raise RuntimeError("no cc")

    monkeypatch.setattr("headway.cli.env.importlib.metadata.version", version)
    monkeypatch.setattr("headway.kernels.cpu.loader.find_compiler", no_compiler)
    for library, text in ((None, "no: torch's operations are used on CPU"), (object(), "yes")):
        monkeypatch.setattr("headway.kernels.cpu.loader.library", lambda library=library: library)
        found = env.facts()
        assert found["native CPU kernels"] == text and found["C compiler"] == "none: no cc"
    assert found["gguf"] == "not installed" and found["numpy"] == "of numpy"
    assert set(env.PACKAGES) < {*found} and next(iter(found)) == "headway"
    monkeypatch.setattr("headway.kernels.cpu.loader.find_compiler", lambda: ["cc", "a b"])
    assert env._compiler()["C compiler"] == "cc 'a b'"
    if not torch.cuda.is_available():
        assert found["run-ahead"].startswith("no") and found["CUDA graphs"] == "no"
    card = SimpleNamespace(name="Card", total_memory=2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)

    def refuses(_: torch.Tensor) -> None:
        raise RuntimeError("cannot\nand more")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuses)
    assert env._devices()["pinned memory"] == "no: cannot (copies to the device will block)"


class Bar:
    """What tqdm is asked."""

    made: ClassVar[Any] = None

    def __init__(self, **given: Any) -> None:
        Bar.made, self.given, self.done, self.is_closed = self, given, 0, False

    def update(self, number: int = 1) -> bool:
        self.done += number
        return True

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.mark.parametrize("at_terminal", [True, False])
def test_bars_are_for_terminals(at_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: at_terminal, write=len, flush=lambda: None))
    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr(Bar, "made", None)
    with embed._bar(9) as advance:
        advance(4)
    if at_terminal:
        assert Bar.made.given == {"total": 9, "unit": "texts", "dynamic_ncols": True}
        assert Bar.made.done == 4 and Bar.made.is_closed
    else:
        assert Bar.made is None
    with online._progress(5, True) as tick:
        assert tick() is None
    if at_terminal:
        assert (Bar.made.given["total"], Bar.made.done, Bar.made.is_closed) == (5, 1, True)
    else:
        assert Bar.made is None
    monkeypatch.setattr(Bar, "made", None)
    with online._progress(5, False) as tick:
        tick()
    assert Bar.made is None


@pytest.mark.parametrize(
    ("soft", "hard", "count", "after"),
    [
        (100, 1000, 36, (100, 1000)),
        (100, 1000, 37, (101, 1000)),
        (100, 1000, 936, (1000, 1000)),
        (100, 1000, 937, None),
        (100, -1, 5000, (5064, -1)),
        (-1, -1, 5000, (-1, -1)),
    ],
)
def test_open_files(
    soft: int, hard: int, count: int, after: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the connections need and 64 more, and not beyond what the system allows; -1 is no limit."""
    limits = [(soft, hard)]
    monkeypatch.setattr("resource.RLIM_INFINITY", -1)
    monkeypatch.setattr("resource.getrlimit", lambda _: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda _, both: limits.append(both))
    if after is None:
        with pytest.raises(ConfigError, match="937 connections need 1001 open files, and the system allows 1000"):
            online._allow_sockets(count)
    else:
        online._allow_sockets(count)
    assert limits[-1] == (after or (soft, hard))


def test_text_of_a_length_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that becomes more or fewer tokens than it was made of is cut or added to, and its length is told in any case."""

    class Merging:
        """A token a letter, but "ab" is one; id 0 is special, and added where a prompt begins."""

        vocab_size, special_ids = 3, frozenset({0})

        def decode(self, ids: list[int]) -> str:
            return "".join(" ab"[each] for each in ids)

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            found = [" ab".index(each) for each in text.replace("ab", "a")]
            return ([0] if add_special_tokens else []) + found

    monkeypatch.setattr("headway.api.tokenizer.load_tokenizer", lambda _: Merging())
    vocabulary = Vocabulary(ServeArgs(tokenizer="t"))
    for seed in range(5):
        item = vocabulary.item(random.Random(seed), [1, 2, 1, 2, 1], 9)
        assert isinstance(item.prompt, str) and item.output_len == 9
        assert item.num_tokens == len(Merging().encode(item.prompt)) <= 6
    assert max(vocabulary.item(random.Random(seed), [1, 2, 1, 2, 1], 9).num_tokens or 0 for seed in range(5)) == 6
    exact = vocabulary.item(random.Random(0), [2, 1, 1], 9)
    assert (exact.prompt, exact.num_tokens) == ("baa", 4)


def test_drafts_that_are_counted() -> None:
    stats = SimpleNamespace(num_accepted_tokens_per_pos=[1], num_drafts=3, num_draft_tokens=7, num_accepted_tokens=5)
    assert drafts.counted(stats) == DraftCounts(3, 7, 5)  # type: ignore[arg-type]
    stats.num_accepted_tokens_per_pos = []
    assert drafts.counted(stats) is None  # type: ignore[arg-type]
    assert DraftCounts(3, 7, 5).figures() == {
        "spec_decode_num_drafts": 3, "spec_decode_num_draft_tokens": 7, "spec_decode_num_accepted_tokens": 5,
        "spec_decode_acceptance_length": 1 + 5 / 3,
    }  # fmt: skip
    assert DraftCounts(0, 0, 0).figures()["spec_decode_acceptance_length"] is None


def test_what_a_server_publishes() -> None:
    """All its engines added up; nothing where it has no such figures, or does not answer well."""
    text = "".join(
        f'x:spec_decode_num_{name}_total{{engine="{e}"}} {n + e}\n'
        for e in (0, 1)
        for n, name in ((3, "drafts"), (7, "draft_tokens"), (5, "accepted_tokens"))
    )
    answers: dict[str, Any] = {
        "good": (200, text.encode()),
        "few": (200, text[:60].encode()),
        "no": (404, text.encode()),
    }

    async def collect(request: str) -> tuple[int, bytes]:
        if request == "gone":
            raise TransportError("gone")
        found: tuple[int, bytes] = answers[request]
        return found

    for word, counts in (("good", DraftCounts(7, 15, 11)), ("few", None), ("no", None), ("gone", None)):
        address = SimpleNamespace(
            request=lambda method, path, _, word=word: (method, path) == ("GET", "/metrics") and word
        )
        client: Any = SimpleNamespace(address=address, headers={}, collect=collect)
        assert asyncio.run(drafts.asked(client)) == counts, word


def test_an_engine_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process unless it is asked otherwise; what the user says wins over the command, which wins over the model."""
    monkeypatch.setattr("headway.AsyncLLM", lambda **given: given)
    for asked, own in ((None, False), (False, False), (True, True)):
        started: Any = streaming.start_engine(EngineArgs(model="m", multiprocess=asked, seed=3))
        assert (started["multiprocess"], started["model"], started["seed"]) == (own, "m", 3)
    defaults = SamplingParams(temperature=0.5, top_k=7, max_tokens=9)
    llm: Any = SimpleNamespace(get_default_sampling_params=lambda: defaults)
    merged = streaming.merge_params(llm, {"top_k": 3}, top_k=5, max_tokens=11)
    assert (merged.temperature, merged.top_k, merged.max_tokens) == (0.5, 3, 11)


def test_a_server_is_asked_as_the_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = RemoteSpeaker("http://h:81/p/v1", "key", EngineArgs(model="m"), {"n": 2, "temperature": 0.5})
    assert speaker.name == "m at http://h:81/p" and asyncio.run(speaker.figures()) == []
    assert speaker._headers == {"Authorization": "Bearer key"} and speaker._sampling == {"temperature": 0.5}
    assert RemoteSpeaker("http://h", None, EngineArgs(model="m"), {})._headers == {}
    with pytest.raises(ConfigError, match="--dtype, --max-num-seqs cannot go with --url"):
        refuse_engine_options(EngineArgs(model="m", max_num_seqs=3, dtype="float32"))
    refuse_engine_options(EngineArgs(model="m"))


def test_shares_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and connections are dealt out; no process without a request."""
    seen: list[Any] = []

    async def run_workers(plans: list[Any], advance: Any, stop: Any) -> LoadResult:
        seen.extend(plans)
        return LoadResult(0.0, [], 0.0)

    monkeypatch.setattr(online, "run_workers", run_workers)
    planned = [Planned(i, 0.0, b"") for i in range(5)]
    for workers, total, shares in ((3, 7, [3, 2, 2]), (3, None, [None] * 3), (9, 9, [2, 2, 2, 2, 1])):
        seen.clear()
        args = ServeArgs(num_workers=workers, max_concurrency=total)
        asyncio.run(online._run_load(args, planned, show=False))
        assert [plan.max_concurrency for plan in seen] == shares
        assert sorted(each.index for plan in seen for each in plan.requests) == list(range(5))
        assert [each.index for each in seen[0].requests] == [i for i in range(5) if i % len(shares) == 0]


def test_a_load_process_whose_parent_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = msgspec.msgpack.encode(Plan("http://h", "/", {}, [], None, 1.0))
    source, sink = io.BytesIO(struct.pack("<q", len(packed)) + packed + b"1234567"), io.BytesIO()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(worker, "quieten", lambda: None)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=source))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=sink))
    worker.main()
    assert sink.getvalue() == b"ready\n"


@pytest.mark.parametrize(("completed", "failed", "status"), [(3, 0, 0), (2, 1, 1), (0, 3, 1), (2, 0, 130), (1, 1, 130)])
def test_how_a_bench_ends(
    completed: int, failed: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block, what a reader must know, whether it was interrupted, and where the result is; and a status for each end."""
    found = {"completed": completed, "failed": failed, "errors": {"gone": failed} if failed else {}, "lag_p99_ms": 9.0,
             "output_tokens_counted_by_server": True, "model_id": "m", "request_rate": "inf", "date": "d"}  # fmt: skip

    async def measure(args: ServeArgs, show: bool) -> dict[str, Any]:
        assert show and args.num_prompts == 3
        return found

    monkeypatch.setattr(online, "measure", measure)
    monkeypatch.setattr(
        "headway.cli.bench.metrics.block", lambda figures, settings: f"block {figures is found} {settings}"
    )
    flags = ["--num-prompts", "3", "--num-workers", "2", "--request-rate", "7", "--max-concurrency", "5"]
    saved = ["--save-result", "--result-dir", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "serve", *flags, *saved])
    assert result.exit_code == status, result.output
    assert result.stdout == f"block True {online.settings_of(ServeArgs(request_rate=7.0, max_concurrency=5))}\n"
    ended = completed + failed
    assert result.stderr.splitlines() == [
        *([f"headway: {failed} x gone"] if failed else []),
        "headway: the load generator was late by 9.0 ms (99th percentile); use more than --num-workers 2",
        *([f"headway: interrupted: these are the {ended} of 3 requests that had ended"] if ended < 3 else []),
        f"wrote {tmp_path / 'openai-infqps-m-d.json'}",
    ]
    plain = CliRunner().invoke(app, ["bench", "serve", *flags])
    assert "wrote" not in plain.output


@pytest.mark.parametrize("stopped", [True, False])
def test_nothing_of_a_load_goes_on_behind_its_end(stopped: bool) -> None:
    """Requests that were given up have ended, and their connections are closed, when the run returns."""

    async def loaded(url: str) -> set[Any]:
        stop = asyncio.Event()
        if stopped:
            asyncio.get_running_loop().call_later(0.05, stop.set)
        plan = Plan(url, "/v1/completions", {}, [Planned(i, 0.0, b"{}") for i in range(3)], None, 60.0)
        result = await load.run(plan, stop=stop)
        assert len(result.records) == (0 if stopped else 3)
        assert gc.isenabled(), "it is off while requests are timed"
        return asyncio.all_tasks() - {asyncio.current_task()}

    with serving(lambda _: Answer(holds=stopped)) as server:
        assert asyncio.run(loaded(server.url)) == set()


def test_an_interrupt_is_again_what_it_was_when_a_bench_ends() -> None:
    """However it ends, and whether it was interrupted or not."""

    async def ended(interrupts: int) -> None:
        with online._interruptible() as stop:
            assert signal.getsignal(signal.SIGINT) is not mine
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)
                await asyncio.wait_for(stop.wait(), 30)
            raise KeyError

    def mine(*_: Any) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGINT, mine)
    try:
        for interrupts in (0, 1):
            with pytest.raises(KeyError), asyncio.Runner() as runner:
                signal.signal(signal.SIGINT, mine)
                runner.run(ended(interrupts))
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
