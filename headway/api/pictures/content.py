"""Pictures in conversations: parts of messages become what the model's chat template shows, and a list of pictures."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headway.api.pictures.clips import read_clip
from headway.core.errors import InvalidRequestError
from headway.multimodal.images import MAX_FILE_BYTES

PLACE: Final = "\ufdd2"
"""Where a picture is, in a template that shows plain text: a noncharacter, which becomes the model's marker behind the
template."""
_KNOWS_PARTS: Final = re.compile(r"""['"]image""")
_KNOWS_VIDEOS: Final = re.compile(r"""['"]video""")
_DATA_URL: Final = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
_TEXT: Final = ("text", "input_text", "output_text")


def knows_parts(source: str) -> bool:
    """Whether a chat template shows contents that are lists, and has a place for pictures in them."""
    return _KNOWS_PARTS.search(source) is not None


def take_pictures(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[object]]:
    """Messages whose contents are text, or lists of {"type": "text"}, {"type": "image"} and {"type": "video"}; and the pictures
    and ``Clip``s, in order.

    Raises:
        InvalidRequestError: a part that is neither, or has no picture.
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
    if (len(url) - match.end()) * 3 // 4 > MAX_FILE_BYTES + 3:
        raise InvalidRequestError(f"{where}: the image has more than {MAX_FILE_BYTES} bytes", "messages")
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{where}: the image's base64 is damaged ({error})", "messages") from None


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
                if _is_video(part) and not _KNOWS_VIDEOS.search(source):
                    raise InvalidRequestError(
                        "the chat template has no place for videos; send frames as images", "messages"
                    )
                _check(part.get("text") or "" if isinstance(part, Mapping) else "")
            if not parts_known:
                content = "\n".join(_plain(part) for part in content)
        found.append({**message, "content": content})
    return found


def _is_video(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "video"


def _plain(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "image":
        return PLACE
    if isinstance(part, Mapping) and part.get("type") in _TEXT and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError("a message's part must be text or an image", "messages")


def _check(text: str) -> None:
    if PLACE in text:
        raise InvalidRequestError("a message beside images may not hold U+FDD2, which is no character", "messages")
