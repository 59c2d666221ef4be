"""Texts to token ids, however long a client makes them.

A prompt that cannot fit is refused before it is tokenised: by the longest token, where the tokenizer is one whose tokens each
stand for a bounded piece of text (``token_bound``), and else, window by window, as soon as enough tokens have been seen.
What remains is tokenised where it holds up nobody: short texts at once, longer ones in a few threads, very long ones in
processes with limits of processor time and memory, which are killed when the client leaves.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from headway.api.control_text import MarkedText
from headway.api.killable import Job, Pool, TooMuchError, serve
from headway.api.lanes import Lane
from headway.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT_CHARS: Final = 4000
"""Longer texts are tokenised beside the event loop."""
INLINE_CHARS: Final = 2**16
"""So much of shorter ones is tokenised in one turn of the event loop, some .05 s, before the others go the same way."""
PROCESS_CHARS: Final = 2**18
"""Longer ones in a process: a thread cannot be stopped, and needs up to .5 s and 60 MB for so many characters."""
BIG_CHARS: Final = 2**20
"""After a text longer than that its process ends, so that the memory returns to the system."""
CHARS_A_TOKEN: Final = 32
"""Of a text with more characters for each token that fits, the windows are counted before all of it is tokenised."""
MIN_WINDOW: Final = 2**12
SLACK_TOKENS: Final = 8
"""What the cuts of a window may have added to its tokens."""
MAX_SECONDS: Final = 30.0
MAX_MEMORY_BYTES: Final = 1536 * 1024 * 1024
MAX_WAITING_CHARS: Final = 64 * 1024 * 1024
THREADS = PROCESSES = 2


class TextJob(msgspec.Struct, array_like=True):
    """One text for the process. ``most``, ``pools``: as for ``encode_bounded``; ``mark``: the text is the marked form of a
    MarkedText.
    """

    text: str
    options: dict[str, bool]
    most: int | None
    mark: str | None = None
    pools: bool = False


class TextReply(msgspec.Struct, array_like=True):
    """Its token ids, or why there are none."""

    ids: list[int] | None
    refusal: str | None = None


def encode_bounded(
    tokenizer: Tokenizer,
    text: str,
    most: int | None,
    options: dict[str, bool],
    stop: Callable[[], bool] = lambda: False,
    pools: bool = False,
) -> list[int]:
    """Ids of ``text``.

    Args:
        most: tokens that fit; a text that certainly has more is refused, most of it unread. None: all are wanted.
        options: keywords of ``Tokenizer.encode``.
        stop: asked between windows; True: the request was given up.
        pools: the request pools, so that the refusal has to say something else.

    Raises:
        InvalidRequestError: more than ``most`` tokens for certain, or no valid Unicode. Fewer are not certain: see to it.
    """
    if most is not None:
        _refuse_by_length(tokenizer, text, most, pools)
        _refuse_by_windows(tokenizer, text, most, options, stop, pools)
    return tokenizer.encode(text, **options)


def _refuse_by_length(tokenizer: Tokenizer, text: str, most: int, pools: bool) -> None:
    if len(text) <= max(most, LONG_TEXT_CHARS):
        return
    bound = getattr(tokenizer, "token_bound", None)
    if bound is None or 4 * len(text) <= bound.longest * most:
        return
    if _eats_blanks(tokenizer, text):
        text = "".join(text.split())
    least = bound.least(text)
    if least > most:
        raise too_long(f"the prompt's {len(text)} characters are at least {least} tokens", most, pools)


def _refuse_by_windows(
    tokenizer: Tokenizer, text: str, most: int, options: dict[str, bool], stop: Callable[[], bool], pools: bool
) -> None:
    window = min(max(CHARS_A_TOKEN * most, MIN_WINDOW), PROCESS_CHARS)
    if len(text) <= max(window, CHARS_A_TOKEN * most // 4):
        return
    options = {**options, "add_special_tokens": False}
    seen, eats = 0, _eats_blanks(tokenizer, text)
    for start in range(0, len(text), window):
        part = text[start : start + window]
        part = " ".join(part.split()) if eats else part
        seen += max(0, len(tokenizer.encode(part, **options)) - SLACK_TOKENS)
        if seen > 2 * most:  # twice: of what the cuts change no more is known than that it is little
            end = min(start + window, len(text))
            raise too_long(f"the first {end} of the prompt's {len(text)} characters are {seen} tokens", most, pools)
        if stop():
            raise InvalidRequestError("the request was given up while its text was tokenised", "prompt")


def _eats_blanks(tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text holds a token that may stand for any number of blanks beside it."""
    return any(each in text for each in getattr(tokenizer, "blank_eaters", ()))


def too_long(what: str, most: int, pools: bool = False) -> InvalidRequestError:
    """The error for a prompt with more than ``most`` tokens."""
    if pools:
        fix = "shorten the text, or set truncate_prompt_tokens to have its end cut off (-1: whatever does not fit)"
        return InvalidRequestError(f"{what}, but at most {most} fit (max_model_len); {fix}", "prompt")
    return InvalidRequestError(
        f"{what}, but at most {most} fit: max_model_len is {most + 1} and at least one token has to be generated; "
        f"shorten the prompt or raise max_model_len",
        "prompt",
    )


class TextLanes:
    """Tokenises texts for one event loop, in threads and processes of its own.

    Args:
        most: tokens of a prompt that fit.
        pools: the model's requests pool.
    """

    def __init__(self, tokenizer: Tokenizer, most: int, pools: bool = False) -> None:
        self._tokenizer, self._most, self._pools = tokenizer, most, pools
        self._threads = Lane("tokenising", THREADS, MAX_WAITING_CHARS)
        self._processes = Lane("tokenising of long texts", PROCESSES, MAX_WAITING_CHARS)
        self._pool: Pool | None = None
        self._inline = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def encode(self, text: str, *, whole: bool = False, **options: bool) -> list[int]:
        """Ids of ``text``; ``options`` as for ``Tokenizer.encode``.

        Args:
            whole: however many there are; else too many are refused.

        Raises:
            InvalidRequestError: too many tokens, too much time or memory, or no valid Unicode.
            BusyError: too many texts are being tokenised.
        """
        most = None if whole else self._most
        # A marked text may need the tokenizer's twin, which takes a while to build.
        if len(text) <= LONG_TEXT_CHARS and not isinstance(text, MarkedText) and self.has_time(len(text)):
            return encode_bounded(self._tokenizer, text, most, options)
        if most is not None and len(text) > most:
            await self.beside(lambda: getattr(self._tokenizer, "token_bound", None), 0)  # takes a while, once
            _refuse_by_length(self._tokenizer, text, most, self._pools)
        if len(text) > PROCESS_CHARS and getattr(self._tokenizer, "backend", None) is not None:
            marked = (text.marked, text.mark) if isinstance(text, MarkedText) else (text, None)
            request = TextJob(marked[0], options, most, marked[1], self._pools)
            return await self._processes.run(lambda job: self._in_process(request, job), len(text))
        return await self._threads.run(
            lambda job: encode_bounded(self._tokenizer, text, most, options, lambda: job.given_up, self._pools),
            len(text),
        )

    def has_time(self, size: int) -> bool:
        """Whether this turn of the event loop has time for a short text."""
        loop = asyncio.get_running_loop()
        if self._inline == 0 or loop is not self._loop:
            self._loop, self._inline = loop, 0
            loop.call_soon(self._next_turn)
        self._inline += size
        return self._inline <= INLINE_CHARS

    def _next_turn(self) -> None:
        self._inline = 0

    async def beside(self, work: Callable[[], T], size: int) -> T:
        """``work()`` in one of the threads; ``size`` in characters, by which it waits its turn. Raises BusyError."""
        return await self._threads.run(lambda _: work(), size)

    async def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of ``ids``."""
        if len(ids) <= LONG_TEXT_CHARS:
            return self._tokenizer.decode(ids, skip_special_tokens)
        return await self.beside(lambda: self._tokenizer.decode(ids, skip_special_tokens), len(ids))

    def _in_process(self, request: TextJob, job: Job) -> list[int]:
        try:
            data = msgspec.msgpack.encode(request)
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"text is not valid Unicode: {error}") from None
        try:
            answer = self._processes_pool().run(data, job, keep=len(request.text) <= BIG_CHARS)
        except TooMuchError as error:
            limit = f"over {MAX_SECONDS:g} s" if error.time else f"over {MAX_MEMORY_BYTES >> 20} MiB of memory"
            raise InvalidRequestError(f"this text takes {limit} to tokenise; shorten it", "prompt") from None
        reply = msgspec.msgpack.decode(answer, type=TextReply)
        if reply.ids is None:
            raise InvalidRequestError(reply.refusal or "the text cannot be tokenised", "prompt")
        return reply.ids

    def _processes_pool(self) -> Pool:
        if self._pool is None:
            boot = self._tokenizer.backend.to_str().encode()
            self._pool = Pool(
                "headway.api.long_texts", boot, PROCESSES, MAX_SECONDS, MAX_MEMORY_BYTES, "tokenising a long text"
            )
        return self._pool

    def close(self) -> None:
        """End the processes, take no more texts."""
        if self._pool is not None:
            self._pool.close()
        self._threads.close()
        self._processes.close()


# -- inside the process ------------------------------------------------------------------------------------------------


def start(boot: bytes) -> Callable[[bytes], bytes]:
    """What tokenises one text after the other."""
    import tokenizers

    from headway.api.tokenizer import Tokenizer

    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(boot.decode()))
    decode = msgspec.msgpack.Decoder(TextJob).decode

    def work(data: bytes) -> bytes:
        job = decode(data)
        try:
            text = job.text if job.mark is None else MarkedText.of(job.text, job.mark)
            reply = TextReply(encode_bounded(tokenizer, text, job.most, job.options, pools=job.pools))
        except InvalidRequestError as error:
            reply = TextReply(None, str(error))
        return msgspec.msgpack.encode(reply)

    return work


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], start))
