"""Request bodies: bytes to typed structs, within limits, with errors that name the field."""

from __future__ import annotations

import asyncio
import difflib
import re
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request

from headway.server.errors import ApiError, refuse
from headway.server.fields import LENGTHS, ONLY_EMPTY, REFUSED
from headway.server.memory import Returns
from headway.server.plain import WHOLE_BODY

BODY_SECONDS: Final = 60.0
"""How long a client may take to send its body."""
SMALL_BODY: Final = 16 * 1024
"""So much of each body is not counted among those received together: most are no longer, and never refused for others."""
MAX_NAME_CHARS: Final = 200
"""Of a name in an error; a client may send one of megabytes."""
MAX_PARTS: Final = 2**18
"""Lists, objects and keys of a body, counted by their marks wherever these are, also within texts. While a body is decoded
nothing else is served: this many take 0.1 to 0.2 s, 16 MiB of nothing else would take two."""
MARKS: Final = (b"[", b"{", b":")
PLAIN: Final = frozenset({str, int, float, bool, type(None)})
NESTED: Final = (dict, list, msgspec.Struct)
FLAT: Final = frozenset({"prompt", "tokens", "input", "inputs"})
"""Fields whose type bounds their depth; they may hold very many numbers and are not walked."""

T = TypeVar("T", bound=msgspec.Struct)


class Body:
    """Reads bodies of one server. Belongs to the event loop's thread.

    Args:
        max_bytes: longest body.
        max_depth: deepest nesting of lists and objects.
        max_together: bytes of all bodies that are being received, the first ``SMALL_BODY`` of each not counted.
        option: by which ``max_bytes`` is set.
    """

    def __init__(self, max_bytes: int, max_depth: int, max_together: int, option: str = "--max-body-bytes") -> None:
        self._option = option
        self._max_bytes = max_bytes
        self._max_depth = max_depth
        self._max_together = max_together
        self._together = 0
        self._returns = Returns()

    async def read(self, request: Request, kind: type[T]) -> T:
        """The body as ``kind``. Raises ApiError (400, 408, 413, 415) and ClientDisconnect."""
        media = _header(request, b"content-type").partition(";")[0].strip().lower()
        if media != "application/json":
            # Other types can be sent by any web page without asking the browser first.
            raise ApiError(415, f"the body must be application/json, got {media or 'no Content-Type'!r:.80}")
        return self.decode(await self.read_bytes(request), kind)

    async def read_bytes(self, request: Request) -> bytes:
        """The body of any type. Raises ApiError (408, 413, 415) and ClientDisconnect."""
        coding = _header(request, b"content-encoding", "identity").strip().lower()
        if coding != "identity":
            message = f"bodies are not decompressed: send it as it is, without Content-Encoding: {coding:.80}"
            raise ApiError(415, message, headers={"Accept-Encoding": "identity"})
        return await self._bytes(request)

    async def _bytes(self, request: Request) -> bytes:
        announced = _header(request, b"content-length")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_long()
        whole: bytes | None = request.scope.pop(WHOLE_BODY, None)
        if whole is not None:
            self._returns.after(len(whole))
            return whole
        received = bytearray()
        counted = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    received += chunk
                    if len(received) > self._max_bytes:
                        raise self._too_long()
                    more = max(0, len(received) - SMALL_BODY) - counted
                    if more and self._together + more > self._max_together:
                        raise self._too_many()
                    self._together += more
                    counted += more
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
        finally:
            self._together -= counted
            self._returns.after(len(received))
        return bytes(received)

    def _too_many(self) -> ApiError:
        limit = self._max_together
        message = (
            f"too many long bodies are being received (together {limit} bytes at most, --max-bodies-bytes); try again"
        )
        return ApiError(503, message, None, "busy", {"Retry-After": "1", "Connection": "close"})

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._max_bytes} bytes ({self._option})", None, "body_size")

    def decode(self, body: bytes, kind: type[T]) -> T:
        """``body`` as ``kind``. Raises ApiError (400)."""
        if len(body) > MAX_PARTS and sum(map(body.count, MARKS)) > MAX_PARTS:
            marks = "[ { : of lists, objects and keys, those in texts counted, too"
            raise refuse(f"the body has more than {MAX_PARTS} marks {marks}; send several requests", None, "body_size")
        try:
            value = self._typed(body, kind)
        except msgspec.ValidationError as error:
            raise _wrong(str(error), kind) from None
        except UnicodeDecodeError:
            raise refuse("the body is not valid UTF-8") from None
        except msgspec.DecodeError as error:
            raise refuse(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise self._too_deep() from None
        self._check_depth(value)
        return value

    def _typed(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            given = _without_nulls(body)
            if given is None:
                raise
            return msgspec.convert(given, kind)

    def _check_depth(self, value: msgspec.Struct) -> None:
        fields = [getattr(value, name) for name in value.__struct_fields__ if name not in FLAT]
        level = [field for field in fields if isinstance(field, NESTED)]
        for _ in range(self._max_depth):
            level = [child for item in level for child in _children(item)]
            if not level:
                return
        raise self._too_deep()

    def _too_deep(self) -> ApiError:
        return refuse(f"the body is nested deeper than {self._max_depth} levels (--max-json-depth)", None, "depth")


def _header(request: Request, name: bytes, default: str = "") -> str:
    """The header of this name; of several, one list of them all (RFC 9110, 5.3)."""
    found = [value.decode("latin-1") for each, value in request.scope["headers"] if each == name]
    return ", ".join(found) if found else default


def _without_nulls(body: bytes) -> dict[str, Any] | None:
    """The object without those of its nulls that would be refused as values; None if that changes nothing.

    null is "not given", and many clients send every field they know.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    given = {name: value for name, value in raw.items() if value is not None or name not in REFUSED}
    return given if len(given) < len(raw) else None


def _children(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [v for v in item.values() if isinstance(v, NESTED)]
    if isinstance(item, list):
        # Millions of numbers or strings are told by their types, in a twentieth of a walk's time.
        if len(item) > 1000 and set(map(type, item)) <= PLAIN:
            return []
        return [v for v in item if isinstance(v, NESTED)]
    if isinstance(item, msgspec.Struct):
        return [getattr(item, name) for name in item.__struct_fields__]
    return []


def _wrong(message: str, kind: type[msgspec.Struct]) -> ApiError:
    """A validation error with its field: the path msgspec found, and for unknown fields what to do instead."""
    text, _, path = message.rpartition(" - at `$") if " - at `$" in message else (message, "", "")
    path = path.rstrip("`").lstrip(".")[:MAX_NAME_CHARS]
    if len(text) > 2 * MAX_NAME_CHARS:
        text = text[:MAX_NAME_CHARS] + ("...'" if text.startswith("Invalid enum") else "...`")
    unknown = re.search(r"unknown field `([^`]*)`", text)
    if unknown is not None:
        name = unknown[1]
        param = f"{path}.{name}" if path else name
        code = "unsupported_parameter" if name in REFUSED else "unknown_parameter"
        return refuse(f"{param}: {_advice(name, kind, top=not path)}", param, code)
    missing = re.search(r"missing required field `([^`]*)`", text)
    if missing is not None:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return refuse(f"{param} is missing", param, "missing_required_parameter")
    last = re.split(r"[.\[]", path)[-1]
    if text.startswith("Expected `null`") and last in REFUSED:
        return refuse(f"{path} is not served: {REFUSED[last]}", path, "unsupported_parameter")
    if text == "Expected `array` of length <= 0":
        return refuse(f"{path}: not served: {ONLY_EMPTY[path]}", path, "unsupported_parameter")
    word = re.fullmatch(r"Invalid enum value '(.*)'", text, re.DOTALL)
    if word is not None:
        more = f" ({REFUSED[word[1]]})" if word[1] in REFUSED else ""
        known = ", ".join(allowed_words(kind, path))
        return refuse(f"{path}: {word[1]!r:.80} is none of {known}{more}", path, "invalid_value")
    return refuse(f"{path}: {text}" if path else text, path or None)


def _advice(name: str, kind: type[msgspec.Struct], top: bool) -> str:
    if name in REFUSED:
        return f"not served: {REFUSED[name]}"
    known = kind.__struct_fields__ if top else ()
    meant = [each for each in LENGTHS if each in known] if name in LENGTHS else []
    near = meant or difflib.get_close_matches(name, known, n=1)
    return f"unknown field; did you mean {near[0]!r}?" if near else "unknown field; leave it out"


def allowed_words(kind: type[msgspec.Struct], path: str) -> list[str]:
    """The words that a field may be, by its path in the body, as in ``messages[0].role``."""
    kinds: list[Any] = [kind]
    for step in re.findall(r"\w+", path):
        kinds = [inner for each in kinds for inner in _inside(each, step)]
    return [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]


def _inside(kind: Any, step: str) -> list[Any]:
    """The types, without Annotated and Union, of a member of a struct or an item of a list."""
    if get_origin(kind) is list:
        found = get_args(kind)[0]
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        found = get_type_hints(kind, include_extras=True).get(step)
    else:
        return []
    return _members(found)


def _members(kind: Any) -> list[Any]:
    origin = get_origin(kind)
    if origin is Annotated:
        return _members(get_args(kind)[0])
    if origin in (Union, UnionType):
        return [member for each in get_args(kind) for member in _members(each)]
    return [kind]


__all__ = ["Body", "ClientDisconnect"]
