"""Options of the engine drawn together, on any tiny model: answers are those of the plainest engine, or a refusal says why."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, OutOfMemoryError, UnsupportedModelError
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.parallel.group import RankError
from tests.engine.harness import Answer, request, run
from tests.engine.test_depths import FEATURES, close
from tests.engine.tiny_grammars import VOCABULARY
from tests.kernels.gguf_blocks import KINDS
from tests.models.test_quantized_weights import gguf
from tests.models.tiny import TINY, hf_model, save
from tests.models.walk import decoders, known, oracle
from tests.models.walk.draw import draw
from tests.recurrent import tiny_hybrids

PLAIN: dict[str, Any] = {"run_ahead": 0, "max_num_seqs": 8, "enable_prefix_caching": False}
TOLERANCE = 1e-3
"""Of log-probabilities: ranks add in another order, and those of unlikely tokens are large."""


def model_of(rng: random.Random, folder: Path) -> Path:
    """A model of transformers' with random weights, a recurrent or hybrid one, or a GGUF file; kept in ``folder``."""
    kind = rng.choice(["decoder", "decoder", "hybrid", "gguf", "drawn", "drawn"])
    if kind == "drawn":
        return drawn_model(rng, folder)
    if kind == "hybrid":
        return tiny_hybrids.folder_of(rng.choice(list(tiny_hybrids.HYBRIDS)))
    if kind == "decoder":
        name = rng.choice(list(TINY))
        if not (folder / name).exists():
            save(hf_model(TINY[name]), folder / name)
        return folder / name
    most, some, tied = rng.choice(KINDS), rng.choice(KINDS), rng.random() < 0.5
    place = folder / f"{most}-{some}-{tied}"
    if not place.exists():
        place.mkdir()
        gguf(place, {"attn_q": some, "ffn_down": some}, other=most, tied=tied)
    return place / "m.gguf"


def drawn_model(rng: random.Random, folder: Path) -> Path:
    """One of ``tests/models/walk``, of any family of decoders.

    Raises:
        oracle.CannotRunError: transformers cannot make it.
    """
    group = rng.choice(["decoders", "mixtures", "latents", "hybrids"])
    architecture = rng.choice(decoders.architectures(group))
    config_class, seed = decoders.config_class_of(architecture), rng.randrange(10**6)
    fields = draw(config_class, rng, vocab_size=97)
    fields |= {name: 128 for name in ("max_position_embeddings", "n_positions", "max_seq_len") if name in fields}
    if reason := known.reason(architecture, fields):
        raise oracle.CannotRunError(reason)
    place = folder / f"{architecture}-{seed}"
    model = oracle.build(getattr(transformers, architecture), config_class, fields, seed)
    oracle.run(model, [3, 5, 7, 11])
    decoders.save(model, place)
    return place


def options_of(rng: random.Random) -> dict[str, Any]:
    """Settings that must not change an answer."""
    seqs = rng.choice([1, 2, 3, 5, 8])
    found: dict[str, Any] = {"max_num_seqs": seqs}

    def may(chance: float, **values: list[Any]) -> None:
        for name, choices in values.items():
            if rng.random() < chance:
                found[name] = rng.choice(choices)

    may(0.8, run_ahead=[0, 1, 2, 4], max_num_batched_tokens=[6 * seqs + more for more in (0, 1, 7, 30)])
    may(0.5, block_size=[8, 16, 32])
    may(0.3, enable_prefix_caching=[False], kv_cache_memory_bytes=[2**18, 2**19], quantization=["none", "auto"])
    may(0.2, enforce_eager=[True], enable_dbo=[True], replayssm_buffer_len=[2, 4, 7])
    may(0.25, tensor_parallel_size=[2], pipeline_parallel_size=[2])
    if rng.random() < 0.4:
        found["speculative_config"] = {
            "method": rng.choice(["ngram", "suffix"]),
            "num_speculative_tokens": rng.choice([1, 2, 3, 5]),
        }
    if "enable_dbo" in found:
        found |= {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
    if "tensor_parallel_size" in found or "pipeline_parallel_size" in found:
        found |= {"distributed_executor_backend": "threads", "distributed_timeout_seconds": 120}
    return found


def requests_of(rng: random.Random) -> list[AddRequest]:
    """A few requests, each with a feature; some prompts repeat themselves, so that drafters find something."""
    made = []
    for number in range(rng.choice([2, 4, 6])):
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 30))]
        if period := rng.choice([0, 3, 5]):
            prompt = (prompt[:period] * len(prompt))[: len(prompt)]
        made.append(request(f"r{number}", prompt, seed=number, **dict(rng.choice(list(FEATURES.values())))))
    return made


@contextmanager
def engine(model: Path, options: dict[str, Any]) -> Iterator[EngineCore]:
    always: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 2**21}
    core = build_engine(EngineArgs(model=str(model), skip_tokenizer_init=True, **(always | options)), progress=False)
    core.learn(VOCABULARY)
    try:
        yield core
        core.check_integrity()
    finally:
        core.shutdown()


def play(seed: int, folder: Path) -> str:
    """Draw and compare. Returns "equal", or why the options were refused; raises AssertionError for another answer."""
    rng = random.Random(seed)
    try:
        return _played(rng, folder)
    except oracle.CannotRunError as error:
        return str(error)


def _played(rng: random.Random, folder: Path) -> str:
    model, options, state = model_of(rng, folder), options_of(rng), rng.getstate()
    try:
        with engine(model, PLAIN) as core:
            wanted = run(core, requests_of(rng))
        rng.setstate(state)  # the same requests again: engines keep theirs
        with engine(model, options) as core:
            found: dict[str, Answer] = run(core, requests_of(rng))
    except (ConfigError, UnsupportedModelError, OutOfMemoryError) as refusal:
        return str(refusal)
    except RankError as error:  # of whichever rank refused first
        if "UnsupportedModelError" in str(error) or "ConfigError" in str(error):
            return str(error)
        raise
    assert found.keys() == wanted.keys()
    for name, answer in found.items():
        close(answer, wanted[name], tolerance=TOLERANCE)
    return "equal"
