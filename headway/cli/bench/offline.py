"""``headway bench throughput`` and ``latency``: vLLM's offline benchmarks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.bench import drafts
from headway.cli.errors import clean_errors
from headway.cli.options import engine_kwargs, with_options
from headway.core.config import EngineArgs
from headway.core.errors import RequestFailedError
from headway.core.outputs import RequestOutput
from headway.core.params import SamplingParams

if TYPE_CHECKING:
    from headway.api.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)
NANO_MODEL_LEN = 4096

OutputJson = Annotated[Path | None, typer.Option("--output-json", help="Also write the figures to this file.")]
Detokenize = Annotated[bool, typer.Option("--disable-detokenize", help="Token ids only, no text.")]


def _start(engine: EngineArgs, **defaults: Any) -> LLM:
    from headway import LLM

    given = engine_kwargs(engine)
    return LLM(**{**given, **{name: value for name, value in defaults.items() if given[name] is None}})


def _checked(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """No figure for a run in which a request failed."""
    for output in outputs:
        if output.error is not None:
            raise RequestFailedError(f"request {output.request_id} failed: {output.error}")
    return outputs


def random_prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """``count`` prompts of ``length`` random token ids."""
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def nano_workload(
    count: int, vocab_size: int, detokenize: bool, lengths: tuple[int, int] = (100, 1024)
) -> tuple[list[list[int]], list[SamplingParams]]:
    """nano-vllm's: seed 0, 100 to 1024 tokens in and out, ids up to 10,000, temperature 0.6, no early end."""
    rng = random.Random(0)
    top = min(10_000, vocab_size - 1)
    prompts = [[rng.randint(0, top) for _ in range(rng.randint(*lengths))] for _ in range(count)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(*lengths), detokenize=detokenize)
        for _ in range(count)
    ]
    return prompts, params


@clean_errors
@with_options(sampling=False)
def throughput(
    input_len: Annotated[int, typer.Option("--input-len", "--random-input-len", help="Prompt tokens.")] = 1024,
    output_len: Annotated[int, typer.Option("--output-len", "--random-output-len", help="Generated tokens.")] = 128,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", help="Requests.", show_default="1000; with --nano 256")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Completions per prompt.")] = 1,
    nano: Annotated[bool, typer.Option("--nano", help="nano-vllm's workload: 100 to 1024 tokens in and out.")] = False,
    disable_detokenize: Detokenize = False,
    output_json: OutputJson = None,
    *,
    engine: EngineArgs,
) -> None:
    """Requests and tokens per second of one large batch of random prompts."""
    with _start(engine, **({"max_model_len": NANO_MODEL_LEN} if nano else {})) as llm:
        vocab = llm.model_info.vocab_size
        params: SamplingParams | list[SamplingParams]
        if nano:
            prompts, params = nano_workload(num_prompts or 256, vocab, not disable_detokenize)
        else:
            prompts = random_prompts(random.Random(engine.seed), num_prompts or 1000, input_len, vocab)
            params = SamplingParams(
                n=n, temperature=1.0, ignore_eos=True, max_tokens=output_len, detokenize=not disable_detokenize
            )
        _checked(llm.generate([prompts[0][:16]], SamplingParams(max_tokens=16, ignore_eos=True), use_tqdm=False))
        before, start = drafts.counted(llm.stats()), perf_counter()
        outputs = _checked(llm.generate(list(prompts), params, use_tqdm=not nano))
        elapsed = perf_counter() - start
        drafted = _drafted(llm, before)
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    total = num_input + num_output
    typer.echo(
        f"Throughput: {len(outputs) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{num_output / elapsed:.2f} output tokens/s"
    )
    typer.echo(f"Total num prompt tokens:  {num_input}")
    typer.echo(f"Total num output tokens:  {num_output}")
    figures = {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": total,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": num_output / elapsed,
    }
    _write(output_json, figures | drafted)


@clean_errors
@with_options(sampling=False)
def latency(
    input_len: Annotated[int, typer.Option("--input-len", help="Prompt tokens.")] = 32,
    output_len: Annotated[int, typer.Option("--output-len", help="Generated tokens.")] = 128,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts in one call.")] = 8,
    n: Annotated[int, typer.Option("--n", help="Completions per prompt.")] = 1,
    num_iters_warmup: Annotated[int, typer.Option("--num-iters-warmup", help="Calls before measuring.")] = 10,
    num_iters: Annotated[int, typer.Option("--num-iters", min=1, help="Calls measured.")] = 30,
    disable_detokenize: Detokenize = False,
    output_json: OutputJson = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the timeline of one more batch there, as a page.")
    ] = None,
    *,
    engine: EngineArgs,
) -> None:
    """Seconds that one batch takes from call to return."""
    import numpy as np

    from headway.cli.trace import require_tracing, write_timeline

    if trace is not None:
        require_tracing()
    params = SamplingParams(
        n=n, temperature=1.0, ignore_eos=True, max_tokens=output_len, detokenize=not disable_detokenize
    )
    rng = random.Random(engine.seed)
    latencies = []
    with _start(engine) as llm:
        before = drafts.counted(llm.stats())
        for i in range(num_iters_warmup + num_iters):
            if i == num_iters_warmup:
                before = drafts.counted(llm.stats())
            # New prompts each time: the prefix cache must not shorten the prefill.
            prompts = random_prompts(rng, batch_size, input_len, llm.model_info.vocab_size)
            start = perf_counter()
            _checked(llm.generate(list(prompts), params, use_tqdm=False))
            if i >= num_iters_warmup:
                latencies.append(perf_counter() - start)
        drafted = _drafted(llm, before)
        if trace is not None:
            batch = random_prompts(rng, batch_size, input_len, llm.model_info.vocab_size)
            command = "headway bench latency"
            typer.echo(
                write_timeline(trace, command, lambda: _checked(llm.generate(list(batch), params, use_tqdm=False)))
            )
    average = float(np.mean(latencies))
    percentiles = {p: float(np.percentile(latencies, p)) for p in PERCENTILES}
    typer.echo(f"Avg latency: {average} seconds")
    for percent, seconds in percentiles.items():
        typer.echo(f"{percent}% percentile latency: {seconds} seconds")
    _write(output_json, {"avg_latency": average, "latencies": latencies, "percentiles": percentiles, **drafted})


def _drafted(llm: LLM, before: drafts.DraftCounts | None) -> dict[str, Any]:
    """Says what was drafted since ``before`` and returns it for JSON; nothing without drafts."""
    now = drafts.counted(llm.stats())
    if now is None:
        return {}
    typer.echo(drafts.sentence(now.since(before)))
    return now.since(before).figures()


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=4) + "\n", encoding="utf-8")
