"""What structured output costs a decode step: inter-token latency of rows without, with, and among grammars.

    python bench/structured.py --vocab 49152 --json OUT.json [--rows 8 64 256] [--repeats 3] [--quick]

Dummy weights of the model's shape with a vocabulary of --vocab tokens, a synthetic vocabulary of that size (every byte, and
random words as tokens), temperature 0.8, prompts of 64 token ids. ITL is the time between two results that bring a token of
every row, 32 and 288 tokens into the answers, over the number of steps between them: no prefill, no admission, and no
difference of two runs, whose noise is that of all their prefill. The median of several runs, the cases in turn. Requests have
no end-of-sequence token and grammars that can always go on. Every answer is checked: none lost, all of the asked length,
every token a legal continuation. Exit status 1 when an answer is wrong or a cost exceeds its goal.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ops.timing import time_calls

from headway.api.structured.compile import Task, compile_task
from headway.api.structured.json_schema import SchemaBuilder
from headway.api.structured.nfa import Nfa
from headway.core.automaton import DEAD, Automaton, Vocabulary
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.runner.admission import MAX_STOP_IDS
from headway.sampling.feature import SlotEdit, ints
from headway.sampling.sampler import Sampler, sampler_tables
from headway.state.slots import SlotArena, core_tables

GOAL_ALL, GOAL_ONE = 0.10, 0.01
Cases = dict[str, list[Automaton | None]]
"""What is compared: a grammar, or none, for each row."""
EOS = 0
PATTERN = r"[a-zA-Z ,.]+"
SKIPPED, LENGTH, REPEATS = 32, 288, 3
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "score": {"type": "number"},
        "kind": {"enum": ["plain", "odd", None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
"""The schema that is measured: an array of these, which is never closed, so that outputs have a fixed length."""


def shape(folder: Path, vocab: int) -> Path:
    """A copy of the model's folder with another vocabulary."""
    copy = Path(tempfile.mkdtemp(prefix="headway-structured-")) / folder.name
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"vocab_size": vocab, "eos_token_id": EOS}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def vocabulary(size: int) -> list[bytes]:
    """Token 0 is the end; then every byte; then words of lengths as in real vocabularies, half of them after a blank."""
    rng = random.Random(0)
    letters = b'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789,.":{}[]\n\xc3\xa9'
    tokens = [b"", *(bytes([byte]) for byte in range(256))]
    while len(tokens) < size:
        length = min(30, max(2, round(rng.gauss(6, 3))))
        alphabet = letters[:26] if rng.random() < 0.7 else letters
        word = bytes(rng.choice(alphabet) for _ in range(length))
        tokens.append(b" " + word[1:] if rng.random() < 0.5 else word)
    return tokens[:size]


def compiled(pattern: str) -> Automaton:
    """The automaton of a pattern."""
    outcome = compile_task(Task("regex", pattern, bytes(range(256))))
    assert outcome.automaton is not None, outcome
    return outcome.automaton


def endless_array() -> Automaton:
    """``[`` and then any number of ITEM, each with its comma."""
    nfa = Nfa()
    builder = SchemaBuilder(nfa, ITEM)
    entry = nfa.text(0, b"[")
    exit_ = nfa.repeat(entry, lambda at: nfa.text(builder.build(at, ITEM), b", "), 0, None)
    automaton = nfa.determinise(exit_, frozenset(range(256)))
    assert automaton is not None and automaton.can_go_on
    return automaton


class Bench:
    """One engine, and answers that are checked."""

    def __init__(self, core: EngineCore, tokens: list[bytes]) -> None:
        self.core, self.tokens = core, tokens
        self.numbers = 0
        self.wrong: list[str] = []

    def step_ms(self, automata: list[Automaton | None], skipped: int, length: int) -> float:
        """Milliseconds per step of one batch, a row per entry, once every row has made ``skipped`` of ``length`` tokens.

        NaN where no two steps had all rows: prompts are let in over several steps, so the first are done before the last begin.
        """
        rng, requests = random.Random(self.numbers), {}
        for automaton in automata:
            self.numbers += 1
            params = SamplingParams(temperature=0.8, max_tokens=length, detokenize=False)
            prompt = [rng.randrange(1, min(10_000, len(self.tokens))) for _ in range(64)]
            requests[str(self.numbers)] = AddRequest(
                request_id=str(self.numbers), prompt_token_ids=prompt, params=params, seed=self.numbers,
                eos_token_ids=[], automaton=automaton,
            )  # fmt: skip
        answers: dict[str, list[int]] = {request_id: [] for request_id in requests}
        ended: dict[str, str] = {}
        for request in requests.values():
            self.core.add(request)
        made = steps = 0
        first = last = 0.0
        while self.core.has_work():
            before = made
            for update in self.core.step():
                answers[update.request_id] += update.new_token_ids
                made += len(update.new_token_ids)
                if update.finish_reason is not None:
                    ended[update.request_id] = update.error or update.finish_reason
            if made - before == len(requests) and made >= skipped * len(requests):
                last = time.perf_counter()
                first, steps = (first, steps + 1) if first else (last, 0)
        for request_id, request in requests.items():
            self._check(request, answers[request_id], ended.get(request_id), length)
        return (last - first) / steps * 1e3 if steps else math.nan

    def _check(self, request: AddRequest, token_ids: list[int], ended: str | None, length: int) -> None:
        automaton = request.automaton
        text = b"".join(self.tokens[token] for token in token_ids)
        if ended != "length" or len(token_ids) != length:
            self.wrong.append(f"request {request.request_id} ended with {ended} after {len(token_ids)} tokens")
        elif automaton is not None and automaton.walk(automaton.start, text) == DEAD:
            self.wrong.append(f"request {request.request_id} wrote {text[:80]!r}")

    def itl_ms(self, cases: Cases, skipped: int, length: int, repeats: int) -> dict[str, float]:
        """Milliseconds per decode step of each case: the median, the cases in turn."""
        for automata in cases.values():
            self.step_ms(automata, 1, 8)
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(repeats):
            for name, automata in cases.items():
                found[name].append(self.step_ms(automata, skipped, length))
        return {name: statistics.median(values) for name, values in found.items()}


def mask_us(
    tokens: list[bytes],
    automaton: Automaton,
    before: bytes,
    rows: int,
    constrained: int,
    kept: bool,
    device: torch.device,
) -> float:
    """Microseconds of ``grammar_mask`` alone on bfloat16 logits; some rows have it, in the state after ``before``.

    ``kept``: the slots have the mask of that state from the call before. Else what they keep is cleared in between, which
    is part of the time: some 2 us.
    """
    vocab = len(tokens)
    arena = SlotArena([*core_tables(64, 4, MAX_STOP_IDS), *sampler_tables(vocab)], rows, device)
    grammar = Sampler(arena, vocab).grammar
    grammar.vocabulary.view(-1).copy_(torch.from_numpy(grammar.learn(Vocabulary.of(tokens))))
    request = AddRequest(
        request_id="", prompt_token_ids=[1], params=SamplingParams(), seed=0, eos_token_ids=[], automaton=automaton
    )
    edits = [*grammar.stage(request), SlotEdit("grammar_state", ints(automaton.walk(automaton.start, before)))]
    for slot in range(constrained):
        for table, values in edits:
            place = arena.position(table, slot)
            arena.ints[place : place + len(values)] = torch.from_numpy(values).to(device)
    logits = torch.randn(rows, vocab, device=device).to(torch.bfloat16)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    records = arena.view("grammar_kept")

    def mask() -> None:
        if not kept:
            records.zero_()
        grammar.apply(logits, slots)

    if device.type != "cuda":
        start = time.perf_counter()
        mask()
        return (time.perf_counter() - start) * 1e6
    mask()  # kept now
    return time_calls([mask])


def mask_table(
    tokens: list[bytes], schema: Automaton, pattern: Automaton, options: argparse.Namespace
) -> dict[str, float]:
    """Times of the mask where most tokens die at once, where most live, in the pattern, and of one row in a string: in a state
    that is new, and in one that was the row's before."""
    device = torch.device("cuda" if options.device == "auto" else options.device)
    found: dict[str, float] = {}
    names = ("structure", "string", "pattern", "one")
    print(f"{'rows':>5} " + " ".join(f"{name:>17}" for name in names) + "   grammar_mask, us: state new, state kept")
    for rows in options.rows:
        in_string = (schema, b'[{"name": "')
        states = ((schema, b"[", rows), (*in_string, rows), (pattern, b"a", rows), (*in_string, 1))
        cells = []
        for name, (automaton, before, constrained) in zip(names, states, strict=True):
            new, same = (mask_us(tokens, automaton, before, rows, constrained, kept, device) for kept in (False, True))
            found |= {f"{name}_{rows}": new, f"{name}_{rows}_kept": same}
            cells.append(f"{new:9.1f} {same:7.1f}")
        print(f"{rows:5} " + " ".join(cells), flush=True)
    return found


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("headway/cli/bench/anchors/models/qwen3_06b"))
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="runs of each case")
    parser.add_argument("--quick", action="store_true", help="one repeat, short outputs")
    options = parser.parse_args()
    args = EngineArgs(
        model=str(shape(options.model, options.vocab)), load_format="dummy", device=options.device,
        max_model_len=1024, max_num_seqs=max(options.rows), enable_prefix_caching=False, skip_tokenizer_init=True,
        dtype="float32" if options.device == "cpu" else "bfloat16",
    )  # fmt: skip
    start = time.perf_counter()
    core = build_engine(args, progress=False)
    report: dict[str, Any] = {"vocab": options.vocab, "startup_s": time.perf_counter() - start}
    tokens = vocabulary(options.vocab)
    core.learn(Vocabulary.of(tokens))
    bench, pattern, schema = Bench(core, tokens), compiled(PATTERN), endless_array()
    skipped, length, repeats = (16, 48, 1) if options.quick else (SKIPPED, LENGTH, options.repeats)
    print(f"start-up {report['startup_s']:.1f} s; states x classes: pattern {size(pattern)}, schema {size(schema)}")
    print(f"{'rows':>5} {'none':>9} {'schema':>17} {'pattern':>17} {'one schema':>17}   ITL ms")
    slow = []
    for rows in options.rows:
        cases: Cases = {
            "none": [None] * rows, "schema": [schema] * rows, "pattern": [pattern] * rows,
            "one_schema": [schema, *[None] * (rows - 1)],
        }  # fmt: skip
        found = bench.itl_ms(cases, skipped, length, repeats)
        cost = {name: value / found["none"] - 1 for name, value in found.items()}
        report[f"rows_{rows}"] = {"itl_ms": found, "cost": cost}
        cells = [f"{found[name]:9.3f} {cost[name]:+7.1%}" for name in ("schema", "pattern", "one_schema")]
        print(f"{rows:5} {found['none']:9.3f} {' '.join(cells)}", flush=True)
        goals = {"schema": GOAL_ALL, "pattern": GOAL_ALL, "one_schema": GOAL_ONE}
        slow += [f"{name} at {rows} rows: {cost[name]:+.1%}" for name, goal in goals.items() if cost[name] > goal]
    core.shutdown()
    report["mask_us"] = mask_table(tokens, schema, pattern, options)
    report |= {"wrong": bench.wrong, "over_goal": slow}
    print(f"answers checked: {bench.numbers}, wrong: {len(bench.wrong)}; over goal: {'; '.join(slow) or 'none'}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return int(bool(bench.wrong or slow))


def size(automaton: Automaton) -> str:
    """States and classes."""
    return f"{automaton.num_states} x {automaton.num_classes}"


if __name__ == "__main__":
    sys.exit(main())
