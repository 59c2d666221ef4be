"""An engine that pools without a model: vectors tell what the engine was given. Some prompt tokens make it misbehave."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from headway.api import frontend
from headway.api.tokenizer import Tokenizer
from headway.core.automaton import Vocabulary
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats, ModelInfo, RequestUpdate, StepUpdates
from headway.core.pooling import PoolingInfo
from headway.core.task import Task
from headway.engine.client import EngineClient, InprocClient, ThreadClient
from headway.engine.process import ProcessClient

FACTORY = "tests.api.pooling_core:build"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "fail", "wrong", "hang", *(f"w{i}" for i in range(93))]
PAD, UNK, CLS, SEP, FAIL, WRONG, HANG = range(7)
WIDTH = 8
MAX_LEN = 64
ROWS = 4
"""Requests that a step finishes, the last ones added first."""
EMBED = PoolingInfo(width=WIDTH, max_length=MAX_LEN, normalize=False, score_by="vectors")
CROSS = PoolingInfo(width=1, max_length=MAX_LEN, num_token_types=2, score_by="pair", activation="sigmoid")
LABELS = PoolingInfo(width=3, max_length=MAX_LEN, labels=("bad", "fair", "good"), activation="softmax")
TOKENS = PoolingInfo(width=0, token_width=2, max_length=MAX_LEN, normalize=False, score_by="tokens")
SERVED: dict[str, tuple[tuple[Task, ...], PoolingInfo]] = {
    "embed": ((Task.EMBED,), EMBED),
    "cross": ((Task.SCORE,), CROSS),
    "labels": ((Task.CLASSIFY,), LABELS),
    "tokens": ((Task.TOKEN_EMBED,), TOKENS),
    "steps": ((Task.TOKEN_CLASSIFY,), msgspec.structs.replace(TOKENS, activation="softmax", score_by="")),
    "both": ((Task.EMBED, Task.TOKEN_EMBED), msgspec.structs.replace(EMBED, token_width=2)),
}


def vector(request: AddRequest, width: int = WIDTH) -> list[float]:
    """What the engine gives for a request: length, sum, first and last id, types, where pooling starts, 1."""
    ids = request.prompt_token_ids
    whole = [len(ids), sum(ids), ids[0], ids[-1], *request.token_type_range, request.pool_start, 1]
    return [float(number) for number in whole][-width:] if width > 1 else [float(request.token_type_range[0])]


class PoolingCore:
    def __init__(self, args: EngineArgs) -> None:
        name, _, changes = args.model.partition(" ")
        tasks, pooling = SERVED[name]
        self.pooling = msgspec.structs.replace(pooling, **(msgspec.json.decode(changes) if changes else {}))
        self.info = ModelInfo(
            model="pools",
            architecture="Pools",
            dtype="float32",
            kv_cache_dtype="float32",
            device="cpu",
            vocab_size=len(WORDS),
            max_model_len=MAX_LEN,
            max_num_seqs=ROWS,
            max_logprobs=0,
            eos_token_ids=[],
            generation_defaults={},
            num_kv_tokens=0,
            notes=[],
            tasks=tasks,
            pooling=self.pooling,
        )
        self.requests: dict[str, AddRequest] = {}
        self.seen: list[AddRequest] = []
        self.aborted: list[str] = []

    def learn(self, vocabulary: Vocabulary) -> None:
        raise AssertionError("nothing is generated")

    def add(self, request: AddRequest) -> None:
        assert request.task in self.info.tasks
        self.requests[request.request_id] = request
        self.seen.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> StepUpdates:
        updates = StepUpdates()
        ready = [r for r in self.requests.values() if HANG not in r.prompt_token_ids]
        updates.add([self._end(request) for request in ready[-ROWS:]])
        return updates

    def _end(self, request: AddRequest) -> RequestUpdate:
        del self.requests[request.request_id]
        update = RequestUpdate(request_id=request.request_id, new_token_ids=[], finish_reason="stop", queue_seconds=0.0)
        ids = request.prompt_token_ids
        if FAIL in ids:
            update.finish_reason, update.error = "error", "failure asked for"
        elif WRONG in ids:
            update.finish_reason, update.error, update.error_parameter = "error", "wrong prompt", "prompt"
        else:
            update.pooled = np.array(self._vector(request), np.float32).tobytes()
        return update

    def _vector(self, request: AddRequest) -> Any:
        if request.task in (Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY):
            return [(token, place) for place, token in enumerate(request.prompt_token_ids)]
        if self.pooling.sparse:
            found = [0.0] * len(WORDS)
            for token in request.prompt_token_ids:
                found[token] += 0.5
            return found
        return vector(request, self.pooling.width)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.requests))

    def shutdown(self) -> None:
        self.requests.clear()


def build(args: EngineArgs) -> PoolingCore:
    return PoolingCore(args)


def word_tokenizer() -> Tokenizer:
    """Whole words, framed as BERT's: [CLS] a [SEP] b [SEP]."""
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return Tokenizer(backend)


def connect(args: EngineArgs, *, own_process: bool, asynchronous: bool) -> EngineClient:
    if args.multiprocess:
        return ProcessClient(args, FACTORY)
    return ThreadClient(args, FACTORY) if asynchronous else InprocClient(args, FACTORY)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make LLM and AsyncLLM use this engine and the tokenizer of words."""
    monkeypatch.setattr(frontend, "connect", connect)
    monkeypatch.setattr(frontend, "load_tokenizer", lambda args: None if args.skip_tokenizer_init else word_tokenizer())
