"""A deterministic engine without a model: token i of a completion is (last prompt token + 1 + i + seed) modulo 256.

One token per request and step. Some prompt tokens make it misbehave.
"""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.automaton import Vocabulary
from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, InvalidRequestError, OutOfMemoryError
from headway.core.messages import AddRequest, EngineStats, ModelInfo, RequestUpdate, StepUpdates, TokenLogprobsRow

ROOT = str(Path(__file__).parents[2])
"""What PYTHONPATH must hold for processes that tests start by hand."""
VOCAB = 300
EOS = 256
CRASH, EXIT, FAIL, REFUSE, EARLY_EOS = 290, 291, 292, 293, 294
"""Prompts that begin so: step raises, the process dies, the request fails, ``add`` raises, two tokens and then EOS."""


def model_info(max_model_len: int = 100_000) -> ModelInfo:
    return ModelInfo(
        model="fake",
        architecture="Fake",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_logprobs=5,
        eos_token_ids=[EOS],
        generation_defaults={"temperature": 0.5, "top_k": 7.0},
        num_kv_tokens=1000,
        notes=[],
    )


class FakeCore:
    def __init__(self, args: EngineArgs) -> None:
        self.info = model_info(args.max_model_len or 100_000)
        self.requests: dict[str, AddRequest] = {}
        self.num_generated: dict[str, int] = {}
        self.num_steps = 0
        self.is_shut_down = False

    def learn(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def add(self, request: AddRequest) -> None:
        if request.prompt_token_ids[0] == REFUSE:
            raise InvalidRequestError("refused")
        self.requests[request.request_id] = request
        self.num_generated[request.request_id] = 0

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> StepUpdates:
        self.num_steps += 1
        updates = StepUpdates()
        updates.add([self._advance(request) for request in list(self.requests.values())])
        return updates

    def _advance(self, request: AddRequest) -> RequestUpdate:
        update = RequestUpdate(request_id=request.request_id, new_token_ids=[], num_cached_tokens=3)
        number, params = self.num_generated[request.request_id], request.params
        first = request.prompt_token_ids[0]
        if first == CRASH:
            raise RuntimeError("crash asked for")
        if first == EXIT:
            os._exit(7)
        if first == FAIL:
            update.finish_reason, update.error = "error", "failure asked for"
        else:
            token = (request.prompt_token_ids[-1] + 1 + number + request.seed) % 256
            if first == EARLY_EOS and number == 2 and request.eos_token_ids:
                token = EOS
            self.num_generated[request.request_id] += 1
            update.new_token_ids = [token]
            if params.logprobs is not None:
                update.new_logprobs = [_row(token, params.logprobs, 3)]
            if params.prompt_logprobs is not None and number == 0:
                update.new_prompt_logprobs = [_row(t, params.prompt_logprobs, 2) for t in request.prompt_token_ids[1:]]
            if token in request.eos_token_ids:
                update.finish_reason = "stop"
            elif token in (params.stop_token_ids or []):
                update.finish_reason, update.stop_token_id = "stop", token
            elif number + 1 == params.max_tokens:
                update.finish_reason = "length"
        if update.finish_reason is not None:
            del self.requests[request.request_id]
        return update

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.requests), num_steps=self.num_steps)

    def shutdown(self) -> None:
        self.is_shut_down = True


def _row(token: int, others: int, rank: int) -> TokenLogprobsRow:
    ids = [token, *range(others)]
    return TokenLogprobsRow(ids, [-0.5 - i for i in range(len(ids))], rank)


def build(args: EngineArgs) -> FakeCore:
    """Factory; some models cannot be built."""
    if args.model == "wrong-config":
        raise ConfigError("that cannot be")
    if args.model == "too-big":
        raise OutOfMemoryError("does not fit")
    if args.model == "bug":
        raise KeyError("a bug")
    if args.model == "exit":
        os._exit(9)
    return FakeCore(args)
