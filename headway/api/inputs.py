"""The door: every request of every front end is checked and tokenised here, and nowhere else.

What depends on one field alone is checked by ``SamplingParams`` itself; what depends on the model (vocabulary, context
length, tokenizer) is checked here, so that a request that gets past the door can be served.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from headway.api.encoder_prompts import split_prompt
from headway.api.long_texts import encode_bounded, too_long
from headway.api.pictures.prompts import filled, place, see
from headway.api.prompts import Prompt, is_int
from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError, UnknownParameterError
from headway.core.hearing import Alignment, SpeechRules
from headway.core.ints import MASK64, mix64
from headway.core.messages import AddRequest, ModelInfo
from headway.core.params import MAX_LOGPROBS_OF_A_REQUEST, SamplingParams

if TYPE_CHECKING:
    from headway.api.killable import Job
    from headway.api.pictures.door import Picture, Pictures
    from headway.api.structured.compile import Outcome
    from headway.api.structured.door import StructuredDoor, Teach
    from headway.api.tokenizer import Tokenizer

MAX_BAD_WORDS_SEQUENCES = 256
MAX_BAD_WORDS_TOKENS = 2048
"""Most token sequences, and tokens in all of them, that one request's ``bad_words`` may come to."""
MAX_CACHE_SALT_CHARS = 1024


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that may be submitted: one AddRequest per completion (``params.n`` of them), in order. Their ids are ours,
    unique for the life of a Door."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: list[AddRequest]


@dataclass(frozen=True, slots=True)
class Resolved:
    """Sampling parameters as requests carry them, made once for all requests in a row that came with equal ones.

    Attributes:
        given: a copy of what came.
        whole: with ``max_tokens`` cut to the room that the prompt leaves.
        first, others: what the engine gets to see of it, for the first completion and for the others.
    """

    given: SamplingParams
    whole: SamplingParams
    first: SamplingParams
    others: SamplingParams


def params_list(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams per prompt; a single one serves them all."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, (list, tuple)):
        raise _wrong_params(params)
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"{num_prompts} prompts came with {len(params)} sampling_params; give one for all or one for each",
            "sampling_params",
        )
    return list(params)


def default_params(info: ModelInfo) -> SamplingParams:
    """SamplingParams with the defaults of the model's generation_config.json (``info.generation_defaults``)."""
    whole = {f.name for f in fields(SamplingParams) if str(f.type).startswith("int")}
    return SamplingParams(**{k: int(v) if k in whole else v for k, v in info.generation_defaults.items()})  # type: ignore[arg-type]


class Door:
    """Checks, tokenises and fans out requests for one engine.

    A request without a seed gets ``mix64(seed, number of the request at this door)``: fresh for each request, the same
    in every run that makes the same calls in the same order. Completion ``i`` of ``n`` adds ``i`` (modulo 2**64).

    Args:
        tokenizer: None when the engine was started with skip_tokenizer_init.
        seed: EngineArgs.seed.
        teach: tells the engine the vocabulary, before the first structured output.
        pictures: prepares pictures; None: the model sees none.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        seed: int = 0,
        teach: Teach | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._teach, self.pictures = teach, pictures
        self._structured: StructuredDoor | None = None
        self._structured_lock = threading.Lock()
        self._seed = seed
        self._numbers = itertools.count()
        self._resolved: Resolved | None = None

    def known_grammar(self, params: SamplingParams) -> Outcome | None:
        """The grammar of ``params`` if it was compiled before. Raises InvalidRequestError if it was refused before."""
        return None if self._structured is None else self._structured.known(params)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
        ids: list[int] | None = None,
        media: Sequence[EncoderItem] = (),
        speech: SpeechRules | None = None,
        align: Alignment | None = None,
        grammar: Outcome | None = None,
        job: Job | None = None,
    ) -> PreparedRequest:
        """Check one request and make its AddRequests. With structured_outputs it may take seconds (a new grammar).

        Args:
            add_special_tokens: False for text that a chat template has already furnished with them.
            cache_salt: used unless the prompt brings its own.
            ids: of the prompt's text, where the caller has had it tokenised.
            media: what an encoder reads, where the caller has prepared it: the prompt is a decoder's, or has placeholders
                (``with_pictures``).
            speech: rules of a transcript. align: see ``AddRequest``.
            grammar: of ``known_grammar``, where the caller cannot wait for a new one.
            job: by which another thread can give up the compiling of a new one.

        Raises:
            InvalidRequestError: with ``parameter`` naming the field.
            BusyError: a grammar could not be compiled now.
        """
        if not isinstance(params, SamplingParams):
            raise _wrong_params(params)
        if self.info.encoder and not media:
            decoder, media = split_prompt(prompt, self.info, self.tokenizer)
            prompt = cast(Prompt, decoder)
        elif isinstance(prompt, Mapping) and "multi_modal_data" in prompt:
            prompt, media, furnished = self.with_pictures(prompt, self.see(prompt, job))
            add_special_tokens = add_special_tokens and not furnished
        text, given, own_salt = self._read_prompt(prompt)
        cache_salt = checked_salt(cache_salt)
        self._check_tokenizer_needs(params)
        self._check_vocabulary(params)
        self._check_logprobs(params)
        if text is None:
            ids = given
        elif ids is None:
            ids = self._encode(text, add_special_tokens)
        else:
            self._check_prompt_ids(ids)
        resolved = self._resolve(params, self._max_tokens(ids, params))
        children = self._fan_out(text, ids, resolved, cache_salt if own_salt is None else own_salt)
        if self.info.encoder:
            for child in children.children if media else ():
                child.media, child.speech, child.align = list(media), speech, align
        else:
            place(self.info, children.children, ids, media)
        if params.structured_outputs is not None:
            grammar = self._structured_door().prepare(params, grammar, job)
            for child in children.children:
                child.automaton, child.host_grammar = grammar.automaton, grammar.host_grammar
        return children

    def see(self, prompt: Mapping[str, Any], job: Job | None = None) -> list[Picture]:
        """The pictures of a prompt with ``multi_modal_data``, prepared; it may take seconds."""
        return see(self.pictures, self.info, prompt, job)

    def with_pictures(self, prompt: Mapping[str, Any], seen: Sequence[Picture]) -> tuple[Any, list[EncoderItem], bool]:
        """The prompt with what stands for its pictures, their items, and whether it brings its own first token."""
        assert self.pictures is not None
        text, ids, _ = self._read_prompt({name: prompt[name] for name in prompt if name != "multi_modal_data"})
        if text is not None and self.tokenizer is None:
            raise _no_tokenizer()
        found, furnished, seen = filled(self.pictures, prompt, text, ids, seen)
        return found, [item for each in seen for item in each.items], furnished

    def as_text(self, text: str) -> str:
        """``text`` such that the control tokens which it spells stay text."""
        return text if self.tokenizer is None else self.tokenizer.control_texts.as_text(text)

    def close(self) -> None:
        """End the processes that compile grammars and prepare pictures. Safe to call twice."""
        if self.pictures is not None:
            self.pictures.close()
        if self._structured is not None:
            self._structured.close()

    def _structured_door(self) -> StructuredDoor:
        if self.tokenizer is None or self._teach is None:
            raise InvalidRequestError(
                "structured_outputs need a tokenizer, but skip_tokenizer_init is set", "structured_outputs"
            )
        from headway.api.structured.door import StructuredDoor

        with self._structured_lock:
            if self._structured is None:
                self._structured = StructuredDoor(self.info, self.tokenizer, self._teach)
            return self._structured

    def _read_prompt(self, prompt: object) -> tuple[str | None, list[int], str | None]:
        """Text or token ids, and the salt, of any form of prompt; ids are checked here."""
        salt: object = None
        if isinstance(prompt, Mapping):
            known = ("prompt", "prompt_token_ids", "cache_salt", "parse_special")
            for key in prompt:
                if key not in known:
                    raise UnknownParameterError(str(key), known, "a prompt")
            if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise InvalidRequestError('a prompt needs either "prompt" or "prompt_token_ids"', "prompt")
            salt = prompt.get("cache_salt")
            parse_special = prompt.get("parse_special", True)
            if not isinstance(parse_special, bool):
                raise InvalidRequestError(f"parse_special must be true or false, got {parse_special!r:.80}", "prompt")
            name = "prompt" if "prompt" in prompt else "prompt_token_ids"
            prompt = prompt[name]
            if (name == "prompt") != isinstance(prompt, str):
                raise InvalidRequestError(
                    f'"{name}" must be {"a string" if name == "prompt" else "a list of token ids"}, '
                    f"got {type(prompt).__name__}",
                    name,
                )
            if not parse_special and isinstance(prompt, str):
                prompt = self.as_text(prompt)
        if isinstance(prompt, str):
            return prompt, [], checked_salt(salt)
        if not isinstance(prompt, (list, tuple)):
            raise InvalidRequestError(
                f"a prompt must be a string, a list of token ids or a dictionary, got {type(prompt).__name__}", "prompt"
            )
        self._check_prompt_ids(prompt)
        return None, list(prompt), checked_salt(salt)

    def _check_prompt_ids(self, ids: Sequence[object]) -> None:
        if not ids:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
        self._check_fits(len(ids))
        size = self.info.vocab_size
        # A loop over Python integers is a tenth of the time of a prefill; it runs only to name the culprit.
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < size:  # type: ignore[type-var,operator]
            return
        for token in ids:
            if not is_int(token):
                raise InvalidRequestError(f"token ids of a prompt must be integers, got {token!r:.80}", "prompt")
            if not 0 <= token < size:  # type: ignore[operator]
                raise InvalidRequestError(f"token id {token} is outside of the vocabulary (0 to {size - 1})", "prompt")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise _no_tokenizer()
        if not text:
            raise InvalidRequestError("the prompt is empty; give at least one character", "prompt")
        ids = encode_bounded(
            self.tokenizer, text, self.info.max_model_len - 1, {"add_special_tokens": add_special_tokens}
        )
        self._check_prompt_ids(ids)
        return ids

    def _check_tokenizer_needs(self, params: SamplingParams) -> None:
        if self.tokenizer is not None:
            return
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise InvalidRequestError(f"{name} needs a tokenizer, but skip_tokenizer_init is set", name)

    def _check_vocabulary(self, params: SamplingParams) -> None:
        size = self.info.vocab_size
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            for token in getattr(params, name) or ():
                if not 0 <= token < size:
                    message = f"{name}: token id {token} is outside of the vocabulary (0 to {size - 1})"
                    raise InvalidRequestError(message, name)

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            most = self.info.max_logprobs
            if asked is not None and asked > most:
                raise InvalidRequestError(
                    f"{name} must be at most {most}, got {asked}; start the engine with a larger max_logprobs", name
                )

    def _check_fits(self, num_tokens: int) -> None:
        limit = self.info.max_model_len
        if num_tokens >= limit:
            raise too_long(f"the prompt has {num_tokens} tokens", limit - 1)

    def _max_tokens(self, ids: list[int], params: SamplingParams) -> int:
        """max_tokens cut to the room that the prompt leaves."""
        limit = self.info.max_model_len
        room = limit - len(ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        check_logprobs(params, most, params.n)
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} does not fit: the prompt has {len(ids)} tokens "
                f"and max_model_len is {limit}",
                "min_tokens",
            )
        return most

    def _bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """Token sequences of each word as it stands and, where that is a different word token, after a space."""
        sequences: list[list[int]] = []
        total = 0
        if self.tokenizer is None:
            return sequences
        for word in words:
            plain = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not plain:
                raise InvalidRequestError(f"bad_words entry {word!r:.80} has no tokens", "bad_words")
            sequences.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences.append(spaced)
            total += len(plain) + (len(spaced) if sequences[-1] is spaced else 0)
            if len(sequences) > MAX_BAD_WORDS_SEQUENCES or total > MAX_BAD_WORDS_TOKENS:  # before more is tokenised
                raise InvalidRequestError(
                    f"bad_words come to more than {MAX_BAD_WORDS_SEQUENCES} sequences or {MAX_BAD_WORDS_TOKENS} tokens "
                    "together, which is the most",
                    "bad_words",
                )
        for token in itertools.chain.from_iterable(sequences):
            if not 0 <= token < self.info.vocab_size:
                raise InvalidRequestError(f"bad_words: token id {token} is outside of the vocabulary", "bad_words")
        return sequences

    def _resolve(self, params: SamplingParams, max_tokens: int) -> Resolved:
        """Copies, checked once more: the caller may have changed, or may yet change, what it gave."""
        last = self._resolved
        if last is not None and last.whole.max_tokens == max_tokens and last.given == params:
            return last
        whole = replace(params, max_tokens=max_tokens)
        # Strings are this floor's business. One completion is enough to report on the prompt that all of them share.
        first = replace(whole, n=1, stop=None, bad_words=[], structured_outputs=None)
        others = replace(first, prompt_logprobs=None) if whole.n > 1 else first
        resolved = Resolved(replace(params), whole, first, others)
        lists = (params.allowed_token_ids, params.logprob_token_ids, params.structured_outputs)
        self._resolved = resolved if lists == (None, None, None) else None  # those are not copied, so may change unseen
        return resolved

    def _fan_out(self, text: str | None, ids: list[int], resolved: Resolved, salt: str | None) -> PreparedRequest:
        params = resolved.whole
        bad_words = self._bad_words(params.bad_words)
        number = next(self._numbers)
        seed = mix64(self._seed, number) if params.seed is None else params.seed
        children = [
            AddRequest(
                request_id=f"{number}-{i}",
                prompt_token_ids=ids,
                params=resolved.others if i else resolved.first,
                seed=(seed + i) & MASK64,
                eos_token_ids=[] if params.ignore_eos else self.info.eos_token_ids,
                bad_words_token_ids=bad_words,
                cache_salt=salt,
            )
            for i in range(params.n)
        ]
        return PreparedRequest(text, ids, params, children)


def check_logprobs(params: SamplingParams, max_tokens: int, count: int, prompts: Sequence[int] = ()) -> None:
    """Raises InvalidRequestError where a request keeps too many log-probabilities.

    Args:
        max_tokens: of each completion.
        count: completions.
        prompts: about how many tokens each of several prompts has.
    """
    each = len(params.logprob_token_ids or ()) or params.logprobs
    asked = [("logprobs", 0 if each is None or count < 2 else count * max_tokens * (each + 1))]
    if params.prompt_logprobs is not None and len(prompts) > 1:
        asked.append(("prompt_logprobs", sum(prompts) * (params.prompt_logprobs + 1)))
    for name, entries in asked:
        if entries > MAX_LOGPROBS_OF_A_REQUEST:
            raise InvalidRequestError(
                f"{name}: {entries} log-probabilities may come of this, and one request may ask for "
                f"{MAX_LOGPROBS_OF_A_REQUEST}; lower n, max_tokens or {name}, or send several requests",
                name,
            )


def checked_salt(salt: object) -> str | None:
    """A prompt's cache_salt, if it has one. Raises InvalidRequestError."""
    if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= MAX_CACHE_SALT_CHARS):
        raise InvalidRequestError(f"cache_salt must be text of 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt")
    return salt


def _no_tokenizer() -> InvalidRequestError:
    return InvalidRequestError("skip_tokenizer_init is set: the prompt must be token ids, not text", "prompt")


def _wrong_params(params: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}", "sampling_params"
    )
