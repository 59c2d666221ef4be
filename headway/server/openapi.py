"""The OpenAPI description, made from the structs that decode requests, so that it cannot say anything else."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headway.server import protocol
from headway.server.pooling.protocol import KINDS as POOLING_KINDS

KINDS: Final = (
    protocol.CompletionRequest,
    protocol.ChatRequest,
    protocol.ResponsesRequest,
    protocol.TokenizeRequest,
    protocol.DetokenizeRequest,
    *POOLING_KINDS,
)
ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
STATUSES: Final = {
    400: "the request is wrong; the message names the field",
    401: "no valid API key",
    403: "this Host is not served",
    404: "no such route or model",
    408: "the body took too long",
    413: "the body is too long",
    414: "the path or its query is too long",
    415: "the body is not application/json",
    429: "the queue is full",
    500: "the request failed inside the server",
    503: "not ready, draining, busy, or the engine has stopped",
    504: "the request took too long",
}


def operation(kind: type[msgspec.Struct] | None = None, streams: bool = False) -> dict[str, Any]:
    """Keyword arguments of a route: its request body, and the answers it may give.

    Args:
        kind: struct of the body; None for routes without one.
        streams: whether the answer may be a stream of events.
    """
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    codes = STATUSES if kind is not None else {c: STATUSES[c] for c in (401, 403, 404, 414, 500, 503)}
    answers: dict[int | str, dict[str, Any]] = {code: {"description": text, **error} for code, text in codes.items()}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers[200] = {"description": "the answer", "content": content}
    extra: dict[str, Any] = {}
    if kind is not None:
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return {"responses": answers, "openapi_extra": extra}


def complete(description: dict[str, Any], keys: bool) -> dict[str, Any]:
    """Add the components to what FastAPI made of the routes.

    Args:
        keys: whether the server asks for API keys.
    """
    _, schemas = msgspec.json.schema_components(KINDS, ref_template="#/components/schemas/{name}")
    components = description.setdefault("components", {})
    components.setdefault("schemas", {}).update({**schemas, "Error": ERROR})
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"key": []}]
    return description
