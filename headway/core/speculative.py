"""``SpeculativeConfig``: which drafter guesses tokens ahead, and how many. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.errors import ConfigError, UnknownParameterError
from headway.core.params import refuse_unknown

MAX_DRAFTS = 32
"""Most tokens that are guessed ahead: each costs a place in every step, and a place behind every slot's text."""
MAX_LOOKUP = 64
"""Most tokens of a match: each is one more comparison per known token."""
USUAL_LOOKUP = 5


def draft_widths(number: int, *, adaptive: bool) -> tuple[int, ...]:
    """Tokens that decode rows may have, rising: without drafts, with all ``number`` of them and, where their number adapts,
    with a half and a quarter of them. Few, since each takes graphs of its own."""
    numbers = {0, number, number // 2, number // 4} if adaptive else {0, number}
    return tuple(sorted(1 + each for each in numbers))


MAX_TREE_DEPTH = 128
MAX_CACHED_REQUESTS = 2**17
TREE_DEPTH, CACHED_REQUESTS, SPEC_FACTOR, TOKEN_PROB = 24, 10_000, 1.0, 0.1
"""What vLLM takes where the four settings of suffix decoding are not given."""

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark")
MTP_NAMES = ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "mimo_mtp")
"""Older names of "mtp": which layer a model has is read from its own configuration."""
WITHOUT_MODEL = ("ngram", "suffix")
SUFFIX = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
REJECTION_METHODS = ("standard", "synthetic")
DRAFT_METHODS = ("greedy", "probabilistic")


@refuse_unknown
@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How tokens are guessed.

    Attributes:
        method: "ngram": what followed the last tokens where they occurred before, in the request's own text.
            "suffix": what mostly followed them there and in the answers of requests that have ended. "draft_model": what a
            smaller model of the same vocabulary says. "eagle", "eagle3": what a head says that was trained on the model's
            hidden states. "mtp": what the layer for multi-token prediction says that the model's own checkpoint has.
            "dflash", "dspark": what a drafter of whole blocks says that was trained on those states.
        num_speculative_tokens: K, tokens guessed for each step of each row.
        model: of all but "ngram" and "suffix": folder, GGUF file or hub name. Of "mtp" the engine's, or unset.
        revision: of ``model``, as for the engine's.
        prompt_lookup_max: of "ngram": most tokens that are compared. Unset: prompt_lookup_min, or 5.
        prompt_lookup_min: of "ngram": fewest that must be equal. Unset: prompt_lookup_max, or 5.
        suffix_decoding_max_tree_depth: of "suffix": tokens that are compared and guessed together, at most. Unset: 24.
        suffix_decoding_max_cached_requests: of "suffix": answers of ended requests that are kept, at most; 0 keeps none. Unset:
            10,000. They are also bounded by the memory of ``speculative.suffix.STORE_TOKENS``.
        suffix_decoding_max_spec_factor: of "suffix": drafts a matched token, at most. Unset: 1.
        suffix_decoding_min_token_prob: of "suffix": least estimated chance of a draft. Unset: 0.1.
        rejection_sample_method: "standard": a draft is accepted when it is the token that the request would have drawn anyway.
            "synthetic": for benchmarks, accept at a chosen rate, whatever the model says; the output is no text.
        draft_sample_method: of drafters with a model. Unset: drafts are drawn with the noise that the request's own tokens will
            be drawn with, and accepted when they are these. "greedy": the most likely tokens, accepted likewise.
            "probabilistic": drafts are drawn from the drafter's distribution and accepted by the ratio of probabilities; tokens
            are distributed as without drafts, but they are others.
        adaptive: leave drafts out of steps while they cost more time than they save, which is measured. Unset: yes, but with
            "synthetic" and "probabilistic", whose tokens depend on it.
        synthetic_acceptance_length: of "synthetic": mean tokens that a row brings in a step, its own one included.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    revision: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    rejection_sample_method: str = "standard"
    synthetic_acceptance_length: float | None = None
    draft_sample_method: str | None = None
    adaptive: bool | None = None

    def __post_init__(self) -> None:
        if self.method in MTP_NAMES:
            object.__setattr__(self, "method", "mtp")
        if self.method not in METHODS:
            raise ConfigError(f"speculative_config: method must be one of {', '.join(METHODS)}; got {self.method!r}")
        self._check_count("num_speculative_tokens", MAX_DRAFTS)
        self._check_model()
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                self._check_count(name, MAX_LOOKUP)
        self._check_suffix()
        self._check_rejection()
        self._check_drawing()
        if self.adaptive not in (None, True, False):
            raise ConfigError(f"speculative_config: adaptive must be true, false or null; got {self.adaptive!r}")
        low, high = self.lookup
        if low > high:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={low} is more than prompt_lookup_max={high}; lower the one or "
                "raise the other"
            )

    def _check_count(self, name: str, most: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ConfigError(f"speculative_config: {name} must be an integer from 1 to {most}; got {value!r}")

    def _check_model(self) -> None:
        has_model = self.method not in WITHOUT_MODEL
        if self.method != "mtp" and has_model and not (isinstance(self.model, str) and self.model):
            raise ConfigError(f"speculative_config: method={self.method!r} needs model, a folder or a hub name")
        if not has_model and (self.model is not None or self.revision is not None):
            raise ConfigError(f"speculative_config: method={self.method!r} has no model; leave model and revision out")
        if self.method != "ngram" and (self.prompt_lookup_max is not None or self.prompt_lookup_min is not None):
            raise ConfigError("speculative_config: prompt_lookup_max and prompt_lookup_min belong to method='ngram'")

    def _check_suffix(self) -> None:
        given = {name: value for name in SUFFIX if (value := getattr(self, name)) is not None}
        if self.method != "suffix":
            if given:
                raise ConfigError(f"speculative_config: {', '.join(given)} belong to method='suffix'")
            return
        if self.suffix_decoding_max_tree_depth is not None:
            self._check_count("suffix_decoding_max_tree_depth", MAX_TREE_DEPTH)
        if self.suffix_decoding_max_cached_requests not in (None, 0):
            self._check_count("suffix_decoding_max_cached_requests", MAX_CACHED_REQUESTS)
        for name, most in (("suffix_decoding_max_spec_factor", MAX_DRAFTS), ("suffix_decoding_min_token_prob", 1)):
            value = given.get(name, 0)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
                raise ConfigError(f"speculative_config: {name} must be a number from 0 to {most}; got {value!r}")
        depth = self.suffix[0] + self.num_speculative_tokens
        if self.suffix[0] < 1:
            raise ConfigError(
                f"speculative_config: suffix_decoding_max_tree_depth={depth} has no room for a match beside "
                f"num_speculative_tokens={self.num_speculative_tokens}; raise the one or lower the other"
            )

    def _check_drawing(self) -> None:
        if self.draft_sample_method is None:
            return
        if self.draft_sample_method not in DRAFT_METHODS:
            raise ConfigError(
                f"speculative_config: draft_sample_method must be one of {', '.join(DRAFT_METHODS)}; "
                f"got {self.draft_sample_method!r}"
            )
        if self.method in WITHOUT_MODEL:
            raise ConfigError(
                f"speculative_config: method={self.method!r} has no model, so drafts are not drawn; "
                "leave draft_sample_method out"
            )
        if self.is_probabilistic and self.rejection_sample_method != "standard":
            raise ConfigError(
                "speculative_config: draft_sample_method='probabilistic' needs rejection_sample_method='standard'"
            )
        if self.is_probabilistic and self.adaptive:
            raise ConfigError(
                "speculative_config: with draft_sample_method='probabilistic' tokens depend on where drafts are made, so their "
                "number cannot follow the load; leave adaptive out"
            )

    def _check_rejection(self) -> None:
        if self.rejection_sample_method not in REJECTION_METHODS:
            raise ConfigError(
                f"speculative_config: rejection_sample_method must be one of {', '.join(REJECTION_METHODS)}; "
                f"got {self.rejection_sample_method!r}"
            )
        length, most = self.synthetic_acceptance_length, self.num_speculative_tokens + 1
        if (length is not None) != (self.rejection_sample_method == "synthetic"):
            raise ConfigError(
                'speculative_config: rejection_sample_method="synthetic" and synthetic_acceptance_length belong together; '
                "give both or neither"
            )
        if length is not None and (
            not isinstance(length, int | float) or isinstance(length, bool) or not 1 <= length <= most
        ):
            raise ConfigError(
                f"speculative_config: synthetic_acceptance_length must be a number from 1 to {most} "
                f"(num_speculative_tokens + 1); got {length!r}"
            )

    @property
    def is_adaptive(self) -> bool:
        """Whether drafts are left out while they do not pay."""
        exact = self.rejection_sample_method == "standard" and not self.is_probabilistic
        return exact if self.adaptive is None else self.adaptive

    @property
    def is_probabilistic(self) -> bool:
        """Whether drafts are judged by the probabilities they were drawn with."""
        return self.draft_sample_method == "probabilistic"

    @property
    def suffix(self) -> tuple[int, int, float, float]:
        """Most tokens of a match, most answers kept, most drafts a matched token, least chance of a draft."""
        given = [getattr(self, name) for name in SUFFIX]
        usual = (TREE_DEPTH, CACHED_REQUESTS, SPEC_FACTOR, TOKEN_PROB)
        depth, answers, factor, chance = (b if a is None else a for a, b in zip(given, usual, strict=True))
        return int(depth) - self.num_speculative_tokens, int(answers), float(factor), float(chance)

    @property
    def lookup(self) -> tuple[int, int]:
        """(prompt_lookup_min, prompt_lookup_max), each that is unset like the other."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or high or USUAL_LOOKUP, high or low or USUAL_LOOKUP


def read_speculative(given: object) -> SpeculativeConfig | None:
    """What a user gave as ``speculative_config``: None, the object, a mapping or JSON text of one.

    Raises:
        ConfigError: unknown keys, missing ones, or values that cannot be.
    """
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"speculative_config is not JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(
            'speculative_config must be a mapping such as {"method": "ngram", "num_speculative_tokens": 4}; '
            f"got {type(given).__name__}"
        )
    fields: dict[str, Any] = {str(name): value for name, value in given.items()}
    for name in ("method", "num_speculative_tokens"):
        if name not in fields:
            raise ConfigError(f"speculative_config lacks {name}")
    try:
        return SpeculativeConfig(**fields)
    except UnknownParameterError as error:
        raise ConfigError(f"speculative_config: {error}") from error
