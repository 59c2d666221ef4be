"""``SamplingParams``: how one request wants its tokens chosen; ``PoolingParams``: how it wants its vector.

Every field keeps vLLM's name, default and meaning. Values that do not depend on the model are checked here, on
construction; values that do (token ids against the vocabulary, lengths against the context) in ``api.inputs``.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from headway.core.errors import InvalidRequestError, UnknownParameterError

GREEDY_EPS = 1e-5
"""Temperatures below this select the most likely token (vLLM's threshold)."""

MAX_N = 256
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_LOGPROB_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**19
PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
MAX_LOGPROBS_OF_A_REQUEST = 2**22
"""Log-probabilities that a request with several completions may come to: they are kept until it ends, .2 KB each."""

T = TypeVar("T")


def refuse_unknown(cls: type[T]) -> type[T]:
    """Class decorator: an unknown keyword raises UnknownParameterError with the nearest known name."""
    init: Callable[..., None] = cls.__init__
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise UnknownParameterError(name, known, cls.__name__)
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment,method-assign]
    return cls


def _refuse(parameter: str, message: str) -> None:
    raise InvalidRequestError(f"{parameter} {message}", parameter)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _token_id(given: object) -> int:
    """A key of ``logit_bias``, which JSON has as text. Raises ValueError or TypeError: it is no plain whole number."""
    if isinstance(given, str):
        if not PLAIN_NUMBER.fullmatch(given):
            raise ValueError(given)
        return int(given)
    if isinstance(given, bool):
        raise TypeError(given)
    return operator.index(given)  # type: ignore[arg-type]


def _real(given: Any) -> float:
    """A value of ``logit_bias``. Raises TypeError or OverflowError: it is no number."""
    if isinstance(given, (str, bool)):
        raise TypeError(given)
    return float(given)


@refuse_unknown
@dataclass(kw_only=True, slots=True)
class StructuredOutputsParams:
    """What the text of one request must look like: exactly one of the five.

    Attributes:
        json: a JSON schema, as a dict or as JSON text.
        regex: a regular expression the whole text must match.
        choice: the text is one of these strings.
        grammar: a context-free grammar in Lark syntax.
        json_object: True for any JSON object.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            _refuse(
                "structured_outputs", f"needs exactly one of json, regex, choice, grammar, json_object, got {given}"
            )
        if self.choice is not None and (
            not isinstance(self.choice, list)
            or not self.choice
            or not all(isinstance(c, str) and c for c in self.choice)
        ):
            _refuse("structured_outputs", "choice must be a list of non-empty strings")
        for name, kinds in (("json", (str, dict)), ("regex", str), ("grammar", str)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                _refuse("structured_outputs", f"{name} must be text, got {type(value).__name__}")
        if not isinstance(self.json_object, bool):
            _refuse("structured_outputs", "json_object must be true or false")


@refuse_unknown
@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and reported.

    Attributes:
        n: completions per prompt (1..256); child ``i`` of a seeded request uses ``seed + i``.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely, in [0, 1].
        seed: same tokens for the same seed whatever shares the batch; None draws a fresh seed per request.
        presence_penalty, frequency_penalty: in [-2, 2], over generated tokens.
        repetition_penalty: > 0, over prompt and generated tokens; 1 is off.
        logit_bias: token id -> value in [-100, 100], added to the logits.
        allowed_token_ids: only these may be generated.
        bad_words: strings whose token sequences may not be generated.
        min_tokens: no end of sequence or stop token before this many generated tokens.
        max_tokens: at most this many generated tokens; None means up to the context length.
        stop: strings that end the text (not part of it unless include_stop_str_in_output).
        stop_token_ids: tokens that end generation (``stop_reason`` names the one).
        ignore_eos: generate past the model's end-of-sequence token.
        logprobs: log-probabilities of this many most likely tokens plus the sampled one, per generated token.
        prompt_logprobs: the same for each prompt token.
        logprob_token_ids: log-probabilities of exactly these ids plus the sampled one, instead of the most likely; not empty.
            All log-probabilities are of the model's raw logits, before any processing (vLLM's ``raw_logprobs``).
        detokenize: produce text; False leaves ``text`` empty.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: constrain the text to a schema, pattern, choice or grammar.
        disable_spec_decode: no tokens are guessed for this request. Without ``speculative_config`` it changes nothing.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    disable_spec_decode: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        if self.top_k == -1:
            self.top_k = 0
        self._check_counts()
        self._check_reals()
        self._check_tables()
        self._check_stops()
        switches = (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "disable_spec_decode",
        )
        for name in switches:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, f"must be true or false, got {getattr(self, name)!r}")

        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            _refuse("structured_outputs", f"must be StructuredOutputsParams, got {self.structured_outputs!r:.80}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

    def _check_counts(self) -> None:
        limits: list[tuple[str, int, float, bool]] = [
            ("n", 1, MAX_N, False),
            ("top_k", 0, 2**31 - 1, False),
            ("min_tokens", 0, 2**31 - 1, False),
            ("max_tokens", 1, 2**31 - 1, True),
            ("logprobs", 0, 2**31 - 1, True),
            ("prompt_logprobs", 0, 2**31 - 1, True),
            ("seed", -(2**63), 2**63 - 1, True),
        ]
        for name, low, high, optional in limits:
            value = getattr(self, name)
            if value is None and optional:
                continue
            if not _is_int(value) or not low <= value <= high:
                _refuse(name, f"must be an integer from {low} to {high}, got {value!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"must be <= max_tokens={self.max_tokens}, got {self.min_tokens}")

    def _check_reals(self) -> None:
        limits = [
            ("temperature", 0.0, 100.0, "from 0 (greedy) to 100"),
            ("min_p", 0.0, 1.0, "from 0 (off) to 1"),
            ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
            ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
        ]
        for name, low, high, words in limits:
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                _refuse(name, f"must be a number {words}, got {value!r}")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            _refuse("top_p", f"must be in (0, 1], got {self.top_p!r}; use 1 to keep every token")
        if not _is_number(self.repetition_penalty) or not 0.0 < self.repetition_penalty <= 100.0:
            _refuse("repetition_penalty", f"must be in (0, 100], got {self.repetition_penalty!r}; 1 is off")

    def _check_tables(self) -> None:
        bias = self.logit_bias
        if bias is not None:
            if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIAS:
                _refuse("logit_bias", f"must be a dict of at most {MAX_LOGIT_BIAS} token ids to numbers")
            try:
                bias = {_token_id(token): _real(value) for token, value in bias.items()}
            except (TypeError, ValueError, OverflowError):
                _refuse("logit_bias", f"must map integer token ids to numbers, got {self.logit_bias!r:.80}")
            for token, value in bias.items():
                if not math.isfinite(value) or abs(value) > 100:
                    _refuse("logit_bias", f"for token {token} must be from -100 to 100, got {value!r:.80}")
            self.logit_bias = bias
        self._check_ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse("allowed_token_ids", "is empty: nothing could be generated; leave it out to allow every token")
        self._check_ids("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS)
        if self.logprob_token_ids is not None and not self.logprob_token_ids:
            _refuse("logprob_token_ids", "is empty: leave it out; logprobs=0 asks for the sampled token's alone")

    def _check_stops(self) -> None:
        assert isinstance(self.stop, list)
        self._check_ids("stop_token_ids", MAX_STOP_TOKEN_IDS)
        for name, words, most in (("stop", self.stop, MAX_STOP_STRINGS), ("bad_words", self.bad_words, MAX_BAD_WORDS)):
            if len(words) > most:
                _refuse(name, f"takes at most {most} strings, got {len(words)}")
            for word in words:
                if not isinstance(word, str) or not word or len(word) > MAX_STOP_STRING_CHARS:
                    _refuse(
                        name, f"entries must be strings of 1 to {MAX_STOP_STRING_CHARS} characters, got {word!r:.80}"
                    )
        if self.stop and not self.detokenize:
            _refuse("stop", "strings need detokenize=True; use stop_token_ids otherwise")

    def _check_ids(self, name: str, most: int) -> None:
        ids = getattr(self, name)
        if ids is None:
            return
        if isinstance(ids, list) and len(ids) > most:
            _refuse(name, f"takes at most {most} ids, got {len(ids)}")
        if not isinstance(ids, list) or not all(_is_int(token) and token >= 0 for token in ids):
            _refuse(name, f"must be a list of token ids >= 0, got {ids[:9] if isinstance(ids, list) else ids!s:.80}")


MAX_PROMPT_NAME_CHARS = 256


@refuse_unknown
@dataclass(kw_only=True, slots=True)
class PoolingParams:
    """What one request that pools wants. None means: as the model's own files say.

    Attributes:
        dimensions: only so many leading numbers of an embedding, for models trained for that (Matryoshka); with ``normalize``
            what is left has length 1 again.
        normalize: make embeddings of Euclidean length 1.
        use_activation: apply the sigmoid or softmax of a classifier; False gives its logits.
        truncate_prompt_tokens: cut longer prompts to so many tokens, special tokens included; -1 cuts to max_model_len. None
            refuses prompts that are too long.
        truncation_side: which end is cut off, "right" or "left"; None: as the model's tokenizer is set up.
        prompt_name: put the model's instruction of this name in front of each text; None takes the model's default.
        task: run with the model's adapter for this task ("retrieval.query", ...), and put the task's own instruction in front
            of each text unless ``prompt_name`` names another; None runs without an adapter.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    prompt_name: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        for name, low, most in (("dimensions", 1, 2**20), ("truncate_prompt_tokens", -1, 2**31 - 1)):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or not low <= value <= most or value == 0):
                more = " or -1 (as many as fit)" if low < 0 else ""
                _refuse(name, f"must be an integer from 1 to {most}{more}, got {value!r:.80}")
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                _refuse(name, f"must be true or false, got {value!r:.80}")
        if self.truncation_side not in (None, "right", "left"):
            _refuse("truncation_side", f"must be 'right' or 'left', got {self.truncation_side!r:.80}")
        for name, what in (("prompt_name", "a prompt"), ("task", "a task")):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or len(value) > MAX_PROMPT_NAME_CHARS):
                _refuse(name, f"must be the name of {what} of the model, got {value!r:.80}")
