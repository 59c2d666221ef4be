"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from headway.core.errors import (
    BusyError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""By status; of others the client's are "invalid_request_error", the server's "server_error"."""

LONG_FIELDS = frozenset({"prompt", "messages", "input", "inputs", "text_2", "data_2", "documents", "texts"})
"""Fields whose texts may be too long for the model."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: what is wrong and how to mend it.
        param: the field at fault.
        code: short word programs may compare.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        """The body, encoded."""
        return msgspec.json.encode(self.body())

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.json(), status_code=self.status, headers=self.headers, media_type="application/json")


def refuse(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param, code)


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about SamplingParams' fields leave under the names that the client has used for them.

    Args:
        names: parameter of an InvalidRequestError -> field of the request; others keep theirs.
    """
    try:
        yield
    except InvalidRequestError as error:
        name = names.get(error.parameter or "")
        if name is None or name == error.parameter:
            raise
        text, old = str(error), f"{error.parameter}"
        text = name + text[len(old) :] if text.startswith(old) else text
        for ours, theirs in names.items():
            if "_" in ours:  # no word that the text might mean otherwise
                text = re.sub(rf"\b{ours}\b", theirs, text)
        raise InvalidRequestError(text, name) from error


def shutting_down(cut: bool = False) -> ApiError:
    """The answer while draining, and to a request that the drain has ended before its answer was complete."""
    what = "the server is shutting down" + (" and has cut this answer short" if cut else "")
    return ApiError(503, f"{what}; ask another one", None, "shutting_down", {"Retry-After": "1"})


def as_api_error(error: BaseException) -> ApiError | None:
    """What a client is told of ``error``; None for one that was not raised on purpose."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        too_long = "max_model_len" in str(error) and error.parameter in LONG_FIELDS
        return refuse(str(error), error.parameter, "context_length_exceeded" if too_long else None)
    if isinstance(error, BusyError):
        return ApiError(503, str(error), None, "busy", {"Retry-After": "1"})
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), None, "request_failed")
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has stopped", None, "engine_dead", {"Retry-After": "5"})
    return None
