"""What ``headway bench serve`` is asked to do: vLLM's flags, checked."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from headway.cli.http_wire import Address
from headway.cli.options import human_int
from headway.core.errors import ConfigError

BACKENDS: Final = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Backend -> its endpoint. "vllm" is another word for "openai"."""
DATASETS: Final = ("random", "prefix_repetition", "custom")
METRICS: Final = ("ttft", "tpot", "itl", "e2el")


def _int(text: str) -> Any:
    return typer.Option(help=text, parser=human_int, metavar="INTEGER")


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


@dataclass(kw_only=True)
class ServeArgs:
    """One run. Field by field the command's options; lengths are in tokens, rates per second."""

    backend: Annotated[str, typer.Option(help="openai (completions), openai-chat, or vllm (= openai).")] = "openai"
    base_url: Annotated[str | None, typer.Option(help="http://host:port[/prefix]; instead of --host and --port.")] = (
        None
    )
    host: Annotated[str, typer.Option(help="The server's host.")] = "127.0.0.1"
    port: Annotated[int, _int("The server's port.")] = 8000
    endpoint: Annotated[str | None, typer.Option(help="Path; default: the backend's.")] = None
    model: Annotated[str | None, typer.Option(help="Name in the requests; default: the server's first model.")] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, GGUF file or hub name; random prompts are then text, not token ids.")
    ] = None
    dataset_name: Annotated[str, typer.Option(help=f"One of {', '.join(DATASETS)}.")] = "random"
    dataset_path: Annotated[
        Path | None, typer.Option(help='For custom: a file of lines {"prompt": ..., "output_tokens": N}.')
    ] = None
    num_prompts: Annotated[int, _int("Requests.")] = 1000
    random_input_len: Annotated[int, _int("random: prompt length.")] = 1024
    random_output_len: Annotated[int, _int("random: tokens to generate.")] = 128
    random_range_ratio: Annotated[
        float, typer.Option(help="random: lengths vary evenly by this share, up and down.")
    ] = 0.0
    random_prefix_len: Annotated[int, _int("random: same first tokens in all prompts.")] = 0
    random_vocab_size: Annotated[int, _int("Random token ids are below this, without a tokenizer.")] = 10_000
    prefix_repetition_prefix_len: Annotated[int, _int("prefix_repetition: tokens of each prefix.")] = 256
    prefix_repetition_suffix_len: Annotated[int, _int("prefix_repetition: tokens after the prefix.")] = 256
    prefix_repetition_num_prefixes: Annotated[int, _int("prefix_repetition: different prefixes.")] = 10
    prefix_repetition_output_len: Annotated[int, _int("prefix_repetition: tokens to generate.")] = 128
    custom_output_len: Annotated[int, _int("custom: tokens to generate where the line does not say.")] = 256
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf sends all at once.")] = math.inf
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distribution of gaps: 1 Poisson, less in bursts, more evenly.")
    ] = 1.0
    max_concurrency: Annotated[int | None, _int("Most requests open at once.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate past the end-of-sequence token.")] = False
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    extra_body: Annotated[str | None, typer.Option(help="JSON object added to every request.")] = None
    header: Annotated[
        list[str], typer.Option(help="NAME=VALUE sent with every request; repeatable. $OPENAI_API_KEY is sent if set.")
    ] = field(default_factory=list)
    seed: Annotated[int, _int("Of prompts and arrivals.")] = 0
    num_warmups: Annotated[int, _int("Requests before measuring.")] = 0
    ready_check_timeout_sec: Annotated[int, _int("Wait this long for the server's first answer; 0 does not ask.")] = 600
    request_timeout_sec: Annotated[int, _int("A request that takes longer has failed.")] = 6 * 3600
    num_workers: Annotated[int, _int("Processes that generate load.")] = 1
    percentile_metrics: Annotated[
        str, typer.Option(help=f"Latencies to show, of {', '.join(METRICS)}; commas between.")
    ] = "ttft,tpot,itl"
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to show; commas between.")] = "99"
    goodput: Annotated[
        list[str], typer.Option(help='Milliseconds that make a request good: "ttft:200 tpot:20"; repeatable.')
    ] = field(default_factory=list)
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the figures as JSON.")] = False
    result_dir: Annotated[Path | None, typer.Option(help="Folder for it; default: the current one.")] = None
    result_filename: Annotated[str | None, typer.Option(help="Its name; default: backend, rate, model and time.")] = (
        None
    )
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="No progress bar.")] = False

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self.address()
        self.extra()
        self.headers()
        self.limits_ms()

    def _check_choices(self) -> None:
        for name, value, known in (
            ("backend", self.backend, tuple(BACKENDS)),
            ("dataset-name", self.dataset_name, DATASETS),
        ):
            if value not in known:
                raise ConfigError(f"--{name} must be one of {', '.join(known)}; got {value!r}")
        if (self.dataset_name == "custom") != (self.dataset_path is not None):
            raise ConfigError("--dataset-path goes with --dataset-name custom, which needs it")
        made = self.dataset_name != "custom"
        if self.is_chat and made and self.tokenizer is None:
            raise ConfigError(
                "chat requests are text, and random text of a given length needs --tokenizer; "
                "without one use --backend openai"
            )
        for metric in self.metrics():
            if metric not in METRICS:
                raise ConfigError(f"--percentile-metrics must be of {', '.join(METRICS)}; got {metric!r}")
        self.percentiles()
        path = self.endpoint
        if path is not None and not path.startswith("/"):
            raise ConfigError(f"--endpoint begins with a slash; got {path!r}")

    def _check_numbers(self) -> None:
        least = {
            "num_prompts": 1, "random_input_len": 0, "random_output_len": 1, "random_prefix_len": 0,
            "random_vocab_size": 2, "prefix_repetition_prefix_len": 0, "prefix_repetition_suffix_len": 0,
            "prefix_repetition_num_prefixes": 1, "prefix_repetition_output_len": 1, "custom_output_len": 1,
            "max_concurrency": 1, "num_warmups": 0, "ready_check_timeout_sec": 0, "request_timeout_sec": 1,
            "num_workers": 1, "port": 1,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}; got {value}")
        if not 0.0 <= self.random_range_ratio < 1.0:
            raise ConfigError(f"--random-range-ratio must be in [0, 1); got {self.random_range_ratio}")
        for name, real in (("request-rate", self.request_rate), ("burstiness", self.burstiness)):
            if not real > 0:
                raise ConfigError(f"--{name} must be greater than 0; got {real}")
        if self.dataset_name == "random" and self.random_prefix_len + self.random_input_len < 1:
            raise ConfigError("--random-input-len and --random-prefix-len together must be at least 1")
        if self.max_concurrency is not None and self.max_concurrency < self.num_workers:
            raise ConfigError("--max-concurrency must be at least --num-workers, among whom it is divided")

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def path(self) -> str:
        return self.endpoint or BACKENDS[self.backend]

    def address(self) -> Address:
        """The server's."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return Address.parse(self.base_url or f"http://{host}:{self.port}")

    def metrics(self) -> list[str]:
        """Names out of ``METRICS``."""
        return _words(self.percentile_metrics)

    def percentiles(self) -> list[float]:
        """Each from 0 to 100."""
        try:
            found = [float(word) for word in _words(self.metric_percentiles)]
        except ValueError:
            found = [-1.0]
        if not all(0 <= percent <= 100 for percent in found):
            raise ConfigError(f"--metric-percentiles must be numbers from 0 to 100; got {self.metric_percentiles!r}")
        return found

    def extra(self) -> dict[str, Any]:
        """``--extra-body`` as an object."""
        try:
            found = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise ConfigError(f"--extra-body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError("--extra-body must be a JSON object")
        return found

    def headers(self) -> dict[str, str]:
        """Those of every request, the API key included."""
        pairs = [text.partition("=") for text in self.header]
        for name, equals, _ in pairs:
            if not name or not equals:
                raise ConfigError(f"--header is NAME=VALUE; got {name!r}")
        key = os.environ.get("OPENAI_API_KEY")
        return ({"Authorization": f"Bearer {key}"} if key else {}) | {name: value for name, _, value in pairs}

    def limits_ms(self) -> dict[str, float]:
        """``--goodput`` as metric -> milliseconds."""
        limits = {}
        for word in (word for text in self.goodput for word in _words(text)):
            name, _, value = word.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = -1.0
            if name not in ("ttft", "tpot", "e2el") or limits[name] < 0:
                raise ConfigError(f"--goodput is ttft:MS, tpot:MS or e2el:MS; got {word!r}")
        return limits
