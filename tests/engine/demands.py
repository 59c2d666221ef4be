"""Random requests of every kind of sampling, the limits of each parameter included, for ``tests.engine.oracle``."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

from headway.core.messages import AddRequest
from tests.engine.harness import request
from tests.engine.tiny_grammars import automaton, host_grammar
from tests.engine.tiny_llama import EOS, VOCAB

Draw = Callable[[random.Random], Any]
CHOICES = ["".join(letters).encode() for length in (1, 2, 3) for letters in product("abc", repeat=length)]
PATTERN, LARK = "[abc]{1,3}", "start: /[abc]{1,3}/"
"""Nowhere is there only one way to go on: where there is, the host's matcher may insist on one spelling of it."""
_EVERY_OTHER = [token for token in range(0, VOCAB, 2) if token not in EOS]

KINDS: dict[str, Draw] = {
    "greedy": lambda rng: {"temperature": rng.choice([0.0, 9e-6])},
    "temperature": lambda rng: {"temperature": rng.choice([2e-5, 0.05, 0.3, 1.0, 2.0, 5.0, 50.0, 100.0])},
    "top_k": lambda rng: {"top_k": rng.choice([1, 1, 2, 7, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1])},
    "top_p": lambda rng: {"top_p": rng.choice([1e-9, 1e-6, 0.2, 0.5, 0.9, 0.9999])},
    "min_p": lambda rng: {"min_p": rng.choice([1.0, 0.9999, 0.5, 0.1, 1e-3, 1e-9])},
    "filters": lambda rng: {"top_k": rng.randrange(2, 40), "top_p": rng.uniform(0.3, 1.0), "min_p": rng.uniform(0.0, 0.1)},
    "presence": lambda rng: {"presence_penalty": rng.choice([-2.0, -1.1, 0.4, 2.0])},
    "frequency": lambda rng: {"frequency_penalty": rng.choice([-2.0, -0.7, 0.3, 2.0])},
    "repetition": lambda rng: {"repetition_penalty": rng.choice([0.2, 0.7, 1.3, 3.0])},
    "penalties": lambda rng: {
        "presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2), "repetition_penalty": 1.4
    },
    "bias": lambda rng: {"logit_bias": {rng.randrange(VOCAB): rng.choice([-100.0, -3.0, 0.5, 4.0, 100.0]) for _ in range(6)}},
    "allowed": lambda rng: {"allowed_token_ids": rng.sample(range(6, VOCAB), rng.choice([1, 2, 9, 60]))},
    "bad_word": lambda rng: {"bad_words_ids": [[rng.randrange(6, VOCAB)] for _ in range(5)]},
    "stops": lambda rng: {"stop_token_ids": rng.sample(range(VOCAB), rng.choice([1, 12, 64]))},
    "min_tokens": lambda rng: {"min_tokens": rng.choice([1, 2, 5]), "stop_token_ids": rng.sample(_EVERY_OTHER, 40)},
    "min_is_max": lambda rng: {"min_tokens": 6, "max_tokens": 6, "stop_token_ids": _EVERY_OTHER},
    "one_token": lambda rng: {"max_tokens": 1},
    "ignore_eos": lambda rng: {"ignore_eos": True, "max_tokens": 20, "logit_bias": {3: 6.0, 5: 6.0}},
    "logprobs": lambda rng: {"logprobs": rng.choice([0, 1, 5, 6, 20])},
    "prompt_logprobs": lambda rng: {"prompt_logprobs": rng.choice([0, 1, 4, 20])},
    "chosen": lambda rng: {"logprob_token_ids": rng.sample(range(VOCAB), rng.choice([1, 3, 30]))},
    "chosen_and_prompt": lambda rng: {"logprob_token_ids": rng.sample(range(VOCAB), 4), "prompt_logprobs": rng.choice([1, 3])},
    "both_logprobs": lambda rng: {"logprobs": rng.choice([1, 7]), "prompt_logprobs": 2},
}  # fmt: skip
GRAMMARS: dict[str, Draw] = {
    "automaton": lambda rng: {"automaton": automaton("regex", PATTERN)},
    "host": lambda rng: {"host_grammar": host_grammar("grammar", LARK)},
}
_WITH_GRAMMAR = (
    "greedy",
    "temperature",
    "top_k",
    "presence",
    "bias",
    "logprobs",
    "prompt_logprobs",
    "chosen",
    "repetition",
)
"""What may stand beside a grammar of a few texts without leaving nothing to draw."""


def alone(rng: random.Random) -> list[AddRequest]:
    """Each kind by itself, greedy and hot, and each grammar: a fault must not hide behind another feature's work."""
    made: list[AddRequest] = []
    for name, draw in {**KINDS, **GRAMMARS}.items():
        for temperature in (0.0, 4.0):
            params = {"temperature": temperature} | draw(rng)
            made.append(demand(rng, f"{name}-{len(made)}", params))
    return made


def mixtures(rng: random.Random, count: int) -> list[AddRequest]:
    """Two to four kinds together."""
    made: list[AddRequest] = []
    for number in range(count):
        names, params = rng.sample([*KINDS], rng.randrange(2, 5)), {}
        if rng.random() < 0.15:
            grammar = rng.choice([*GRAMMARS])
            names, params = rng.sample(_WITH_GRAMMAR, rng.randrange(1, 3)), GRAMMARS[grammar](rng)
        for name in names:
            params |= KINDS[name](rng)
        made.append(demand(rng, f"{number}:{'+'.join(names)}", params))
    return made


def strongly_penalised(rng: random.Random, count: int) -> list[AddRequest]:
    """Answers long enough to be preempted and taken up again, in which what was said before decides what comes."""
    made: list[AddRequest] = []
    for number in range(count):
        strong = (
            {"presence_penalty": 2.0, "frequency_penalty": 2.0},
            {"repetition_penalty": 3.0},
            {"frequency_penalty": -2.0},
        )
        prompt = [rng.randrange(VOCAB) for _ in range(20)]
        params = {"temperature": rng.choice([0.0, 1.0]), "max_tokens": 50, "ignore_eos": True, **strong[number % 3]}
        made.append(request(f"strong {number}", prompt, seed=rng.getrandbits(64), **params))
    return made


def demand(rng: random.Random, name: str, params: dict[str, Any]) -> AddRequest:
    """A request with a prompt of its own; what would leave nothing to draw is taken back."""
    given = dict(params)
    given.setdefault("max_tokens", rng.choice([3, 9, 14]))
    given.setdefault("temperature", rng.choice([0.0, 1.0, 3.0]))
    given["min_tokens"] = min(given.get("min_tokens", 0), given["max_tokens"])
    if "allowed_token_ids" in given:
        banned = {words[-1] for words in given.get("bad_words_ids", ())} | {*given.get("stop_token_ids", ())}
        given["allowed_token_ids"] += [token for token in (90, 91, 92, 93, 94) if token not in banned]
        if not {*given["allowed_token_ids"]} - banned:
            del given["allowed_token_ids"]
    length = rng.choice([1, 2, 7, 8, 9, 16, 17, 40])
    prompt = (
        [(11 * i) % VOCAB for i in range(rng.choice([0, 0, 8, 16]))] + [rng.randrange(VOCAB) for _ in range(length)]
    )[:56]
    return request(name, prompt, seed=rng.getrandbits(64), **given)


def with_phrases(asked: AddRequest, made: list[int], lengths: tuple[int, ...] = (1, 2, 3)) -> AddRequest:
    """The request again, forbidden what it said: phrases of its own answer, which chance would never hit."""
    phrases = [
        made[at : at + length] for length, at in zip(lengths, (4, 1, 2), strict=False) if at + length <= len(made)
    ]
    again = request(f"{asked.request_id}-again", asked.prompt_token_ids, seed=asked.seed, bad_words_ids=phrases)
    again.params, again.eos_token_ids = asked.params, asked.eos_token_ids
    return again
