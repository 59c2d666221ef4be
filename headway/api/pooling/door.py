"""The door for requests that pool: what the model serves, prompts as token ids, within limits."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import countOf
from typing import TYPE_CHECKING, Final

import numpy as np

from headway.api.inputs import checked_salt
from headway.api.long_texts import too_long
from headway.api.pooling.texts import Texts
from headway.core.errors import InvalidRequestError, UnknownParameterError
from headway.core.messages import AddRequest, ModelInfo
from headway.core.params import PoolingParams, SamplingParams
from headway.core.pooling import PoolingInfo
from headway.core.task import Task

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer

NOTHING_SAMPLED: Final = SamplingParams()
"""Of requests that generate nothing; the engine reads none of it."""
NO_STEPS: Final = PoolingInfo(width=0, max_length=0)
TOKEN_TASKS: Final = frozenset({Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY})
LABEL_TASKS: Final = frozenset({Task.CLASSIFY, Task.SCORE, Task.TOKEN_CLASSIFY})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the requests of one call want, checked against the model.

    Attributes:
        truncate: tokens of a prompt at most; None refuses longer ones.
        side: which end is cut off.
        dimensions: leading numbers of each vector; None: all.
        normalize: vectors have to be made of length 1 here, since they are cut or the engine does not.
        raw: the engine leaves vectors as they are.
        prompt: text in front of every text.
        adapter: see ``AddRequest``.
        pool_start: the engine leaves out so many tokens when it pools.
        columns: which of a token's numbers are wanted, of process reward models; empty: all.
        activation: of these columns, to be applied here, behind their choice.
        step_tag_id: only tokens with this id are wanted; None: all.
    """

    task: Task
    truncate: int | None
    side: str
    dimensions: int | None
    normalize: bool
    raw: bool
    prompt: str
    pool_start: int
    columns: tuple[int, ...] = ()
    activation: str = "none"
    step_tag_id: int | None = None
    adapter: int = 0


class PoolingDoor:
    """Checks requests for one engine and makes their messages.

    Args:
        tokenizer: None when the engine was started with skip_tokenizer_init.
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer | None) -> None:
        self.info = info
        self.pooling = info.pooling or PoolingInfo(width=0, max_length=info.max_model_len)
        self.texts = None if tokenizer is None else Texts(tokenizer, info.max_model_len)
        self._numbers = itertools.count()
        self._checks_ids = tokenizer is None or tokenizer.vocab_size > info.vocab_size

    def need_texts(self) -> Texts:
        """Raises InvalidRequestError without a tokenizer."""
        if self.texts is None:
            raise InvalidRequestError("skip_tokenizer_init is set: prompts must be token ids, not text", "prompt")
        return self.texts

    def wanted(self, params: PoolingParams | None, task: Task) -> Wanted:
        """``params`` for ``task``, checked. Raises InvalidRequestError."""
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"pooling_params must be PoolingParams, got {type(params).__name__}", "pooling_params"
            )
        check_task(self.info, task)
        dimensions, normalize, raw = self._vector(params, task)
        adapter = self._adapter(params.task)
        prompt = self._prompt(params.prompt_name, params.task)
        first = self.pooling.token_embed_start if task is Task.TOKEN_EMBED else 0
        by_step = self.pooling if task is Task.TOKEN_CLASSIFY else NO_STEPS
        return Wanted(
            task=task,
            truncate=self._truncate(params.truncate_prompt_tokens),
            side=params.truncation_side or self.pooling.truncation_side,
            dimensions=dimensions,
            normalize=normalize,
            raw=raw or bool(by_step.returned_token_ids),
            prompt=prompt,
            pool_start=max(self._pool_start(prompt), first),
            columns=by_step.returned_token_ids,
            activation="none" if raw else by_step.activation,
            step_tag_id=by_step.step_tag_id,
            adapter=adapter,
        )

    def _vector(self, params: PoolingParams, task: Task) -> tuple[int | None, bool, bool]:
        """dimensions, whether vectors are to be normalised here, and whether the engine shall leave them as they are."""
        pooling, dimensions = self.pooling, params.dimensions
        if task in LABEL_TASKS:
            for name in ("dimensions", "normalize"):
                if getattr(params, name) is not None:
                    raise InvalidRequestError(
                        f"{name} applies to embeddings; the task {task.value!r} gives scores", name
                    )
            activates = pooling.activation != "none" or (pooling.token_weights and task is Task.TOKEN_CLASSIFY)
            return None, False, params.use_activation is False and activates
        if params.use_activation is not None:
            raise InvalidRequestError(
                "use_activation applies to classifiers; for embeddings use normalize", "use_activation"
            )
        width = pooling.width_by_token(task) if task in TOKEN_TASKS else pooling.width
        if dimensions is not None and dimensions > width:
            raise InvalidRequestError(
                f"dimensions must be at most {width}, the length of this model's vectors; got {dimensions}",
                "dimensions",
            )
        allowed = pooling.matryoshka_dimensions
        if dimensions is not None and dimensions != width and allowed and dimensions not in allowed:
            listed = ", ".join(map(str, allowed))
            raise InvalidRequestError(
                f"dimensions must be one of {listed}, to which this model's vectors may be cut; got {dimensions}",
                "dimensions",
            )
        if dimensions is not None and pooling.sparse:
            raise InvalidRequestError("dimensions: sparse vectors are not cut; leave it out", "dimensions")
        wants = pooling.normalize if params.normalize is None else params.normalize
        cut = dimensions is not None and dimensions < width
        here = wants and (cut or not pooling.normalize)
        return (dimensions if cut else None), here, pooling.normalize and not wants

    def _truncate(self, asked: int | None) -> int | None:
        if asked is not None and asked > self.info.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most max_model_len={self.info.max_model_len}, got {asked}; "
                "-1 cuts to what fits",
                "truncate_prompt_tokens",
            )
        if asked is None:
            return None
        longest = min(self.pooling.max_length, self.info.max_model_len)
        return longest if asked == -1 else min(asked, longest)

    def _adapter(self, task: str | None) -> int:
        known = self.pooling.adapters
        if task is None:
            return 0
        if task not in known:
            what = (
                f"one of {', '.join(map(repr, known))}" if known else "left out: this model has no adapters for tasks"
            )
            raise InvalidRequestError(f"task must be {what}; got {task!r:.80}", "task")
        return known.index(task) + 1

    def _prompt(self, name: str | None, task: str | None) -> str:
        prompts = self.pooling.prompts
        if name is None and task is not None:
            return prompts.get(task, "")
        if name is None:
            default = self.pooling.default_prompt_name
            return prompts.get(default, "") if default is not None else ""
        if name not in prompts:
            known = f"one of {', '.join(map(repr, prompts))}" if prompts else "left out: this model has no prompts"
            raise InvalidRequestError(f"prompt_name must be {known}; got {name!r:.80}", "prompt_name")
        return prompts[name]

    def _pool_start(self, prompt: str) -> int:
        if not prompt or self.pooling.include_prompt or self.texts is None:
            return 0
        frame = self.texts.single
        before = 0 if frame is None else len(frame.before)
        return before + len(self.texts.bodies([self.cased(prompt)], None)[0])

    def cased(self, text: str) -> str:
        """As the model wants its texts spelled."""
        return text.lower() if self.pooling.lower_case else text

    # -- prompts -------------------------------------------------------------------------------------------------------

    def token_ids(self, prompts: Sequence[object], wanted: Wanted, first: int | None = None) -> list[list[int]]:
        """Ids of every prompt, special tokens included. May take long; safe in any thread.

        Args:
            first: number of the first prompt, where these are some of many.

        Raises:
            InvalidRequestError: with the number of the prompt, where there are several.
        """
        found: list[list[int]] = [[]] * len(prompts)
        first = 0 if first is None and len(prompts) > 1 else first
        texts, places = [], []
        for i, prompt in enumerate(prompts):
            if type(prompt) is not list and isinstance(prompt, Mapping):
                prompt = _of_mapping(prompt)
            if isinstance(prompt, str):
                if not prompt:
                    raise InvalidRequestError(f"{which_of(i, first)} is empty; give at least one character", "prompt")
                texts.append(self.cased(wanted.prompt + prompt))
                places.append(i)
            else:
                found[i] = self._given_ids(prompt, wanted, which_of(i, first))
        if texts:
            made = self.need_texts().framed(texts, wanted.truncate, wanted.side, self._tail())
            for i, ids in zip(places, made, strict=True):
                found[i] = ids
        self.check(found, len(texts) < len(prompts), first)
        return found

    def _tail(self) -> int | None:
        """What texts have to end with beyond the tokenizer's own."""
        if not self.pooling.append_eos or self.texts is None:
            return None
        return self.texts.tokenizer.eos_token_id

    def _given_ids(self, prompt: object, wanted: Wanted, which: str) -> list[int]:
        if isinstance(prompt, np.ndarray) and prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer):
            ids = prompt.tolist()
        elif isinstance(prompt, (list, tuple)):
            ids = list(prompt)
        else:
            raise InvalidRequestError(
                f"{which} must be a string, token ids or a dictionary, got {type(prompt).__name__}", "prompt"
            )
        keep = wanted.truncate
        if keep is not None and len(ids) > keep:
            return ids[:keep] if wanted.side == "right" else ids[len(ids) - keep :]
        return ids

    def check(self, found: Sequence[list[int]], given: bool, first: int | None = 0) -> None:
        """Lengths, and the vocabulary. ``given``: ids came from outside; ``first``: see ``which_of``. Raises
        InvalidRequestError.
        """
        most, size = self.info.max_model_len, self.info.vocab_size
        lengths = [*map(len, found)]
        if lengths and not 0 < min(lengths) <= max(lengths) <= most:
            i = next(i for i, length in enumerate(lengths) if not 0 < length <= most)
            if not lengths[i]:
                raise InvalidRequestError(f"{which_of(i, first)} has no tokens; give at least one", "prompt")
            raise too_long(f"{which_of(i, first)} has {lengths[i]} tokens", most, pools=True)
        if not (given or self._checks_ids):
            return
        flat = list(itertools.chain.from_iterable(found))  # one look at all of them: a call for each text costs more
        if not _are_ids(flat, size):
            wrong = next(t for t in flat if type(t) is not int or not 0 <= t < size)
            if type(wrong) is not int:
                raise InvalidRequestError(f"token ids must be integers, got {wrong!r:.80}", "prompt")
            raise InvalidRequestError(f"token id {wrong} is outside of the vocabulary (0 to {size - 1})", "prompt")

    def messages(
        self,
        found: Iterable[list[int]],
        wanted: Wanted,
        ranges: Sequence[tuple[int, int] | None] | None = None,
        salts: Sequence[str | None] | None = None,
    ) -> list[AddRequest]:
        """One message for the engine for each prompt.

        Args:
            found: token ids, checked.
            ranges: of the tokens of type 1.
            salts: only equal ones share cached prefixes.
        """
        numbers, task, start = self._numbers, wanted.task, wanted.pool_start
        made = [
            AddRequest(
                request_id=f"p{next(numbers)}",
                prompt_token_ids=ids,
                params=NOTHING_SAMPLED,
                seed=0,
                eos_token_ids=[],
                task=task,
                pool_start=min(start, len(ids) - 1),
                raw=wanted.raw,
                adapter=wanted.adapter,
            )
            for ids in found
        ]
        for message, types in zip(made, ranges or ()):
            message.token_type_range = types or (0, 0)
        for message, salt in zip(made, salts or ()):
            message.cache_salt = salt
        return made


def _are_ids(flat: list[int], size: int) -> bool:
    """Whether all are integers, of no subclass, from 0 to ``size`` - 1, in two passes in C."""
    if countOf(map(type, flat), int) != len(flat):
        return False
    try:
        packed = struct.pack(f"{len(flat)}i", *flat)
    except struct.error:  # beyond 32 bits
        return False
    return not packed or int(np.frombuffer(packed, np.uint32).max()) < size  # negative ones are large


def check_task(info: ModelInfo, task: Task) -> None:
    """Raises InvalidRequestError where the model does not serve ``task``."""
    if task not in info.tasks:
        served = ", ".join(each.value for each in info.tasks)
        hint = info.pooling.missing if info.pooling is not None and task in TOKEN_TASKS else ""
        hint = hint or HINTS[info.tasks[0].pools]
        raise InvalidRequestError(f"{info.model} serves {served}, not {task.value}; {hint}", "task")


def task_of(name: Task | str | None, door: PoolingDoor) -> Task:
    """The task that ``encode`` is asked for. Raises InvalidRequestError."""
    tasks = door.info.tasks
    if name is None and len(tasks) == 1 and tasks[0].pools:
        return tasks[0]
    known = ", ".join(task.value for task in tasks)
    if name is None:
        raise InvalidRequestError(f"pooling_task must be one of {known}; this model serves several", "pooling_task")
    try:
        return Task(name)
    except ValueError:
        raise InvalidRequestError(f"pooling_task must be one of {known}, got {name!r:.80}", "pooling_task") from None


HINTS: Final = {
    False: "use generate or chat, or start it with runner='pooling' to get vectors",
    True: "use what it serves, or start a model that does this",
}
"""By whether the model pools."""


def salts(prompts: Sequence[object]) -> list[str | None] | None:
    """The cache salts that prompts bring; None where none does. Raises InvalidRequestError."""
    if not any(issubclass(kind, Mapping) for kind in {*map(type, prompts)}):  # a look at each prompt costs more
        return None
    if not any(isinstance(prompt, Mapping) and "cache_salt" in prompt for prompt in prompts):
        return None
    return [checked_salt(prompt.get("cache_salt")) if isinstance(prompt, Mapping) else None for prompt in prompts]


def which_of(number: int, first: int | None) -> str:
    """What to call a prompt in an error; ``first``: the number of the first one at hand, None where there is but one."""
    return "the prompt" if first is None else f"prompt {first + number}"


def _of_mapping(prompt: Mapping[str, object]) -> object:
    known = ("prompt", "prompt_token_ids", "cache_salt")
    for key in prompt:
        if key not in known:
            raise UnknownParameterError(str(key), known, "a prompt that pools")
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise InvalidRequestError('a prompt needs either "prompt" or "prompt_token_ids"', "prompt")
    if "prompt" in prompt and not isinstance(prompt["prompt"], str):
        raise InvalidRequestError('"prompt" must be a string', "prompt")
    return prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
