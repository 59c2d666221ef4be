"""What the workloads share: sizes, the model's shape, engines that are opened once and closed for good."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headway.cli.bench.anchors.table import Table
from headway.core.errors import ConfigError, RequestFailedError
from headway.core.params import SamplingParams

if TYPE_CHECKING:
    from headway.api.llm import LLM
    from headway.models.interface import ModelSpec

MODELS: Final = Path(__file__).with_name("models")
"""Public shapes of models, one folder each with its config.json."""
WORDS: Final = 10_000
"""Random prompts use ids below this."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the workloads are. The defaults are the anchors'; lengths in tokens.

    Attributes:
        rows: batch sizes. row_prompt: their prompts. short, long: output lengths whose difference is the decode steps.
        variant_rows, variant_short, variant_long: of the feature variants.
        nano: requests of the nano-vllm bench. prefill: requests, and tokens of each. alone: prompt of the lone request.
        structured_rows: batch sizes with grammars.
        rates: per second. load: requests, tokens in, tokens out.
        texts: whose vectors are made; of long ones a quarter.
        steps: decode steps per profile.
    """

    rows: tuple[int, ...] = (1, 8, 64, 256)
    row_prompt: int = 128
    short: int = 64
    long: int = 576
    variant_rows: int = 64
    variant_short: int = 32
    variant_long: int = 288
    nano: int = 256
    nano_lengths: tuple[int, int] = (100, 1024)
    prefill: tuple[int, int] = (64, 1024)
    alone: int = 512
    structured_rows: tuple[int, ...] = (8, 64, 256)
    rates: tuple[float, ...] = (float("inf"), 100.0, 40.0)
    load: tuple[int, int, int] = (1000, 512, 256)
    texts: int = 8192
    steps: int = 100
    max_model_len: int = 4096
    max_num_seqs: int = 512
    vocab_49k: int = 49_152


TINY: Final = Scale(
    rows=(1, 2), row_prompt=8, short=4, long=8, variant_rows=2, variant_short=4, variant_long=8, nano=3,
    nano_lengths=(5, 12), prefill=(2, 16), alone=16, structured_rows=(2,), rates=(float("inf"), 500.0), load=(4, 8, 4),
    texts=8, steps=4, max_model_len=128, max_num_seqs=4, vocab_49k=300,
)  # fmt: skip
"""Small enough for a test on a CPU; its figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One model's measurement.

    Attributes:
        folder: holds config.json; weights are random. tokenizer: folder of one, for the features that need it.
        work: a temporary folder.
        engine: engine arguments that all engines share.
        full: measure features, grammars and the server too, not only the rows every model has.
    """

    table: Table
    scale: Scale
    folder: Path
    tokenizer: str
    work: Path
    runs: int
    engine: dict[str, Any]
    full: bool

    @contextmanager
    def open(self, **other: Any) -> Iterator[LLM]:
        """An engine, ready and with the garbage collector told to leave what it holds alone, as its own process does."""
        from headway import LLM

        llm = LLM(str(self.folder), **{**self.engine, "tokenizer": self.tokenizer, **other})
        gc.collect()
        gc.freeze()
        try:
            yield llm
        finally:
            llm.close()
            del llm
            free_memory()

    def with_vocabulary(self, size: int) -> Bench:
        """The same shape with a vocabulary of ``size`` and the tokenizer's end of sequence."""
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        config |= {"vocab_size": size, "eos_token_id": 0, "bos_token_id": 0}
        folder = self.work / f"{self.folder.name}_{size}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return replace(self, folder=folder)


def free_memory() -> None:
    """Give a closed engine's memory back to the card: the next engine, maybe another process's, wants it."""
    import torch

    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def find_model(name: str) -> Path:
    """The folder of a known shape, or one that has a config.json.

    Raises:
        ConfigError: neither.
    """
    for folder in (MODELS / name, Path(name)):
        if (folder / "config.json").is_file():
            return folder
    known = ", ".join(sorted(folder.name for folder in MODELS.iterdir()))
    raise ConfigError(f"{name!r} is neither one of {known} nor a folder with a config.json")


def spec_of(bench: Bench) -> ModelSpec:
    """What the shape's model is, without its weights."""
    from headway.models.load import describe
    from headway.weights import open_checkpoint

    return describe(open_checkpoint(str(bench.folder), load_format="dummy").config)


def longest_context(folder: Path, scale: Scale) -> int:
    """Most tokens of a sequence: the workloads' limit, or the model's where that is less."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return min(scale.max_model_len, int(config.get("max_position_embeddings", scale.max_model_len)))


def engine_of(folder: Path) -> dict[str, Any]:
    """Engine arguments that belong to a shape: its engine.json, if it has one. A drafter's model may be a known shape."""
    path = folder / "engine.json"
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    speculative = found.get("speculative_config", {})
    if "model" in speculative:
        speculative["model"] = str(find_model(speculative["model"]))
    return found


def random_prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """``count`` prompts of ``length`` random ids."""
    return [[rng.randrange(min(WORDS, vocab_size)) for _ in range(length)] for _ in range(count)]


def plain(num_tokens: int, **params: Any) -> SamplingParams:
    """Exactly ``num_tokens`` greedy tokens, no text, unless ``params`` say otherwise.

    A grammar ends its answer with the end-of-sequence token, so it cannot be ignored there. A pattern that can always go on
    is kept going by the least length; a schema must itself be long enough.
    """
    grammar = params.get("structured_outputs")
    length: dict[str, Any] = {"ignore_eos": True} if grammar is None else {}
    if grammar is not None and grammar.regex is not None:
        length = {"min_tokens": num_tokens}
    return SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens, "detokenize": False, **length, **params})


def seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> float:
    """Wall time of one call.

    Raises:
        RequestFailedError: a request failed or ended early: there is no figure for that.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    start = time.perf_counter()
    outputs = llm.generate(list(prompts), each, use_tqdm=False)
    elapsed = time.perf_counter() - start
    for output, wanted in zip(outputs, each):
        if output.error is not None:
            raise RequestFailedError(f"request {output.request_id} failed: {output.error}")
        if len(output.outputs[0].token_ids) != wanted.max_tokens:
            got = f"{len(output.outputs[0].token_ids)} of {wanted.max_tokens} tokens"
            raise RequestFailedError(f"request {output.request_id} ended early: {got}")
    return elapsed


def step_ms(
    llm: LLM,
    rows: int,
    prompt: int,
    lengths: tuple[int, int],
    kinds: Sequence[dict[str, Any]],
    seed: int,
    repeats: int = 1,
) -> float:
    """Milliseconds per decode step of ``rows`` rows: the difference of two output lengths, so that prefill cancels.

    Args:
        lengths: tokens generated in the shorter and in the longer call.
        kinds: sampling parameters, of row i the i-th, and so on from the first again.
        repeats: of each length so many calls are made and the shortest counts, where a percent matters: prefill varies by more.

    Raises:
        RequestFailedError: rows were preempted: what they compute again is no step.
    """
    rng, preempted = random.Random(seed), llm.stats().num_preemptions

    def spent(num_tokens: int) -> float:
        prompts = random_prompts(rng, rows, prompt, llm.model_info.vocab_size)
        return seconds(llm, prompts, [plain(num_tokens, **kinds[i % len(kinds)]) for i in range(rows)])

    short, long = lengths
    few, many = (min(spent(length) for _ in range(repeats)) for length in (short, long))
    preempted = llm.stats().num_preemptions - preempted
    if preempted:
        raise RequestFailedError(
            f"of {rows} rows some were preempted for want of memory, {preempted} times, and computed again; that is no step; "
            "measure fewer rows, or on a card with more memory"
        )
    return (many - few) / (long - short) * 1e3
