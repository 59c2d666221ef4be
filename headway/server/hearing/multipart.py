"""multipart/form-data (RFC 7578), read from a body that is whole and bounded already."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from headway.server.errors import ApiError, refuse

MOST_PARTS: Final = 64
MOST_HEADER_BYTES: Final = 4096
MOST_FIELD_BYTES: Final = 64 * 1024
_BOUNDARY: Final = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME: Final = re.compile(rb'[;\s]name="([^"\r\n]*)"', re.IGNORECASE)
_FILENAME: Final = re.compile(rb";\s*filename\*?=", re.IGNORECASE)


@dataclass(slots=True)
class Form:
    """The parts of a form: texts in the order in which they came, and files' bytes."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def one(self, name: str) -> str | None:
        """A text that may be given once. Raises ApiError: it came more often."""
        found = self.fields.get(name)
        if found is not None and len(found) > 1:
            raise refuse(f"{name} came {len(found)} times; send it once", name)
        return None if found is None else found[0]


def read_form(content_type: str, body: bytes) -> Form:
    """The form in ``body``.

    Raises:
        ApiError: 415 for another type of body, 400 for one that is broken.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media != "multipart/form-data":
        raise ApiError(415, f"the body must be multipart/form-data, got {media or 'no Content-Type'!r:.80}")
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise refuse("the Content-Type names no boundary of the form's parts")
    mark = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(b"\r\n" + mark, MOST_PARTS + 2)
    if len(pieces) > MOST_PARTS + 2:
        raise refuse(f"the form has more than {MOST_PARTS} parts")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise refuse("the form is cut off, or its boundary is another one")
    form = Form()
    for piece in pieces[1:-1]:
        _take(form, piece)
    return form


def _take(form: Form, piece: bytes) -> None:
    head, blank, value = piece.partition(b"\r\n\r\n")
    if not blank or len(head) > MOST_HEADER_BYTES:
        raise refuse("a part of the form has no headers, or too long ones")
    disposition = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")), b"")
    found = _NAME.search(disposition)
    if found is None:
        raise refuse("a part of the form has no name")
    name = found[1].decode("utf-8", "replace")[:100]
    if _FILENAME.search(disposition):
        if name in form.files:
            raise refuse(f"{name} came twice; send one file", name)
        form.files[name] = value
        return
    if len(value) > MOST_FIELD_BYTES:
        raise refuse(f"{name} has {len(value)} bytes; at most {MOST_FIELD_BYTES} are possible", name)
    try:
        form.fields.setdefault(name, []).append(value.decode())
    except UnicodeDecodeError:
        raise refuse(f"{name} is no UTF-8 text", name) from None
