"""Pictures and recordings in conversations: parts of messages become what the model's chat template shows, and a list of
them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headway.api.pictures.clips import read_clip
from headway.api.pictures.sounds import MAX_SOUND_BYTES, Sound, read_sound
from headway.core.errors import InvalidRequestError
from headway.multimodal.images import MAX_FILE_BYTES

PLACE: Final = "\ufdd2"
"""Where a picture is, in a template that shows plain text: a noncharacter, which becomes the model's marker behind the
template."""
_KNOWS_PARTS: Final = re.compile(r"""['"]image""")
_KNOWS_SOUNDS: Final = re.compile(r"""['"](?:input_)?audio""")
_KNOWS_VIDEOS: Final = re.compile(r"""['"]video""")
_DATA_URL: Final = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
_TEXT: Final = ("text", "input_text", "output_text")


def knows_parts(source: str) -> bool:
    """Whether a chat template shows contents that are lists, and has a place for pictures in them."""
    return _KNOWS_PARTS.search(source) is not None


def take_pictures(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[object]]:
    """Messages whose contents are text, or lists of {"type": "text"}, {"type": "image"}, {"type": "video"} and
    {"type": "audio"}; and the pictures, ``Clip``s and ``Sound``s, in order.

    Raises:
        InvalidRequestError: a part that is none of them, or has no picture or recording.
    """
    pictures: list[object] = []
    found = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list | tuple):
            found.append(dict(message))
            continue
        parts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("image", "image_url", "image_pil"):
                assert isinstance(part, Mapping)
                pictures.append(_source(part, f"messages[{number}]"))
                parts.append({"type": "image"})
            elif kind == "video":
                pictures.append(read_clip(part.get("video")))
                parts.append({"type": "video"})
            elif kind in ("audio", "input_audio"):
                assert isinstance(part, Mapping)
                pictures.append(_heard(part, f"messages[{number}]"))
                parts.append({"type": "audio"})
            else:
                parts.append(part)
        found.append({**message, "content": parts})
    return found, pictures


def _source(part: Mapping[str, Any], where: str) -> object:
    value = next((part[name] for name in ("image", "image_pil", "image_url") if part.get(name) is not None), None)
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None:
        raise InvalidRequestError(f"{where}: a part of type {part['type']!r} has no image", "messages")
    return read_data_url(value, where) if isinstance(value, str) else value


def _heard(part: Mapping[str, Any], where: str) -> Sound:
    """The recording of a part: {"audio": see ``sounds``}, or OpenAI's {"input_audio": {"data": base64, "format": ...}}."""
    given = part.get("audio", part.get("input_audio"))
    if isinstance(given, Mapping):
        given = given.get("data")
        if not isinstance(given, str):
            raise InvalidRequestError(f"{where}: input_audio needs data, a recording's file in base64", "messages")
        given = read_base64(given, where, MAX_SOUND_BYTES, "recording")
    if given is None:
        raise InvalidRequestError(f"{where}: a part of type {part['type']!r} has no audio", "messages")
    return read_sound(given)


def read_data_url(url: str, where: str) -> bytes:
    """The bytes in ``data:image/...;base64,...``.

    Raises:
        InvalidRequestError: it is none, or too long.
    """
    match = _DATA_URL.match(url[:200])
    if match is None:
        raise InvalidRequestError(
            f"{where}: an image must come as a data URL, data:image/...;base64,...; got {url[:40]!r}", "messages"
        )
    return read_base64(url, where, MAX_FILE_BYTES, "image", match.end())


def read_base64(text: str, where: str, most: int, what: str, start: int = 0) -> bytes:
    """The bytes that ``text`` is from ``start`` on, at most ``most``.

    Raises:
        InvalidRequestError: it is no base64, or too long.
    """
    if (len(text) - start) * 3 // 4 > most + 3:
        raise InvalidRequestError(f"{where}: the {what} has more than {most} bytes", "messages")
    try:
        return base64.b64decode(text[start:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{where}: the {what}'s base64 is damaged ({error})", "messages") from None


def shown(messages: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """Messages for the template ``source``: with lists of parts where it knows them, else with ``PLACE`` for each picture.

    Raises:
        InvalidRequestError: a text has ``PLACE`` itself.
    """
    found = []
    parts_known = knows_parts(source)
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and parts_known:
            _check(content)
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list | tuple):
            for part in content:
                if _is(part, "video") and not _KNOWS_VIDEOS.search(source):
                    raise InvalidRequestError(
                        "the chat template has no place for videos; send frames as images", "messages"
                    )
                if _is(part, "audio") and not _KNOWS_SOUNDS.search(source):
                    raise InvalidRequestError(
                        "the chat template has no place for recordings; use generate, with a marker for each",
                        "messages",
                    )
                _check(part.get("text") or "" if isinstance(part, Mapping) else "")
            if not parts_known:
                content = "\n".join(_plain(part) for part in content)
        found.append({**message, "content": content})
    return found


def _is(part: Any, kind: str) -> bool:
    return isinstance(part, Mapping) and part.get("type") == kind


def _plain(part: Any) -> str:
    if _is(part, "image"):
        return PLACE
    if isinstance(part, Mapping) and part.get("type") in _TEXT and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError("a message's part must be text or an image", "messages")


def _check(text: str) -> None:
    if PLACE in text:
        raise InvalidRequestError("a message beside images may not hold U+FDD2, which is not a character", "messages")
