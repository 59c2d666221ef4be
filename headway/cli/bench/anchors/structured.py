"""Structured output: what a grammar on all rows, or on one, costs a step; and that no constrained answer is wrong.

The engine is of the shape the server serves, so the server's load without a server is measured here too.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any, Final

from headway.cli.bench.anchors import gate
from headway.cli.bench.anchors.context import Bench, plain, random_prompts, seconds, step_ms
from headway.core.errors import InvalidRequestError, RequestFailedError
from headway.core.log import logger
from headway.core.params import StructuredOutputsParams

if TYPE_CHECKING:
    from headway.api.llm import LLM

KINDS: Final = ("none", "json_all", "regex_all", "json_one")
REPEATS: Final = 2
OFFLINE_LOAD: Final = "offline_load_tok_s"
REGEX: Final = "[a-zA-Z ,.]+"
SCHEMA: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 300}
"""So many items that no answer ends before its length does: a row that leaves early would make the step look cheap."""
BEGINNING: Final = re.compile(r"\s*\[[\s,0-9-]*")
"""What every unfinished answer to SCHEMA looks like."""


def step_name(kind: str, rows: int) -> str:
    """Time per step; ``kind`` is one of KINDS."""
    return f"structured_{kind}_ms_bs{rows}"


def cost_name(kind: str, rows: int) -> str:
    """What it costs over the same rows without a grammar."""
    return f"structured_{kind}_cost_pct_bs{rows}"


def kinds_of(kind: str, rows: int) -> list[dict[str, Any]]:
    """Sampling parameters of each of ``rows`` rows."""
    free: dict[str, Any] = {"temperature": 0.8}
    json_row = {**free, "structured_outputs": StructuredOutputsParams(json=SCHEMA)}
    regex_row = {**free, "structured_outputs": StructuredOutputsParams(regex=REGEX)}
    if kind == "json_one":
        return [json_row] + [free] * (rows - 1)
    return [{"none": free, "json_all": json_row, "regex_all": regex_row}[kind]] * rows


def announce(bench: Bench) -> list[str]:
    """The figures of this module."""
    rows = bench.scale.structured_rows
    steps = [step_name(kind, n) for n in rows for kind in KINDS]
    costs = [cost_name(kind, n) for n in rows for kind in KINDS[1:]]
    bench.table.announce(steps, "ms")
    bench.table.announce(costs, "% over none")
    bench.table.announce(["structured_wrong_answers"], "requests")
    bench.table.announce([OFFLINE_LOAD], "tok/s", "higher")
    return [*steps, *costs, "structured_wrong_answers", OFFLINE_LOAD]


def measure(bench: Bench) -> str | None:
    """Measure what is wanted, with one engine; gives what the check before found wrong, or None."""
    names = announce(bench)
    if not bench.table.wants(*names):
        return None
    bench = bench.with_vocabulary(bench.scale.vocab_49k)
    kinds: list[dict[str, Any]] = [{}, {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}]
    with bench.open(run_ahead=0) as llm:
        try:
            expected = gate.answers(llm, bench, kinds)
        except InvalidRequestError:  # not served: its rows will say so, the others can be checked
            kinds = kinds[:1]
            expected = gate.answers(llm, bench, kinds)
    with bench.open() as llm:
        wrong = gate.difference(gate.answers(llm, bench, kinds), expected)
        if wrong is not None:
            return wrong
        if bench.table.wants("structured_wrong_answers"):
            with bench.table.measuring(["structured_wrong_answers"]):
                bench.table.add("structured_wrong_answers", count_wrong(bench, llm))
        for run in range(bench.runs):
            for rows in bench.scale.structured_rows:
                _steps(bench, llm, rows, run)
            if bench.table.wants(OFFLINE_LOAD):
                with bench.table.measuring([OFFLINE_LOAD]):
                    bench.table.add(OFFLINE_LOAD, offline_load(bench, llm, run))
    return None


def offline_load(bench: Bench, llm: LLM, run: int) -> float:
    """Output tokens a second of the server's load without a server."""
    count, length, output = bench.scale.load
    prompts = random_prompts(random.Random(run), count, length, llm.model_info.vocab_size)
    return count * output / seconds(llm, prompts, plain(output))


def _steps(bench: Bench, llm: LLM, rows: int, run: int) -> None:
    scale, table = bench.scale, bench.table
    lengths = (scale.variant_short, scale.variant_long)
    costs = [cost_name(kind, rows) for kind in KINDS[1:]]
    for kind in KINDS:
        name = step_name(kind, rows)
        needed = [name, *(costs if kind == "none" else [cost_name(kind, rows)])]
        if not table.wants(*needed):
            continue
        with table.measuring(needed):
            step_ms(llm, rows, scale.row_prompt, (1, 3), kinds_of(kind, rows), 3)  # compiles the grammar
            each = kinds_of(kind, rows)
            table.add(name, step_ms(llm, rows, scale.row_prompt, lengths, each, rows + run, repeats=REPEATS))
            ours, free = table.value(name), table.value(step_name("none", rows))
            if kind != "none" and run == bench.runs - 1 and ours and free:
                table.add(cost_name(kind, rows), (ours / free - 1) * 100)


def count_wrong(bench: Bench, llm: LLM) -> int:
    """Answers that are not a beginning of what was asked for, or are lost, in the largest mixed batch of the table.

    Raises:
        RequestFailedError: a request failed outright.
    """
    rows, length = max(bench.scale.structured_rows), bench.scale.variant_long
    kinds = [kinds_of(("json_all", "regex_all", "none")[i % 3], 1)[0] for i in range(rows)]
    prompts = random_prompts(random.Random(2), rows, bench.scale.row_prompt, llm.model_info.vocab_size)
    outputs = llm.generate(
        list(prompts), [plain(length, **{**kind, "detokenize": True}) for kind in kinds], use_tqdm=False
    )
    wrong = 0
    for i, output in enumerate(outputs):
        if output.error is not None:
            raise RequestFailedError(f"request {output.request_id} failed: {output.error}")
        pattern = (BEGINNING, re.compile(REGEX), re.compile(r"[\s\S]*"))[i % 3]
        answer = output.outputs[0]
        if len(answer.token_ids) != length or pattern.fullmatch(answer.text) is None:
            wrong += 1
            logger.error(
                "wrong answer %d, %d tokens, %s: %r", i, len(answer.token_ids), answer.finish_reason, answer.text
            )
    return wrong
