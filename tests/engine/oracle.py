"""An oracle of sampling: what an answer must be, worked out from the definitions alone, in numpy.

It shares nothing with the engine but the public parameters: a wrong rule in ``headway/sampling``, in a kernel's reference or in
what an admission writes is wrong on all devices and at all depths alike, and no comparison between them shows it. Definitions:
core/params.py (each field), kernels/sample (order of the filters, the draw), kernels/gather_logprobs (ranks).

The oracle judges a finished answer token by token, each from the tokens that were really drawn before it, so one draw between
two tokens a rounding apart does not make the rest incomparable. Such close calls are counted; a test bounds their share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.automaton import DEAD, MAX_TOKEN_BYTES, Automaton
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams

Reals = npt.NDArray[np.float64]
Row = tuple[list[int], list[float], int]
NEVER = -np.inf
ROUNDING = 1e-4
"""How far two float32 computations of one logit of the tiny model may lie apart, and more."""
GREEDY_BELOW = 1e-5


@dataclass(slots=True)
class Tally:
    """What was judged, and how much of it left a choice."""

    tokens: int = 0
    close_calls: int = 0


# -- the draw: "lowbias32" (Wellons 2018) chained over the two words of the seed and the position --------------------


def _finalised(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def log_exponentials(seed: int, position: int, vocab: int) -> Reals:
    """log E for each token: E ~ Exponential(1), a function of seed (64 bits), position and token alone."""

    def word(value: int) -> npt.NDArray[np.uint32]:
        return np.array([value & 0xFFFFFFFF], np.uint32)

    low, high, at = word(seed), word(seed >> 32), word(position)
    one = _finalised(_finalised(_finalised(low + np.uint32(0x9E3779B9)) ^ high) + at)
    two = _finalised(_finalised(_finalised(at + np.uint32(0x85EBCA6B)) ^ high) + low)
    x = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B1) ^ one
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD) + two
    uniform = np.minimum((_finalised(x).astype(np.float64) + 0.5) / 2.0**32, 1.0 - 2.0**-24)
    return np.log(-np.log1p(-uniform))


# -- which tokens may come, and how likely ---------------------------------------------------------------------------


def edited(raw: Reals, request: AddRequest, made: Sequence[int], may_follow: Callable[[int], bool] | None) -> Reals:
    """Logits [V] after everything the request asks for, behind the generated tokens ``made``."""
    params, prompt, x = request.params, request.prompt_token_ids, raw.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    forbidden: set[int] = set()
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(x))) - set(params.allowed_token_ids)
    if len(made) < params.min_tokens:
        forbidden |= {*request.eos_token_ids, *(params.stop_token_ids or [])}
    for phrase in request.bad_words_token_ids:
        before = len(phrase) - 1
        if before <= len(made) and list(made[len(made) - before :]) == list(phrase[:-1]):
            forbidden.add(phrase[-1])
    if may_follow is not None:
        forbidden |= {token for token in range(len(x)) if not may_follow(token)}
    for token in {*prompt, *made}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(made):
        x[token] -= params.frequency_penalty * list(made).count(token) + params.presence_penalty
    x[list(forbidden)] = NEVER
    return x


def slack(params: SamplingParams) -> float:
    """How far an edited logit may be off: repetition penalties scale the rounding of the model."""
    return ROUNDING * max(1.0, params.repetition_penalty, 1.0 / params.repetition_penalty)


def kept(z: Reals, params: SamplingParams, give: float) -> npt.NDArray[np.bool_]:
    """Tokens that min_p, top_k and top_p keep of ``z`` = logits / temperature. ``give`` > 0 widens bounds, < 0 narrows."""
    keep = z > NEVER
    if params.min_p > 0:
        keep &= z >= z.max() + np.log(params.min_p) - give
    if 0 < params.top_k < len(z):
        keep &= z >= np.sort(z)[-params.top_k] - give
    if params.top_p < 1:
        # Whatever top_k and min_p drop is no part of the mass. At the bound itself the narrow reading drops what is not sure.
        keep |= z == z.max()
        weight = np.where(keep, np.exp(z - z.max()), 0.0)
        order = np.argsort(-weight, kind="stable")
        before = (np.cumsum(weight[order]) - weight[order]) / weight.sum()
        enough = before < params.top_p + 2 * give
        last = weight[order][enough][-1] if enough.any() else weight.max()
        keep &= weight >= last * np.exp(-max(give, 0.0))
    return keep | (z == z.max())


def judge_token(x: Reals, token: int, request: AddRequest, position: int) -> bool:
    """Whether the draw of ``token`` from edited logits ``x`` was a close call. Raises AssertionError when it was wrong."""
    params, off = request.params, slack(request.params)
    assert x.max() > NEVER, "there was nothing to draw"
    if params.temperature < GREEDY_BELOW:
        assert x[token] >= x.max() - 2 * off, f"{token} is not the most likely ({x[token]} < {x.max()} of {x.argmax()})"
        return int((x >= x.max() - 2 * off).sum()) > 1
    z = x / params.temperature
    give = 2 * off / params.temperature + 1e-6
    score = z - log_exponentials(request.seed, position, len(x))
    perhaps, surely = kept(z, params, give), kept(z, params, -give)
    assert perhaps[token], f"{token} was dropped by the filters"
    best = score[surely].max() if surely.any() else NEVER
    assert score[token] >= best - 2 * give, f"{token} loses the race to {int(np.where(surely, score, NEVER).argmax())}"
    rivals = perhaps & (score >= score[token] - 2 * give)
    return int(rivals.sum()) > 1


# -- log-probabilities -----------------------------------------------------------------------------------------------


def judge_row(row: Row, raw: Reals, token: int, number: int, chosen: Sequence[int]) -> None:
    """One position's report: of the raw logits, the token first, then ``chosen`` ids or the ``number`` most likely."""
    ids, values, rank = row
    logs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    assert ids[0] == token
    assert np.allclose(values, logs[ids], atol=2 * ROUNDING), (ids, values, logs[ids].tolist())
    assert (logs > logs[token] + 2 * ROUNDING).sum() + 1 <= rank <= (logs >= logs[token] - 2 * ROUNDING).sum(), rank
    if chosen:
        assert ids[1:] == list(chosen)
        return
    listed, number = ids[1:], min(number, len(raw))
    assert len(listed) == len(set(listed)) == number
    if number:
        assert all(a >= b - 2 * ROUNDING for a, b in zip(logs[listed], logs[listed[1:]], strict=False)), "not in order"
        left_out = np.delete(logs, listed)
        assert not len(left_out) or left_out.max() <= logs[listed[-1]] + 2 * ROUNDING, "a more likely one is missing"


# -- whole answers ---------------------------------------------------------------------------------------------------


class SamplingOracle:
    """Judges answers of one model.

    Args:
        logits: token ids -> [n, V], the raw logits behind each of them, from a plain dense forward.
        texts: what the tokens read as, for ``choices``.
    """

    def __init__(self, logits: Callable[[list[int]], Reals], texts: Sequence[bytes] = ()) -> None:
        self._logits, self._texts = logits, texts

    def judge(
        self,
        request: AddRequest,
        answer: Any,
        choices: Sequence[bytes] | Automaton | None = None,
        ended: bool = True,
    ) -> Tally:
        """Raises AssertionError, naming the request and the position, unless ``answer`` (``tests.engine.harness.Answer``) is
        what the request asks for.

        Args:
            choices: the request's grammar: some texts, or which texts an automaton reads.
            ended: False for a request that was aborted: what it got must be the beginning of an answer.
        """
        params, prompt, made = request.params, list(request.prompt_token_ids), list(answer.token_ids)
        assert answer.error is None, answer.error
        raw = self._logits(prompt + made)
        tally = Tally()
        for i, token in enumerate(made):
            try:
                follow = None if choices is None else self._follower(choices, made[:i], request)
                x = edited(raw[len(prompt) - 1 + i], request, made[:i], follow)
                tally.close_calls += judge_token(x, token, request, len(prompt) + i)
                tally.tokens += 1
                reason = self._end(request, made[: i + 1])
                last = i == len(made) - 1
                assert (reason is None) == (not last or not ended), f"ended {answer.finish_reason}, not {reason}"
                if reason is not None:
                    assert (answer.finish_reason, answer.stop_token_id) == reason
            except AssertionError as error:
                error.add_note(f"request {request.request_id}, generated token {i}, {params}, prompt of {len(prompt)}")
                raise
        assert made or not ended
        self._judge_rows(request, answer, raw)
        return tally

    def _follower(
        self, choices: Sequence[bytes] | Automaton, made: Sequence[int], request: AddRequest
    ) -> Callable[[int], bool]:
        written = b"".join(self._texts[token] for token in made)

        def begins(text: bytes) -> bool:
            if isinstance(choices, Automaton):
                return choices.walk(choices.start, text) != DEAD
            return any(each.startswith(text) for each in choices)

        def may(token: int) -> bool:
            if token in request.eos_token_ids:
                return choices.accepts(written) if isinstance(choices, Automaton) else written in choices
            text = self._texts[token] if token < len(self._texts) else b""
            return 0 < len(text) <= MAX_TOKEN_BYTES and begins(written + text)

        return may

    @staticmethod
    def _end(request: AddRequest, made: Sequence[int]) -> tuple[str, int | None] | None:
        params = request.params
        assert params.max_tokens is not None
        if len(made) > params.min_tokens:
            if made[-1] in request.eos_token_ids:
                return "stop", None
            if made[-1] in (params.stop_token_ids or []):
                return "stop", made[-1]
        return ("length", None) if len(made) >= params.max_tokens else None

    @staticmethod
    def _judge_rows(request: AddRequest, answer: Any, raw: Reals) -> None:
        params, prompt, made = request.params, list(request.prompt_token_ids), list(answer.token_ids)
        chosen = params.logprob_token_ids or []
        asked = params.logprobs is not None or bool(chosen)
        assert len(answer.logprobs) == (len(made) if asked else 0)
        for i, row in enumerate(answer.logprobs):
            judge_row(row, raw[len(prompt) - 1 + i], made[i], params.logprobs or 0, chosen)
        rows = answer.prompt_logprobs
        assert len(rows) == (len(prompt) - 1 if params.prompt_logprobs is not None and made else 0)
        for i, row in enumerate(rows):
            judge_row(row, raw[i], prompt[i + 1], params.prompt_logprobs or 0, [])
