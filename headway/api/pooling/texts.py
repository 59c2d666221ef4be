"""Many texts to token ids at once, cut to length before most of a long one is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from headway.api.control_text import MarkedText
from headway.api.long_texts import LONG_TEXT_CHARS, PROCESS_CHARS, encode_bounded, too_long
from headway.api.pooling.frame import Frame, pair_frame, single_frame
from headway.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer

CHARS_A_TOKEN: Final = 8
"""Of a text that will be cut, so many characters for each token are read at first."""
LONGEST_TOKEN: Final = 32
"""Characters a token, above which a long text that will be cut is refused: all of it would have to be read."""
SLACK_TOKENS: Final = 64
"""Tokens beyond the wanted ones that must follow before a cut: what the last of them are may depend on the text cut off."""

BARE: Final = {"add_special_tokens": False}


class Texts:
    """Tokenises for one model. Safe to share between threads.

    Args:
        most: tokens of a text that fit, special ones included.
    """

    def __init__(self, tokenizer: Tokenizer, most: int, *, longest_token: int = LONGEST_TOKEN) -> None:
        self.tokenizer, self.most, self._longest_token = tokenizer, most, longest_token
        backend = getattr(tokenizer, "backend", None)
        self.single: Frame | None = None if backend is None else single_frame(backend)
        self._pair: list[Frame | None] = []

    @property
    def pair(self) -> Frame:
        """Around two texts. Raises InvalidRequestError where the tokenizer knows no pairs."""
        if not self._pair:
            backend = getattr(self.tokenizer, "backend", None)
            self._pair.append(None if backend is None else pair_frame(backend))
        frame = self._pair[0]
        if frame is None:
            raise InvalidRequestError("this model's tokenizer does not join two texts; score token ids of your own")
        return frame

    def bodies(self, texts: Sequence[str], keep: int | None, side: str = "right") -> list[list[int]]:
        """Ids of each text, without special tokens.

        Args:
            keep: tokens to keep of each; None refuses texts that certainly have more than fit.
            side: which end is cut off.

        Raises:
            InvalidRequestError: too long, or no valid Unicode.
        """
        if keep is None:
            if any(len(text) > LONG_TEXT_CHARS for text in texts):
                self._refuse_endless(texts)
                return [encode_bounded(self.tokenizer, text, self.most, BARE, pools=True) for text in texts]
            return self._batch(list(texts))
        long = (keep + SLACK_TOKENS) * CHARS_A_TOKEN
        found = self._batch([text if len(text) <= long else "" for text in texts])
        for i, text in enumerate(texts):
            if len(text) > long:
                found[i] = self._part(text, keep, side)
        if side == "left":
            return [ids[max(0, len(ids) - keep) :] for ids in found]
        return [ids[:keep] if len(ids) > keep else ids for ids in found]

    def framed(
        self, texts: Sequence[str], truncate: int | None, side: str = "right", tail: int | None = None
    ) -> list[list[int]]:
        """Ids of each text with special tokens around it, ``truncate`` at most.

        Args:
            tail: token that all have to end with.
        """
        frame = self.single
        if frame is None:
            return self._unframed(texts, truncate, side)
        if tail is not None and frame.after[-1:] != (tail,):
            frame = Frame(before=frame.before, after=(*frame.after, tail))
        keep = None if truncate is None else self.room(truncate, frame)
        return [frame.single(ids) for ids in self.bodies(texts, keep, side)]

    def _unframed(self, texts: Sequence[str], truncate: int | None, side: str) -> list[list[int]]:
        """Where the tokenizer puts no fixed tokens around a text."""
        options = {"add_special_tokens": True}
        most = self.most if truncate is None else None
        found = [encode_bounded(self.tokenizer, text, most, options, pools=True) for text in texts]
        if truncate is None or all(len(ids) <= truncate for ids in found):
            return found
        if hasattr(self.tokenizer, "backend"):
            raise InvalidRequestError(
                "truncate_prompt_tokens: this model's tokenizer puts no fixed special tokens around a text; cut texts "
                "before sending them",
                "truncate_prompt_tokens",
            )
        return [ids[:truncate] if side == "right" else ids[max(0, len(ids) - truncate) :] for ids in found]

    def room(self, truncate: int, frame: Frame) -> int:
        """Tokens that texts may have in a frame. Raises InvalidRequestError where there is none."""
        if truncate <= frame.size:
            raise InvalidRequestError(
                f"truncate_prompt_tokens={truncate} leaves no room for text: the model adds {frame.size} special tokens",
                "truncate_prompt_tokens",
            )
        return truncate - frame.size

    def _batch(self, texts: list[str]) -> list[list[int]]:
        batch: Callable[..., list[list[int]]] | None = getattr(self.tokenizer, "encode_batch", None)
        if batch is None or any(isinstance(text, MarkedText) for text in texts):
            return [self.tokenizer.encode(text, **BARE) for text in texts]
        return batch(texts, **BARE)

    def _refuse_endless(self, texts: Sequence[str]) -> None:
        most = max(PROCESS_CHARS, self._longest_token * self.most)
        for text in texts:
            if len(text) > most:
                raise too_long(f"a text has {len(text)} characters, and {most} are read at most", self.most, pools=True)

    def _part(self, text: str, keep: int, side: str) -> list[int]:
        """Ids of as much of a long text as gives ``keep`` of them, and a few."""
        size, most = (keep + SLACK_TOKENS) * CHARS_A_TOKEN, max(PROCESS_CHARS, self._longest_token * keep)
        while True:
            part = _to_blank(text[:size]) if side == "right" else _to_blank(text[-size:][::-1])[::-1]
            [ids] = self._batch([part if size < len(text) else text])
            if size >= len(text) or len(ids) >= keep + SLACK_TOKENS:
                return ids
            if size >= most:
                raise InvalidRequestError(
                    f"{size} characters of a text are {len(ids)} tokens only: it is mostly blank or repeats itself; "
                    "shorten it before sending it",
                    "prompt",
                )
            size = min(2 * size, most)


def _to_blank(part: str) -> str:
    """``part`` up to its last blank, if there is one: no word is cut."""
    place = max(part.rfind(" "), part.rfind("\n"))
    return part[:place] if place > 0 else part
