"""How well texts fit together: pairs for a cross-encoder, or vectors of each text to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from headway.api.pooling.door import PoolingDoor, Wanted
from headway.api.pooling.frame import Frame, cut_pair
from headway.api.pooling.requests import Floats, finished_vectors, normalized
from headway.core.errors import InvalidRequestError
from headway.core.messages import AddRequest
from headway.core.params import PoolingParams
from headway.core.task import Task

if TYPE_CHECKING:
    from headway.api.pooling.texts import Texts

QUERY_NAMES: Final = ("query", "retrieval.query")
DOCUMENT_NAMES: Final = ("document", "passage", "corpus", "retrieval.passage")
"""Prompts that stand before queries and documents when the request names none: sentence-transformers' names, and Jina's, whose
adapters of these names they run with, too."""
MAX_INSTRUCTION_CHARS: Final = 2**16
TASK_OF: Final = {"pair": Task.SCORE, "vectors": Task.EMBED, "tokens": Task.TOKEN_EMBED}


@dataclass(slots=True)
class ScoreJob:
    """The scoring of some pairs.

    Attributes:
        first, second: texts. Of the pairs (first[i], second[i]); one first text goes with every second.
        wanted: of requests for the first texts, or for the pairs.
        wanted_second: of those for the second texts.
        instruction: for templates that have one.
    """

    door: PoolingDoor
    first: list[str]
    second: list[str]
    wanted: Wanted
    wanted_second: Wanted
    instruction: str

    @property
    def is_paired(self) -> bool:
        """One request holds both texts."""
        return self.wanted.task in (Task.SCORE, Task.CLASSIFY)

    @property
    def num_requests(self) -> int:
        return len(self.second) if self.is_paired else len(self.first) + len(self.second)

    def messages(self) -> list[AddRequest]:
        """Tokenises everything; may take long. Raises InvalidRequestError."""
        if not self.is_paired:
            parts = ((self.first, self.wanted), (self.second, self.wanted_second))
            return [m for texts, w in parts for m in self.door.messages(self.door.token_ids(texts, w), w)]
        ids, ranges = self._templated() if self.door.pooling.score_template else self._joined()
        self.door.check(ids, given=False)
        return self.door.messages(ids, self.wanted, ranges)

    def _joined(self) -> tuple[list[list[int]], list[tuple[int, int] | None] | None]:
        """As the tokenizer joins two texts."""
        texts, wanted = self.door.need_texts(), self.wanted
        frame = texts.pair
        room = None if wanted.truncate is None else texts.room(wanted.truncate, frame)
        bodies = texts.bodies([self.door.cased(each) for each in [*self.first, *self.second]], room, wanted.side)
        first, second = bodies[: len(self.first)], bodies[len(self.first) :]
        if len(first) == 1:
            first = first * len(second)
        if room is not None:
            pairs = [_cut(one, two, room, wanted.side) for one, two in zip(first, second, strict=True)]
            first, second = [one for one, _ in pairs], [two for _, two in pairs]
        ids = [frame.pair(one, two) for one, two in zip(first, second, strict=True)]
        if self.door.pooling.num_token_types < 2:
            return ids, None
        return ids, [_range(frame, len(one), len(two)) for one, two in zip(first, second, strict=True)]

    def _templated(self) -> tuple[list[list[int]], None]:
        """As the model's template joins them. What a text spells of control tokens stays text: it cannot end its turn."""
        texts, wanted, form = self.door.need_texts(), self.wanted, self.door.pooling.score_template
        head, _, tail = form.partition("{document}")
        end = texts.bodies([tail], None)[0] if tail else []
        frame = Frame(before=texts.single.before if texts.single is not None else (), after=tuple(end))
        room = None if wanted.truncate is None else texts.room(wanted.truncate, frame)
        first = self.first * len(self.second) if len(self.first) == 1 else self.first
        pairs = zip(first, self.second, strict=True)
        whole = [_filled(texts, head, self.instruction, one) + _as_text(texts, two) for one, two in pairs]
        return [frame.single(ids) for ids in texts.bodies(whole, room, "right")], None

    def scores(self, vectors: list[Floats]) -> Floats:
        """float32 [pairs] of what the requests brought."""
        if self.is_paired:
            return np.array([vector[-1] for vector in vectors], np.float32)
        count = len(self.first)
        arrays = finished_vectors(vectors, self.wanted, self.door.pooling)
        if self.wanted.task is Task.TOKEN_EMBED:
            return max_sim(arrays[:count], arrays[count:])
        return similarities(np.stack(arrays[:count]), np.stack(arrays[count:]), self.door.pooling.similarity)


def score_job(
    door: PoolingDoor,
    data_1: str | Sequence[str],
    data_2: str | Sequence[str],
    params: PoolingParams | None = None,
    instruction: str | None = None,
) -> ScoreJob:
    """A job of checked texts. Raises InvalidRequestError."""
    params = PoolingParams() if params is None else params
    kind = door.pooling.score_by
    if kind not in TASK_OF:
        served = ", ".join(task.value for task in door.info.tasks)
        raise InvalidRequestError(
            f"{door.info.model} serves {served} and scores no pairs; use a cross-encoder or an embedding model", "task"
        )
    wanted = wanted_second = door.wanted(params, TASK_OF[kind])
    if kind == "pair":
        wanted = wanted_second = _of_pairs(wanted, params)
    elif params.prompt_name is None and params.task is None:
        wanted = _with_prompt(door, params, kind, QUERY_NAMES, wanted)
        wanted_second = _with_prompt(door, params, kind, DOCUMENT_NAMES, wanted_second)
    first, second = _matched(data_1, data_2, ("data_1", "data_2"))
    has_place = "{instruction}" in door.pooling.score_template
    if instruction is not None and not (has_place and isinstance(instruction, str)):
        what = "must be text" if has_place else "has no place in this model's input; leave it out"
        raise InvalidRequestError(f"instruction {what}", "instruction")
    if instruction is not None and len(instruction) > MAX_INSTRUCTION_CHARS:
        raise InvalidRequestError(f"instruction: at most {MAX_INSTRUCTION_CHARS} characters", "instruction")
    return ScoreJob(door, first, second, wanted, wanted_second, instruction or door.pooling.score_instruction)


def pair_job(door: PoolingDoor, prompts: object, text_pair: object, params: PoolingParams | None = None) -> ScoreJob:
    """A job that classifies pairs of texts, such as what follows from what. Raises InvalidRequestError."""
    params = PoolingParams() if params is None else params
    wanted = _of_pairs(door.wanted(params, Task.CLASSIFY), params)
    first, second = _matched(prompts, text_pair, ("prompt", "text_pair"))
    return ScoreJob(door, first, second, wanted, wanted, door.pooling.score_instruction)


def _of_pairs(wanted: Wanted, params: PoolingParams) -> Wanted:
    if params.prompt_name is not None:
        raise InvalidRequestError("prompt_name applies to embedding models; this model scores pairs", "prompt_name")
    return replace(wanted, prompt="", pool_start=0)


def _matched(one: object, other: object, names: tuple[str, str]) -> tuple[list[str], list[str]]:
    first, second = _texts(one, names[0]), _texts(other, names[1])
    if len(first) not in (1, len(second)):
        what = f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}"
        raise InvalidRequestError(f"{what}; give one text for all, or as many", names[0])
    return first, second


def _with_prompt(
    door: PoolingDoor, params: PoolingParams, kind: str, names: tuple[str, ...], otherwise: Wanted
) -> Wanted:
    known = next((name for name in names if name in door.pooling.prompts), None)
    if known is None:
        return otherwise
    task = known if known in door.pooling.adapters else None
    return door.wanted(replace(params, prompt_name=known, task=task), TASK_OF[kind])


def _texts(data: object, name: str) -> list[str]:
    found = [data] if isinstance(data, str) else list(data) if isinstance(data, (list, tuple)) else None
    if found is None or not all(isinstance(each, str) for each in found):
        raise InvalidRequestError(f"{name} must be a text or a list of texts", name)
    if not found:
        raise InvalidRequestError(f"{name} is empty; give at least one text", name)
    for number, text in enumerate(found):
        if not text:
            which = name if len(found) == 1 else f"text {number} of {name}"
            raise InvalidRequestError(f"{which} is empty; give at least one character", name)
    return found


def _filled(texts: Texts, head: str, instruction: str, query: str) -> str:
    before, _, behind = head.partition("{query}")
    return before.replace("{instruction}", _as_text(texts, instruction)) + _as_text(texts, query) + behind


def _as_text(texts: Texts, text: str) -> str:
    """``text`` without what would become a control token: a character between that stands for nothing."""
    controls = texts.tokenizer.control_texts
    return controls.marked(text, ZERO_WIDTH) if controls.spelled(text) else text


ZERO_WIDTH: Final = "\u200b"


def _cut(first: list[int], second: list[int], room: int, side: str) -> tuple[list[int], list[int]]:
    one, two = cut_pair(len(first), len(second), room)
    if side == "right":
        return first[:one], second[:two]
    return first[len(first) - one :], second[len(second) - two :]


def _range(frame: Frame, first: int, second: int) -> tuple[int, int] | None:
    try:
        return frame.type_range(first, second)
    except ValueError as error:
        raise InvalidRequestError(f"this model's tokenizer cannot be served for pairs: {error}") from None


# -- comparing ---------------------------------------------------------------------------------------------------------


def similarities(first: Floats, second: Floats, kind: str) -> Floats:
    """float32 [n] of rows [n, width] beside each other, ``first`` of one row with every row of ``second``. Larger is nearer:
    distances are negative.
    """
    if kind == "cosine":
        first, second = normalized(first), normalized(second)
    if kind in ("cosine", "dot"):
        if len(first) == 1:
            return second @ first[0]
        return np.einsum("ij,ij->i", first, second)
    apart = first - second
    if kind == "euclidean":
        return -np.sqrt(np.einsum("ij,ij->i", apart, apart))
    return -np.abs(apart).sum(axis=1)


def max_sim(first: list[Floats], second: list[Floats]) -> Floats:
    """ColBERT's late interaction: for each token of the query its best match among the document's tokens, summed.

    Khattab and Zaharia 2020, equation 3. Arrays are [tokens, width], of length 1 where the model makes them so.
    """
    if len(first) == 1:  # one product for all documents
        starts = np.cumsum([0, *(len(each) for each in second[:-1])])
        table = first[0] @ np.concatenate(second).T
        return np.maximum.reduceat(table, starts, axis=1).sum(axis=0, dtype=np.float32)
    pairs = zip(first, second, strict=True)
    return np.array([(one @ two.T).max(axis=1).sum() for one, two in pairs], np.float32)
