"""Token ids to text, one token at a time, with stop strings found wherever they fall across token borders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.params import SamplingParams

if TYPE_CHECKING:
    from headway.api.text_stream import TextStream
    from headway.api.tokenizer import Tokenizer


class StopMatcher:
    """Finds stop strings in text fed piece by piece (Aho-Corasick: one step per character however many strings).

    The string that is complete first wins, the longest if several are complete at the same character; so the outcome
    does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: list[str]) -> None:
        # Node 0 is the root; a node stands for a prefix of a stop string of ``depth`` characters.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            node = 0
            for char in stop:
                child = self._next[node].setdefault(char, len(self._next))
                if child == len(self._next):
                    self._next.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._match.append(None)
                node = child
            self._match[node] = stop
        self._fall = [0] * len(self._next)
        self._link()
        self._state = 0

    def _link(self) -> None:
        """Fill ``fall``: from each node to the longest proper suffix that is itself a prefix, breadth first."""
        level = list(self._next[0].values())
        while level:
            below = []
            for node in level:
                if self._match[node] is None:
                    self._match[node] = self._match[self._fall[node]]
                for char, child in self._next[node].items():
                    self._fall[child] = self._step(self._fall[node], char)
                    below.append(child)
            level = below

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fall[state]
        return self._next[state].get(char, 0)

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str, ignore: bool = False) -> tuple[int, str] | None:
        """Take more text; (end within ``text``, stop string) of the first match, None if there is none.

        ``ignore``: go on past matches that end in this piece.
        """
        for i, char in enumerate(text):
            self._state = self._step(self._state, char)
            found = self._match[self._state]
            if found is not None and not ignore:
                return i + 1, found
        return None


class Detokenizer:
    """Text of one completion.

    Without stop strings nothing is decoded before somebody reads ``text``: a batch job pays for it once, at the end.

    Attributes:
        num_tokens: tokens taken; after a stop string, up to and including the token that completed it.
        stop: the stop string that ended the text, None while there is none.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.num_tokens = 0
        self.stop: str | None = None
        self._text = ""
        self._unread: list[int] = []
        self._pending = ""
        self._ended = False
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stream: TextStream | None = None
        if params.detokenize and tokenizer is not None:
            # A grammar promises something of the answer alone: no half character of the prompt may lead into it.
            tail = prompt_token_ids if params.structured_outputs is None else []
            self._stream = tokenizer.new_stream(tail, params.skip_special_tokens)
        assert not isinstance(params.stop, str)
        self._matcher = StopMatcher(params.stop) if params.stop and self._stream is not None else None

    @property
    def text(self) -> str:
        """The text so far; what may turn out to be a stop string is held back until that is decided."""
        if self._stream is not None and self._unread:
            self._text += "".join(map(self._stream.step, self._unread))
            self._unread.clear()
        if self._stream is not None and self._ended:
            self._text += self._stream.flush()
            self._stream = None
        return self._text

    def push(self, token_ids: list[int], ended_by_token: bool = False) -> bool:
        """Take new tokens; True when a stop string ended the text (later tokens of the call are not taken).

        Args:
            ended_by_token: the last one is an end-of-sequence or stop token: it gives no text unless
                include_stop_str_in_output.
        """
        silent = len(token_ids) - 1 if ended_by_token and not self._keep_stop else len(token_ids)
        if self._matcher is None or self._stream is None:
            self.num_tokens += len(token_ids)
            if self._stream is not None:
                self._unread += token_ids[:silent]
            return False
        for i, token in enumerate(token_ids):
            self.num_tokens += 1
            if i < silent and self._append(self._matcher, self._stream.step(token)):
                return True
        return False

    def finish(self) -> bool:
        """The completion has ended: release what was held back. True when that completed a stop string."""
        if self.stop is not None:
            return False
        if self._matcher is None or self._stream is None:
            self._ended = True
            return False
        stopped = self._append(self._matcher, self._stream.flush())
        self._text += self._pending
        self._pending = ""
        return stopped

    def _append(self, matcher: StopMatcher, piece: str) -> bool:
        match = matcher.feed(piece, ignore=self.num_tokens <= self._min_tokens)
        if match is None:
            self._pending += piece
            sure = len(self._pending) - matcher.held
            self._text += self._pending[:sure]
            self._pending = self._pending[sure:]
            return False
        end, self.stop = match
        whole = self._pending + piece[:end]
        self._text += whole if self._keep_stop else whole[: len(whole) - len(self.stop)]
        self._pending = ""
        return True
