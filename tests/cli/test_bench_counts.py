"""What ``headway bench serve`` counts of one answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.cli.bench.load import Record, _Call


@pytest.mark.parametrize("usage", [None, 7])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("pieces", [1, 4])
def test_tokens_are_counted_by_what_the_server_says_of_them(usage: int | None, ids: bool, pieces: int) -> None:
    """Its usage first, then the ids that it sent, of which a piece may hold several, and else pieces."""
    call = _Call(Record(0), keeps_text=True)
    for number in range(pieces):
        choice: dict[str, Any] = {"text": "ab"} | ({"token_ids": [5] * (number + 2)} if ids else {})
        call.take(200, f"data: {json.dumps({'choices': [choice]})}\n\n".encode(), 1.0 + number)
    if usage is not None:
        call.take(200, f'data: {{"choices": [], "usage": {{"completion_tokens": {usage}}}}}\n\n'.encode(), 9.0)
    call.take(200, b"data: [DONE]\n\n", 9.0)
    call.finish(200)
    record = call.record
    assert record.error is None and record.counted == (usage is not None)
    assert record.output_tokens == (usage or (sum(range(2, pieces + 2)) if ids else pieces))
    assert record.num_chunks == pieces and record.itl == [1.0] * (pieces - 1) and record.text == "ab" * pieces
