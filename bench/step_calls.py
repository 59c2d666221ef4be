"""What the launching thread asks of CUDA in a decode step, for every sampling feature: waits, copies, launches.

    python bench/step_calls.py --model headway/cli/bench/anchors/models/qwen3_06b --json OUT [--rows 8] [--tokens 48]

Counted at the driver boundary by CUPTI (cupti-python); where that cannot attach, from torch.profiler's records. Three places
are told apart: ``launch`` (targets: no wait, one copy up, one copy down), ``collect`` (back-pressure: the loop waits for the
oldest step, on purpose) and ``rest`` (scheduling and applying: nothing at all). OUT is rewritten after every feature.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.syncs import recording
from headway.syncs.counting import CallCounter, Calls
from headway.syncs.driver import ASYNC_COPIES, plain
from headway.syncs.errors import ProbeError
from headway.syncs.recording import Recording
from tests.engine import test_depths
from tests.engine.tiny_grammars import LOOP, VOCABULARY, automaton

FEATURES: dict[str, dict[str, Any]] = {
    name: params for name, params in test_depths.FEATURES.items() if not {"automaton", "host_grammar"} & params.keys()
} | {"grammar": {"automaton": automaton("regex", LOOP)}}
"""The tests' features. Their grammars end after a few tokens, so one that never does stands for them."""

PLACES = ("launch", "collect", "rest")
MARK = "step_calls:"


class Counting(Protocol):
    """Gives the calls of this thread since it was last asked; ``mark`` names the part that begins now."""

    def mark(self, place: str) -> None:
        """What follows belongs to ``place``."""

    def finish(self) -> dict[str, Calls]:
        """Everything so far, by place; and start anew."""


class LiveCounting:
    """CUPTI's callbacks."""

    def __init__(self, counter: Any) -> None:
        self._counter, self._place, self._sums = counter, "rest", {place: Calls() for place in PLACES}

    def mark(self, place: str) -> None:
        calls, into = self._counter.take(), self._sums[self._place]
        into.waits += calls.waits
        into.copies += calls.copies
        into.others += calls.others
        into.graph_launches += calls.graph_launches
        into.kernel_launches += calls.kernel_launches
        self._place = place

    def finish(self) -> dict[str, Calls]:
        self.mark("rest")
        done, self._sums = self._sums, {place: Calls() for place in PLACES}
        return done


class TraceCounting:
    """torch.profiler's records, read at the end; marks are annotations among them."""

    def __init__(self) -> None:
        self._open: Any = None
        self._profile: Any = None
        self._start()

    def _start(self) -> None:
        self._profile = recording.profile(recording.activities())
        self._profile.__enter__()

    def mark(self, place: str) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = torch.profiler.record_function(MARK + place)
        self._open.__enter__()

    def finish(self) -> dict[str, Calls]:
        self.mark("rest")
        self._open.__exit__(None, None, None)
        self._open = None
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        calls = calls_in(recording.read(self._profile.profiler.kineto_results, MARK, lambda name: True))
        self._start()
        return calls


def calls_in(found: Recording) -> dict[str, Calls]:
    """CUDA calls of the annotated threads, by the annotation they lie in."""
    marks, threads = found.annotations, {event.lane for event in found.annotations}
    directions = {
        event.correlation: direction
        for event in found.work
        for direction in ("HtoD", "DtoH", "DtoD")
        if event.name.startswith("Memcpy") and direction in event.name
    }
    sums = {place: Calls() for place in PLACES}
    place, upcoming, end = "", 0, 0.0
    for event in found.calls:
        if event.lane not in threads:
            continue
        while upcoming < len(marks) and marks[upcoming].start <= event.start:
            place, upcoming = marks[upcoming].name.removeprefix(MARK), upcoming + 1
        if not place or event.start < end:  # before the first mark, or a driver call inside a runtime call
            continue
        end = event.end
        name = plain(event.name)
        sums[place].add(name, directions.get(event.correlation) if name in ASYNC_COPIES else None)
    return sums


@contextmanager
def counting() -> Iterator[tuple[str, Counting]]:
    """The better of the two, with its name."""
    with ExitStack() as stack:
        try:
            counter = stack.enter_context(CallCounter())
        except ProbeError as error:
            print(f"CUPTI: {error}; torch.profiler's records instead", flush=True)
            yield "torch.profiler", TraceCounting()
        else:
            yield "CUPTI callbacks", LiveCounting(counter)


class Watched:
    """An engine whose launches and collections are marked, and its steps told apart: decode steps, and those with prompts."""

    def __init__(self, core: EngineCore, counts: Counting) -> None:
        self.core, self._counts = core, counts
        self.num_launched = self.num_decode = 0
        runner: Any = core._runner  # noqa: SLF001 - the measurement sits inside the loop
        launch, collect = runner.launch, runner.collect

        def marked(place: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                counts.mark(place)
                try:
                    return call(*given)
                finally:
                    counts.mark("rest")

            return run

        def launch_counted(plan: Any, limit: Any = None) -> Any:
            self.num_launched += 1
            self.num_decode += plan.num_decode_rows == plan.num_rows
            return launch(plan, limit)

        runner.launch, runner.collect = marked("launch", launch_counted), marked("collect", collect)

    def decode(self, requests: list[AddRequest]) -> tuple[dict[str, Calls], int, int]:
        """Run them; the calls of the steps after the last prompt step and before the first end: steady decode.

        Returns:
            calls by place, steps launched meanwhile, back-pressure waits as the engine counts them.
        """
        core = self.core
        for request in requests:
            core.add(request)
        while core.stats().num_waiting or core.stats().num_running < len(requests):
            core.step()
        for _ in range(4):
            core.step()
        self._counts.finish()
        self.num_launched = self.num_decode = 0
        waits = core.stats().back_pressure_waits
        calls: dict[str, Calls] = {}
        while core.has_work():
            updates = core.step()
            if not calls and any(update.finish_reason for update in updates):
                calls, steps = self._counts.finish(), self.num_launched
                waits = core.stats().back_pressure_waits - waits
                if self.num_decode != steps:
                    raise RuntimeError("a step with prompts ran where only decode steps were expected")
        return calls, steps, waits


def requests_of(feature: str, rows: int, tokens: int, prompt_len: int) -> list[AddRequest]:
    """``rows`` requests with the feature ("mixed": each row another), of equal length, that end only by it."""
    rng, names = random.Random(feature), list(FEATURES)
    made = []
    for row in range(rows):
        params: dict[str, Any] = dict(FEATURES[names[row % len(names)] if feature == "mixed" else feature])
        bad_words, grammar = params.pop("bad_words_ids", []), params.pop("automaton", None)
        if "stop_token_ids" in params:
            params["min_tokens"] = tokens  # forbidden until the end, so that all rows are equally long
        params |= {"max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        made.append(
            AddRequest(
                request_id=f"{feature}-{row}",
                prompt_token_ids=[rng.randrange(90) for _ in range(prompt_len)],
                params=SamplingParams(**params),
                seed=row,
                eos_token_ids=[],
                bad_words_token_ids=bad_words,
                automaton=grammar,
            )
        )
    return made


def per_step(calls: dict[str, Calls], steps: int, waits: int) -> dict[str, Any]:
    """Averages per launched step, and what was called in all."""
    launch = calls["launch"]
    elsewhere = {place: calls[place].to_dict() for place in ("collect", "rest")}
    return {
        "steps": steps,
        "launch_waits": sum(launch.waits.values()),
        "h2d_per_step": round(launch.copies["HtoD"] / steps, 3),
        "d2h_per_step": round(launch.copies["DtoH"] / steps, 3),
        "graph_launches_per_step": round(launch.graph_launches / steps, 3),
        "kernel_launches_per_step": round(launch.kernel_launches / steps, 3),
        "rest_waits": sum(calls["rest"].waits.values()),
        "collect_waits": sum(calls["collect"].waits.values()),
        "back_pressure_waits": waits,
        "launch": launch.to_dict(),
        **elsewhere,
    }


def measure(core: EngineCore, rows: int, tokens: int, prompt_len: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Every feature, then all of them mixed; ``save`` is given all results so far after each."""
    results: dict[str, Any] = {}
    core.learn(VOCABULARY)
    with counting() as (name, counts):
        watched = Watched(core, counts)
        for feature in (*FEATURES, "mixed"):
            if feature == "max_tokens":  # requests of one token have no decode steps
                continue
            width = len(FEATURES) if feature == "mixed" else rows
            try:
                results[feature] = per_step(*watched.decode(requests_of(feature, width, tokens, prompt_len)))
            except Exception as error:  # the other features' figures are worth having
                results[feature] = {"error": f"{type(error).__name__}: {error}"[:300]}
            save({"counted_by": name, "rows": rows, "features": results})
            print(feature, {key: value for key, value in results[feature].items() if not isinstance(value, dict)})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--eager", action="store_true", help="without graphs")
    given = parser.parse_args()
    core = build_engine(
        EngineArgs(
            model=given.model,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=max(given.rows, len(FEATURES)),
            enforce_eager=given.eager,
        )
    )

    def save(results: dict[str, Any]) -> None:
        about = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "graphs": not given.eager}
        given.json.write_text(json.dumps(about | {"model": given.model} | results, indent=1) + "\n")

    measure(core, given.rows, given.tokens, 32, save)
    core.shutdown()


if __name__ == "__main__":
    main()
