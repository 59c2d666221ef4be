"""Offline generation: time per step by batch size, what features cost, throughput, prefill, first token."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from headway.cli.bench.anchors import gate
from headway.cli.bench.anchors.context import Bench, plain, random_prompts, seconds, step_ms
from headway.cli.bench.offline import nano_workload

if TYPE_CHECKING:
    from headway.api.llm import LLM

ALONE_REPEATS: Final = 5
FEATURES: Final[dict[str, dict[str, Any]]] = {
    "topk_topp": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "logprobs5": {"logprobs": 5},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "seeded": {"temperature": 1.0, "seed": 7},
    "bad_words": {"bad_words": ["bad", "worse words", "x"]},
    "logit_bias": {"logit_bias": {5: 1.0, 9: -100.0, 77: 2.5}},
}


def itl_name(rows: int) -> str:
    """Time per greedy step of ``rows`` rows."""
    return f"itl_ms_greedy_bs{rows}"


def short_name(rows: int) -> str:
    """Time per greedy step of ``rows`` rows at the shorter lengths that features are measured at."""
    return f"itl_ms_short_bs{rows}"


def variant_name(feature: str, rows: int) -> str:
    """Time per step with a feature on all rows; "plain" is none."""
    return f"itl_ms_{feature}_bs{rows}"


def cost_name(feature: str, rows: int) -> str:
    """What the feature costs over plain."""
    return f"cost_pct_{feature}_bs{rows}"


def announce(bench: Bench) -> list[str]:
    """The figures of this module."""
    scale, table = bench.scale, bench.table
    itl = [name(rows) for name in (itl_name, *([] if bench.full else [short_name])) for rows in scale.rows]
    features = list(FEATURES) if bench.full else []
    variants = [variant_name(name, scale.variant_rows) for name in ("plain", *features)] if features else []
    costs = [cost_name(name, scale.variant_rows) for name in features]
    rates = ["nano_tok_s", "prefill_tok_s"]
    table.announce([*itl, *variants], "ms")
    table.announce(costs, "% over plain")
    table.announce(rates, "tok/s", "higher")
    table.announce(["ttft_ms_alone"], "ms")
    return [*itl, *variants, *costs, *rates, "ttft_ms_alone"]


def measure(bench: Bench) -> str | None:
    """Measure what is wanted, with one engine; gives what the check before found wrong, or None."""
    names = announce(bench)
    if not bench.table.wants(*names):
        return None
    own = gate.of_fixed_width(bench) is bench  # else the check needs an engine of its own
    expected, wrong = (gate.oracle(bench), None) if own else (None, gate.check(bench))
    if wrong is not None:
        return wrong
    with bench.open() as llm:
        wrong = gate.difference(gate.answers(llm, bench), expected) if expected is not None else None
        if wrong is not None:
            return wrong
        for run in range(bench.runs):
            _steps(bench, llm, run)
            if bench.full:
                _features(bench, llm, run)
            _throughput(bench, llm, run)
    return None


def _steps(bench: Bench, llm: LLM, run: int) -> None:
    scale, table = bench.scale, bench.table
    for rows in scale.rows:
        name = itl_name(rows)
        if table.wants(name):
            with table.measuring([name]):
                table.add(name, greedy_step_ms(bench, llm, rows, run))
        name = short_name(rows)
        if not bench.full and table.wants(name):
            with table.measuring([name]):
                _warm(bench, llm, rows, {})
                lengths = (scale.variant_short, scale.variant_long)
                table.add(name, step_ms(llm, rows, scale.row_prompt, lengths, [{}], rows + run))


def greedy_step_ms(bench: Bench, llm: LLM, rows: int, run: int) -> float:
    """Milliseconds of a greedy decode step of ``rows`` rows."""
    scale = bench.scale
    _warm(bench, llm, rows, {})
    return step_ms(llm, rows, scale.row_prompt, (scale.short, scale.long), [{}], rows + run)


def _warm(bench: Bench, llm: LLM, rows: int, params: dict[str, Any]) -> None:
    """Kernels that this shape needs are loaded outside of the timing."""
    prompts = random_prompts(random.Random(5), rows, bench.scale.row_prompt, llm.model_info.vocab_size)
    seconds(llm, prompts, plain(bench.scale.short // 8 or 1, **params))


def _features(bench: Bench, llm: LLM, run: int) -> None:
    scale, table = bench.scale, bench.table
    rows, lengths = scale.variant_rows, (scale.variant_short, scale.variant_long)
    base = variant_name("plain", rows)
    costs = [cost_name(feature, rows) for feature in FEATURES]
    if table.wants(base, *costs):
        with table.measuring([base, *costs]):
            _warm(bench, llm, rows, {})
            table.add(base, step_ms(llm, rows, scale.row_prompt, lengths, [{}], 7 + run))
    for feature, params in FEATURES.items():
        name, cost = variant_name(feature, rows), cost_name(feature, rows)
        if not table.wants(name, cost):
            continue
        with table.measuring([name, cost]):
            _warm(bench, llm, rows, params)
            table.add(name, step_ms(llm, rows, scale.row_prompt, lengths, [params], 7 + run))
            ours, free = table.value(name), table.value(base)
            if run == bench.runs - 1 and table.wants(cost) and ours and free:
                table.add(cost, (ours / free - 1) * 100)


def _throughput(bench: Bench, llm: LLM, run: int) -> None:
    scale, table, vocab = bench.scale, bench.table, llm.model_info.vocab_size
    rng = random.Random(run)
    if table.wants("prefill_tok_s"):
        with table.measuring(["prefill_tok_s"]):
            table.add("prefill_tok_s", prefill_rate(bench, llm, rng))
    if table.wants("ttft_ms_alone"):
        with table.measuring(["ttft_ms_alone"]):
            each = [seconds(llm, random_prompts(rng, 1, scale.alone, vocab), plain(1)) for _ in range(ALONE_REPEATS)]
            table.add("ttft_ms_alone", min(each) * 1e3)
    if table.wants("nano_tok_s"):
        with table.measuring(["nano_tok_s"]):
            table.add("nano_tok_s", nano_rate(bench, llm))


def prefill_rate(bench: Bench, llm: LLM, rng: random.Random) -> float:
    """Prompts' tokens a second, of one token asked of each."""
    (count, length), vocab = bench.scale.prefill, llm.model_info.vocab_size
    return count * length / min(seconds(llm, random_prompts(rng, count, length, vocab), plain(1)) for _ in range(2))


def nano_rate(bench: Bench, llm: LLM) -> float:
    """Output tokens a second of the nano-vllm bench."""
    scale, vocab = bench.scale, llm.model_info.vocab_size
    prompts, params = nano_workload(scale.nano, vocab, False, scale.nano_lengths)
    return sum(p.max_tokens or 0 for p in params) / seconds(llm, prompts, params)
