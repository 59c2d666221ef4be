"""One tiny model of each kind that an engine treats in a way of its own, with requests that use every sampling feature."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headway.core.chunks import ring_places
from headway.core.config import EngineArgs
from headway.core.errors import HeadwayError
from headway.core.log import logger
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.engine.states import WRITE_BACK
from headway.models import registry
from headway.models.interface import ModelSpec
from headway.multimodal.items import find_runs
from headway.state.cache_pool import StateStorage, bytes_per_block
from tests.attention import kinds as attention
from tests.engine import oracle
from tests.engine import test_mixtures as mixtures
from tests.engine import tiny_encoder_decoders as hearing
from tests.engine.harness import request, run
from tests.engine.oracle import Reals, Tally
from tests.engine.test_depths import FEATURES, close
from tests.engine.tiny_grammars import TOKENS, VOCABULARY
from tests.engine.tiny_llama import save_tiny_llama
from tests.latent import tiny_latents as latents
from tests.models.tiny import TINY
from tests.models.tiny import hf_model as hf_tiny
from tests.multimodal import tiny_sight as sight
from tests.recurrent import tiny_hybrids as hybrids
from tests.sim.harness import simulated

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
CHECKPOINTS = 2
SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "headway.scheduler.cache.state.LEAST_BLOCKS": 1, "headway.engine.sizes.CHECKPOINTS_PER_SLOT": CHECKPOINTS / 6,
        "headway.engine.sizes.CHECKPOINT_SHARE": 1.0, "headway.core.latents.SHORT_ROW": 4,
        "headway.core.latents.SMALL_STEP": 4, "headway.attention.mla.PIECE_BYTES": 0,
    }
)  # fmt: skip
"""Sizes beyond which something is done another way, so small that these texts go beyond them."""
STEM = 24
"""Tokens that many prompts begin with."""
Logits = Callable[[list[int]], Reals]


MOST_TOKENS = 9
"""That an answer has here: enough to be preempted, and for each feature to matter."""


def prompts(most: int, vocab: int = 97, seed: int = 7) -> list[list[int]]:
    """One for each feature, of up to ``most`` tokens. Every third begins like the others of its kind."""
    rng = random.Random(seed)
    stem = [rng.randrange(6, vocab) for _ in range(STEM)]
    found = []
    for number in range(len(FEATURES)):
        length = rng.randrange(1, most)
        begin = stem[: length * 2 // 3] if number % 3 else []
        found.append(begin + [rng.randrange(vocab) for _ in range(length - len(begin))])
    return found


def within(params: Mapping[str, Any], vocab: int = 97) -> dict[str, Any]:
    """The feature, without tokens that the model does not have, in a short answer."""
    found = dict(params) | {"max_tokens": min(params.get("max_tokens", 99), MOST_TOKENS)}
    found["min_tokens"] = min(params.get("min_tokens", 0), MOST_TOKENS - 3)
    for name in ("allowed_token_ids", "logprob_token_ids"):
        if name in found:
            found[name] = [token for token in found[name] if token < vocab]
    return found


def texts(info: Any) -> list[AddRequest]:
    """A prompt for each feature."""
    asked = zip(FEATURES.items(), prompts(40), strict=True)
    return [request(name, prompt, seed=n, **within(params)) for n, ((name, params), prompt) in enumerate(asked)]


def pictures(info: Any) -> list[AddRequest]:
    """The same with a picture amid every other prompt, and two in some. No answer may have a token that stands for one."""
    found = []
    for n, (name, params) in enumerate(FEATURES.items()):
        prompt = prompts(40)[n]
        at, shown = len(prompt) // 2, [sight.picture("gemma3", n % 3), 98] * (n % 2 + (n % 8 == 3))
        ids, items = sight.prompt_of(info.vision, [*prompt[:at], *shown, *prompt[at:]])
        bias = {sight.TOKEN: -100.0, **params.get("logit_bias", {})}
        found.append(request(name, ids, seed=n, **(within(params) | {"logit_bias": bias})))
        by_key().update(zip([item.key for item in items], shown[::2], strict=True))
        found[-1].media, found[-1].runs = items, find_runs(info.vision, ids, items)
    return found


def recordings(info: Any) -> list[AddRequest]:
    """The same for what has been said of a few recordings."""
    vocab = hearing.VOCAB
    asked = zip(FEATURES.items(), prompts(16, vocab), strict=True)
    found = []
    for n, ((name, params), prompt) in enumerate(asked):
        found.append(request(name, [hearing.START, *prompt], seed=n, **within(params, vocab)))
        found[-1].media = [hearing.recording(n % 4)]
    return found


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        what: in words, for the docs.
        folder: of a checkpoint.
        oracle: transformers' model of it.
        requests: by what the engine says of the model.
        logits: oracle, request, tokens -> float [n, V].
        depth: steps that the engine runs ahead.
        blocks: that all requests share; so few that some are preempted.
        changes: of the engine's arguments.
    """

    what: str
    folder: Callable[[], Path | str]
    oracle: Callable[[], Any]
    depth: int
    blocks: int = 13
    changes: Mapping[str, Any] = field(default_factory=dict)
    requests: Callable[[Any], list[AddRequest]] = texts
    logits: Callable[[Any, AddRequest, list[int]], torch.Tensor] = lambda model, _, tokens: model(
        torch.tensor([tokens]), use_cache=False
    ).logits[0]

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Of an engine in which prompts come in chunks, wait for slots, and hit what others have left."""
        sizes: dict[str, Any] = {
            "model": str(self.folder()), "dtype": "float32", "max_model_len": 64, "max_num_seqs": 6, "block_size": 8,
            "max_num_batched_tokens": 40, "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True,
        }  # fmt: skip
        return sizes | dict(self.changes) | changes

    def bytes(self, spec: ModelSpec) -> int:
        """Of ``blocks``, and of the states of all slots and two checkpoints."""
        layout = spec.cache
        slots = self.arguments()["max_num_seqs"]
        if layout.has_states:
            number = self.changes.get("speculative_config", {}).get("num_speculative_tokens", 0)
            places = ring_places(WRITE_BACK, number + 1) if number else 0
            kept = StateStorage(
                slots + CHECKPOINTS, torch.float32, checkpoints=CHECKPOINTS, drafts=number, replays=places
            )
        own = kept.bytes(layout) if layout.has_states else 0
        return own + self.blocks * bytes_per_block(layout, 8, torch.float32)

    def plain(self, **changes: Any) -> EngineCore:
        """The engine on the CPU that does one step after the other, drafts nothing and has room for all."""
        usual: dict[str, Any] = {
            "device": "cpu", "run_ahead": 0, "enable_prefix_caching": False, "kv_cache_memory_bytes": 2**24,
            "speculative_config": None, "max_num_batched_tokens": 256,
        }  # fmt: skip
        core = build_engine(EngineArgs(**self.arguments(**usual | changes)), progress=False)
        core.learn(VOCABULARY)
        return core

    def logits_of(self, asked: AddRequest) -> Logits:
        """transformers', of the request's tokens and more behind them."""

        def logits(tokens: list[int]) -> Reals:
            with torch.no_grad():
                found: Reals = self.logits(self.oracle(), asked, tokens).double().numpy()
            return found

        return logits


@cache
def by_key() -> dict[bytes, Any]:
    """The pictures that ``pictures`` shows, by the keys of their items."""
    return {}


def _seen(model: Any, asked: AddRequest, tokens: list[int]) -> torch.Tensor:
    """Of Gemma 3, which is given the request's pictures."""
    one, prompt = sight.sighted("gemma3"), len(asked.prompt_token_ids)
    shown = [by_key()[item.key] for item in asked.media]
    scaled = [torch.from_numpy((each * sight.SCALE + sight.SHIFT).astype(np.float32)) for each in shown]
    given = {"pixel_values": torch.cat(scaled).permute(0, 3, 1, 2)} if scaled else {}
    return sight.hf_logits(one, tokens, prompt, given)


def _heard(model: Any, asked: AddRequest, tokens: list[int]) -> torch.Tensor:
    """Of Whisper, which is given the request's recording."""
    [item] = asked.media
    mel = torch.from_numpy(np.frombuffer(item.data, np.float32).reshape(1, hearing.MELS, -1).copy())
    found: torch.Tensor = model(input_features=mel, decoder_input_ids=torch.tensor([tokens])).logits[0]
    return found


def _latent(name: str, what: str, depth: int, blocks: int, **changes: Any) -> Kind:
    oracle_of = cache(lambda: latents.hf_model(latents.LATENTS[name]))
    return Kind(what, lambda: latents.folder_of(name), oracle_of, depth, blocks, changes)


def _mixture(name: str, what: str, depth: int, blocks: int, **changes: Any) -> Kind:
    return Kind(what, lambda: mixtures.folder_of(name), cache(lambda: hf_tiny(TINY[name])), depth, blocks, changes)


def _attending(name: str, what: str, depth: int, blocks: int, **changes: Any) -> Kind:
    return Kind(what, lambda: attention.folder_of(name), lambda: attention.oracle(name), depth, blocks, changes)


def _hybrid(name: str, what: str, depth: int, blocks: int, **changes: Any) -> Kind:
    oracle_of = cache(lambda: hybrids.hf_model(hybrids.HYBRIDS[name]))
    return Kind(what, lambda: hybrids.folder_of(name), oracle_of, depth, blocks, changes)


_whisper = cache(hearing.whisper)
_whisper_folder = cache(lambda: hearing.save(_whisper(), Path(mkdtemp(prefix="headway-whisper-"))))
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "latents": _latent("v2-lite", "latents (DeepSeek V2)", 2, 13),
        "indexer": _latent("v3.2", "latents and an indexer (DeepSeek V3.2)", 4, 13, enforce_eager=True),
        "mixture": _mixture("qwen3-moe", "mixture of experts (Qwen3-MoE)", 2, 13, speculative_config=NGRAM),
        "sinks": _mixture("gpt-oss", "sinks, windows and a mixture (gpt-oss)", 3, 26),
        "chunks": _mixture("llama4", "chunked attention and a mixture (Llama 4)", 2, 36),
        "flex": _attending("flex", "rules of the model's own (Flex)", 2, 13, enforce_eager=True),
        "states alone": _hybrid("mamba2", "states alone (Mamba-2)", 3, 1, max_num_seqs=3),
        "state beside keys": _hybrid("falcon-h1", "Mamba-2 beside attention (Falcon-H1)", 2, 13),
        "delta rule": _hybrid("qwen3-next", "gated delta net (Qwen3-Next)", 4, 13),
        "fast prefill": _attending("gemma3n", "shared keys, fast prefill (Gemma 3n)", 2, 28),
        "fast prefill, drafts": _attending(
            "gemma4", "shared keys, fast prefill (Gemma 4)", 4, 13, speculative_config=NGRAM, enforce_eager=True
        ),
        "sight": Kind(
            "sight (Gemma 3)", lambda: sight.sighted("gemma3").folder, lambda: sight.sighted("gemma3").model, 2, 27,
            {"max_model_len": 104, "max_num_batched_tokens": 28}, pictures, _seen,
        ),
        "hearing": Kind(
            "encoder and decoder (Whisper)", _whisper_folder, _whisper, 3, 17, {"max_model_len": 48}, recordings, _heard
        ),
    }
)  # fmt: skip


@contextmanager
def known() -> Iterator[None]:
    """The architecture whose rules are a test's own is registered."""
    own = {"KindsForCausalLM": "tests.attention.kinds:KindsForCausalLM"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "ARCHITECTURES", MappingProxyType(dict(registry.ARCHITECTURES) | own))
        yield


@dataclass
class Seen:
    """What an engine did with a kind's requests.

    Attributes:
        judged: tokens that the oracle has judged, and close calls among them.
        told: what the log said of requests that turn something off.
    """

    steps: int
    graph_steps: int
    preemptions: int
    hits: int
    accepted: int
    judged: Tally
    told: list[str]


def check(kind: Kind, tolerance: float = 1e-3) -> Seen:
    """All features in one batch: raises AssertionError unless the engine that runs ahead answers as the plain one does, and
    as the features' definitions and transformers' logits say.

    Args:
        tolerance: of log-probabilities; models with states differ as much by how their texts are cut.
    """
    with pytest.MonkeyPatch.context() as patch, _log() as told:
        for name, value in SMALL.items():
            patch.setattr(name, value)
        patch.setattr(oracle, "ROUNDING", tolerance)
        core = kind.plain()
        asked = kind.requests(core.info)
        again = next(each for each in asked if each.request_id == "prompt_logprobs")  # its prompt is cached by then
        asked.append(msgspec.structs.replace(again, request_id="prompt_logprobs again"))
        wanted = run(core, asked)
        core.shutdown()
        told.clear()
        memory = kind.bytes(core._runner.executor.body.model.spec)
        with simulated(17, **kind.arguments(run_ahead=kind.depth, kv_cache_memory_bytes=memory)) as (core, _, watch):
            answers = run(core, asked)
            stats = core.stats()
        assert watch.num_steps == stats.num_steps > 0
        total = Tally()
        for each in asked:
            answer = answers[each.request_id]
            try:
                close(answer, wanted[each.request_id], tolerance)
            except AssertionError as error:
                error.add_note(each.request_id)
                raise
            if each.host_grammar is None:
                tally = oracle.SamplingOracle(kind.logits_of(each), TOKENS).judge(each, answer, each.automaton)
                total = Tally(total.tokens + tally.tokens, total.close_calls + tally.close_calls)
        counts = stats.num_preemptions, stats.prefix_cache_hits, stats.num_accepted_tokens
        return Seen(stats.num_steps, stats.num_graph_steps, *counts, total, sorted(told))


@contextmanager
def _log() -> Iterator[set[str]]:
    """Warnings of requests."""
    told: set[str] = set()

    def note(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and "request" in str(record.msg):
            told.add(record.getMessage())
        return True

    logger.addFilter(note)
    yield told
    logger.removeFilter(note)


# -- what there is besides sampling -----------------------------------------------------------------------------------


@cache
def _draft_model() -> str:
    folder = Path(mkdtemp(prefix="headway-draft-"))
    save_tiny_llama(folder)
    return str(folder)


def options() -> dict[str, dict[str, Any]]:
    """Arguments of an engine that some kinds refuse."""
    guess = {"method": "draft_model", "model": _draft_model(), "num_speculative_tokens": 2}
    return {
        "drafts by n-grams": {"speculative_config": NGRAM},
        "a draft model": {"speculative_config": guess},
        "8-bit keys and values": {"kv_cache_dtype": "fp8"},
        "halved steps": {"enable_dbo": True},
        "stages": {"pipeline_parallel_size": 2, "distributed_executor_backend": "threads"},
        "pooling": {"runner": "pooling"},
    }


def refusals(kind: Kind) -> dict[str, str | None]:
    """What each of ``options`` is refused with; None: it is not."""
    found: dict[str, str | None] = {}
    for name, changes in options().items():
        try:
            core = kind.plain(**changes)
        except HeadwayError as error:
            found[name] = str(error)
        else:
            if name.startswith("8-bit"):
                kept = {part.dtype for layer in core._runner.executor.body.caches.layers for part in layer}
                assert torch.float8_e4m3fn in kept, "the keys are not kept in 8 bits, and nobody was told"
            core.shutdown()
            found[name] = None
    return found
