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
DATASETS: Final = ("random", "prefix_repetition", "custom", "sharegpt")
FILES: Final = ("custom", "sharegpt")
SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
RAMPS: Final = ("linear", "exponential")
METRICS: Final = ("ttft", "tpot", "itl", "e2el")
OWN_NAMES: Final = frozenset((
    "date", "backend", "endpoint_type", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "last_start", "completed", "failed", "errors", "detailed", "input_lens", "output_lens",
    "ttfts", "itls", "generated_texts",
))  # fmt: skip
"""Of what a result says itself."""


def _int(text: str) -> Any:
    return typer.Option(help=text, parser=human_int, metavar="INTEGER")


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _pairs(flag: str, texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ConfigError(f"{flag} is NAME=VALUE; got {name!r}")
    return {name: value for name, _, value in pairs}


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
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in the requests, if --model shall only name the result.")
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, GGUF file or hub name; random prompts are then text, not token ids.")
    ] = None
    dataset_name: Annotated[str, typer.Option(help=f"One of {', '.join(DATASETS)}.")] = "random"
    dataset_path: Annotated[
        Path | None,
        typer.Option(help='custom: lines {"prompt": ..., "output_tokens": N}; sharegpt: a JSON list of conversations.'),
    ] = None
    input_len: Annotated[int | None, _int("Another name of --random-input-len.")] = None
    output_len: Annotated[int | None, _int("Tokens to generate, whatever the data set.")] = None
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
    sharegpt_output_len: Annotated[int | None, _int("sharegpt: tokens to generate; default: as long as it was.")] = None
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf sends all at once.")] = math.inf
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distribution of gaps: 1 Poisson, less in bursts, more evenly.")
    ] = 1.0
    ramp_up_strategy: Annotated[
        str | None, typer.Option(help=f"The rate grows over the run: {' or '.join(RAMPS)}; instead of --request-rate.")
    ] = None
    ramp_up_start_rps: Annotated[float | None, typer.Option(help="Requests per second at the start.")] = None
    ramp_up_end_rps: Annotated[float | None, typer.Option(help="Requests per second at the end.")] = None
    max_concurrency: Annotated[int | None, _int("Most requests open at once.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate past the end-of-sequence token.")] = False
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[float | None, typer.Option(help="Sent if given.")] = None
    top_k: Annotated[int | None, typer.Option(help="Sent if given.")] = None
    min_p: Annotated[float | None, typer.Option(help="Sent if given.")] = None
    presence_penalty: Annotated[float | None, typer.Option(help="Sent if given.")] = None
    frequency_penalty: Annotated[float | None, typer.Option(help="Sent if given.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Sent if given.")] = None
    logprobs: Annotated[int | None, _int("Log-probabilities per token to ask for.")] = None
    extra_body: Annotated[str | None, typer.Option(help="JSON object added to every request.")] = None
    header: Annotated[
        list[str], typer.Option(help="NAME=VALUE ... sent with every request. $OPENAI_API_KEY is sent if set.")
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
        list[str], typer.Option(help="Milliseconds that make a request good, as in ttft:200 tpot:20.")
    ] = field(default_factory=list)
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the figures as JSON.")] = False
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Write lengths, times, texts and errors of each request, too.")
    ] = False
    append_result: Annotated[
        bool, typer.Option("--append-result", help="Add a line to the file instead of replacing it.")
    ] = False
    label: Annotated[str | None, typer.Option(help="Kept with the result, and first in its file's name.")] = None
    metadata: Annotated[list[str], typer.Option(help="KEY=VALUE ... kept with the result.")] = field(
        default_factory=list
    )
    result_dir: Annotated[Path | None, typer.Option(help="Folder for it; default: the current one.")] = None
    result_filename: Annotated[str | None, typer.Option(help="Its name; default: backend, rate, model and time.")] = (
        None
    )
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="No progress bar.")] = False

    def __post_init__(self) -> None:
        self._spread_lengths()
        self._check_choices()
        self._check_numbers()
        self.address()
        self.extra()
        self.headers()
        self.limits_ms()
        self.notes()

    def _spread_lengths(self) -> None:
        if self.input_len is not None:
            if self.dataset_name != "random":
                raise ConfigError("--input-len needs --dataset-name random; other prompts have lengths of their own")
            self.random_input_len = self.input_len
        if self.output_len is not None:
            self.random_output_len = self.prefix_repetition_output_len = self.output_len
            self.custom_output_len = self.sharegpt_output_len = self.output_len

    def _check_choices(self) -> None:
        for name, value, known in (
            ("backend", self.backend, tuple(BACKENDS)),
            ("dataset-name", self.dataset_name, DATASETS),
        ):
            if value not in known:
                raise ConfigError(f"--{name} must be one of {', '.join(known)}; got {value!r}")
        made = self.dataset_name not in FILES
        if made != (self.dataset_path is None):
            raise ConfigError(f"--dataset-path goes with --dataset-name {' or '.join(FILES)}, which need it")
        if self.dataset_name == "sharegpt" and self.tokenizer is None:
            raise ConfigError("--dataset-name sharegpt needs --tokenizer: conversations are chosen by their lengths")
        if self.is_chat and made and self.tokenizer is None:
            raise ConfigError(
                "chat requests are text, and random text of a given length needs --tokenizer; "
                "without one use --backend openai"
            )
        for metric in self.metrics():
            if metric not in METRICS:
                raise ConfigError(f"--percentile-metrics must be of {', '.join(METRICS)}; got {metric!r}")
        self.percentiles()
        if (self.save_detailed or self.metadata) and not (self.save_result or self.append_result):
            raise ConfigError("--save-detailed and --metadata go into a file: add --save-result or --append-result")
        path = self.endpoint
        if path is not None and not path.startswith("/"):
            raise ConfigError(f"--endpoint begins with a slash; got {path!r}")

    def _check_numbers(self) -> None:
        least = {
            "num_prompts": 1, "random_input_len": 0, "random_output_len": 1, "random_prefix_len": 0,
            "random_vocab_size": 2, "prefix_repetition_prefix_len": 0, "prefix_repetition_suffix_len": 0,
            "prefix_repetition_num_prefixes": 1, "prefix_repetition_output_len": 1, "custom_output_len": 1,
            "max_concurrency": 1, "num_warmups": 0, "ready_check_timeout_sec": 0, "request_timeout_sec": 1,
            "num_workers": 1, "port": 1, "sharegpt_output_len": 1, "logprobs": 0,
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
        self._check_ramp()
        if self.dataset_name == "random" and self.random_prefix_len + self.random_input_len < 1:
            raise ConfigError("--random-input-len and --random-prefix-len together must be at least 1")
        if self.max_concurrency is not None and self.max_concurrency < self.num_workers:
            raise ConfigError("--max-concurrency must be at least --num-workers, among whom it is divided")

    def _check_ramp(self) -> None:
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps go with --ramp-up-strategy")
            return
        if self.ramp_up_strategy not in RAMPS:
            raise ConfigError(f"--ramp-up-strategy must be {' or '.join(RAMPS)}; got {self.ramp_up_strategy!r}")
        if self.request_rate != math.inf:
            raise ConfigError("--request-rate cannot go with --ramp-up-strategy, which sets the rate")
        least = 0.0 if self.ramp_up_strategy == "linear" else 1e-9
        if start is None or end is None or not least <= start <= end < math.inf or not end > 0:
            raise ConfigError(
                "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, which is not less; "
                "exponential growth begins above 0"
            )

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
        key = os.environ.get("OPENAI_API_KEY")
        return ({"Authorization": f"Bearer {key}"} if key else {}) | _pairs("--header", self.header)

    def notes(self) -> dict[str, str]:
        """``--metadata`` by key."""
        notes = _pairs("--metadata", self.metadata)
        for name in OWN_NAMES & set(notes):
            raise ConfigError(f"--metadata {name}: the result has a figure of that name; choose another")
        return notes

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
