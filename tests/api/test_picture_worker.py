"""The process that decodes pictures answers every job: a picture, or why there is none."""

from __future__ import annotations

from typing import Any

import pytest

from headway.api.pictures import worker
from headway.core.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("fails", "says"),
    [(InvalidRequestError("image: no picture"), "image: no picture"), (MemoryError(), "takes too much memory")],
)
def test_what_cannot_be_prepared_has_a_reason(fails: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(data: bytes) -> Any:
        raise fails

    monkeypatch.setattr(worker, "decode_image", decode)
    reply = worker.prepare(object(), b"data")  # type: ignore[arg-type]  # nothing gets as far as that
    assert reply.item is None and not reply.pieces and says in (reply.error or "")
