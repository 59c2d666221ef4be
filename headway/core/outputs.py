"""What users get back; names and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

if TYPE_CHECKING:  # the command line's help reads this module, and shall not wait for numpy
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(msgspec.Struct, gc=False):
    """One token's log-probability under the raw logits. ``rank`` is 1 for the most likely token.

    There are thousands a second, and nothing in one refers to another object that could refer back: the garbage collector
    need not know them, nor the dictionaries that hold nothing else.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob for one position: the sampled (or prompt) token first, then the others."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    ``stop_reason`` is the stop string or the stop token id that ended it, None for end-of-sequence and length.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request; final when ``finished``. ``prompt_logprobs[0]`` is None: nothing precedes it.

    ``error`` says why a completion ended with finish_reason "error"; ``error_parameter`` is the request's field at fault, None
    where the request is not to blame. ``aligned``: see ``RequestUpdate``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_parameter: str | None = None
    aligned: list[int] | None = None


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """What a request that pools gets, as it came from the device.

    Attributes:
        data: float32, [width], or [tokens, width] of tasks that give something for each token.
    """

    data: npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class EmbeddingOutput(PoolingOutput):
    """One vector for a text. ``data`` costs nothing; ``embedding`` makes a list each time."""

    @property
    def embedding(self) -> list[float]:
        """The vector as Python numbers."""
        return self.data.tolist()

    @property
    def hidden_size(self) -> int:
        """Numbers of the vector."""
        return len(self.data)


@dataclass(slots=True, eq=False)
class ClassificationOutput(PoolingOutput):
    """A number for each label: probabilities, or with ``use_activation=False`` logits."""

    @property
    def probs(self) -> list[float]:
        """As Python numbers."""
        return self.data.tolist()

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.data)


@dataclass(slots=True, eq=False)
class ScoringOutput:
    """How well two texts fit together: a cross-encoder's answer, or the cosine of two embeddings."""

    score: float


_Pooled = TypeVar("_Pooled")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[_Pooled]):
    """One finished request that pooled. ``outputs`` is one object and not a list, as in vLLM."""

    request_id: str
    outputs: _Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Of ``LLM.embed``."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Of ``LLM.classify``."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Of ``LLM.score``. ``prompt_token_ids``: of both texts, one after the other."""

    __slots__ = ()


AnyPoolingOutput = PoolingRequestOutput[Any]
