"""The output of /v1/responses as it grows: messages and calls, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headway.server.call_reader import CallStart, Content, Piece
from headway.server.report import new_id
from headway.server.tool_parsers import ToolParser

Told = tuple[str, dict[str, Any]]
"""An event without its "response." and its number."""


class OutputItems:
    """Items of one response, in the order in which they begin. An answer without calls has one message, maybe an empty one.

    Args:
        single: at most one call is kept.

    Attributes:
        done: the items that have ended, as the response object shows them.
    """

    def __init__(self, parser: ToolParser, single: bool) -> None:
        self._parser, self._single = parser, single
        self._open: dict[str, Any] | None = None
        self._text = ""
        """Of the open item: its text or its arguments."""
        self._dropping = False
        self.done: list[dict[str, Any]] = []

    def take(self, text: str, end: bool) -> Iterator[Told]:
        """More text: what it makes known."""
        for piece in self._parser.push(text) if text else ():
            yield from self._one(piece)
        if end:
            for piece in self._parser.finish():
                yield from self._one(piece)

    def end(self, status: str) -> Iterator[Told]:
        """The answer is over: the item that is open ends with ``status``."""
        if self._open is None and not self.done:
            yield from self._begin(_message())
        yield from self._close(status)

    def _one(self, piece: Piece) -> Iterator[Told]:
        if isinstance(piece, Content):
            if self._open is None or self._open["type"] != "message":
                yield from self._begin(_message())
            yield from self._grow(piece.text, "output_text.delta", {"content_index": 0, "logprobs": []})
        elif isinstance(piece, CallStart):
            self._dropping = self._single and any(item["type"] == "function_call" for item in self._all())
            if not self._dropping:
                yield from self._begin(_call(piece.name))
        elif not self._dropping:
            yield from self._grow(piece.text, "function_call_arguments.delta", {})

    def _all(self) -> list[dict[str, Any]]:
        return self.done if self._open is None else [*self.done, self._open]

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.done)}

    def _grow(self, text: str, kind: str, more: dict[str, Any]) -> Iterator[Told]:
        self._text += text
        yield kind, {**self._place(), "delta": text, **more}

    def _begin(self, item: dict[str, Any]) -> Iterator[Told]:
        yield from self._close("completed")
        self._open = item
        yield "output_item.added", {"output_index": len(self.done), "item": item}
        if item["type"] == "message":
            yield "content_part.added", {**self._place(), "content_index": 0, "part": _part("")}

    def _close(self, status: str) -> Iterator[Told]:
        if self._open is None:
            return
        place, text = self._place(), self._text
        if self._open["type"] == "message":
            item = {**self._open, "status": status, "content": [_part(text)]}
            yield "output_text.done", {**place, "content_index": 0, "text": text, "logprobs": []}
            yield "content_part.done", {**place, "content_index": 0, "part": _part(text)}
        else:
            item = {**self._open, "status": status, "arguments": text}
            yield "function_call_arguments.done", {**place, "name": item["name"], "arguments": text}
        yield "output_item.done", {"output_index": place["output_index"], "item": item}
        self.done.append(item)
        self._open, self._text = None, ""


def _message() -> dict[str, Any]:
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _call(name: str) -> dict[str, Any]:
    made = {"id": new_id("fc_"), "type": "function_call", "call_id": new_id("call_"), "name": name}
    return {**made, "arguments": "", "status": "in_progress"}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
