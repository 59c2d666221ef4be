"""Requests as the door makes them, and a loop that runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.core.messages import AddRequest, RequestUpdate
from headway.core.params import SamplingParams
from headway.engine.core import EngineCore
from tests.engine.tiny_llama import EOS

MakeEngine = Callable[..., EngineCore]


class Answer:
    """All that an engine said about one request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[tuple[list[int], list[float], int]] = []
        self.prompt_logprobs: list[tuple[list[int], list[float], int]] = []
        self.finish_reason: str | None = None
        self.stop_token_id: int | None = None
        self.num_cached_tokens = 0
        self.aligned: list[int] | None = None
        self.error: str | None = None
        self.error_parameter: str | None = None

    def take(self, update: RequestUpdate) -> None:
        assert self.finish_reason is None, "an update after the end"
        self.token_ids += update.new_token_ids
        for row in update.new_logprobs or []:
            self.logprobs.append((row.token_ids, row.logprobs, row.rank))
        for row in update.new_prompt_logprobs or []:
            self.prompt_logprobs.append((row.token_ids, row.logprobs, row.rank))
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        self.aligned = update.aligned if self.aligned is None else self.aligned
        self.finish_reason, self.stop_token_id = update.finish_reason, update.stop_token_id
        self.error, self.error_parameter = update.error, update.error_parameter


def request(request_id: str, prompt: list[int], seed: int = 0, **params: Any) -> AddRequest:
    """A request as the door would make it. ``bad_words_ids`` are token sequences; ``automaton``, ``host_grammar`` grammars."""
    bad_words = params.pop("bad_words_ids", [])
    automaton, host_grammar = params.pop("automaton", None), params.pop("host_grammar", None)
    eos = [] if params.get("ignore_eos") else EOS
    params.setdefault("max_tokens", 12)
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(detokenize=False, **params),
        seed=seed,
        eos_token_ids=eos,
        bad_words_token_ids=bad_words,
        automaton=automaton,
        host_grammar=host_grammar,
    )


def drain(core: EngineCore) -> dict[str, Answer]:
    """Step until idle; a loop that stops making progress fails."""
    answers: dict[str, Answer] = {}
    idle = 0
    while core.has_work():
        updates = core.step()
        idle = 0 if updates else idle + 1
        assert idle < 1000, "the engine turns without progress"
        for update in updates:
            answers.setdefault(update.request_id, Answer()).take(update)
    return answers


def run(core: EngineCore, requests: list[AddRequest]) -> dict[str, Answer]:
    """Add all requests at once and run them to their ends."""
    for each in requests:
        core.add(each)
    return drain(core)
