"""Reads the header of a GGUF file: metadata, and where each tensor lies. No tensor data is touched.

Written from the format's description (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): little-endian magic
"GGUF", version, two counts, key-value pairs, tensor records, padding, data. Every length is checked against the file's
size before it is used, so a truncated or hostile file gives ``WeightsError`` and never a large allocation.

Own reader instead of ``gguf.GGUFReader``: that one makes several numpy objects per vocabulary entry (seconds for a
large vocabulary), and the API process needs the metadata without loading anything else.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway.core.errors import WeightsError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_TENSORS: Final = 1 << 20
MAX_KEYS: Final = 1 << 16
MAX_DIMS: Final = 4
MAX_NAME: Final = 1 << 16
DEFAULT_ALIGNMENT: Final = 32

END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of tokens that end generation; end of turn and end of message count, as in llama.cpp."""

STRING: Final = 8
ARRAY: Final = 9
SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type number -> struct code (little-endian is added where it is used)."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor record.

    Attributes:
        shape: rows first, as torch has it (GGUF stores dimensions fastest first; they are reversed here).
        type_id: ggml's number of the tensor type.
        offset: first byte of the data, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensor records of one file, in file order."""

    path: Path
    metadata: dict[str, Any]
    tensors: list[GgufTensor]
    file_size: int

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)


def read_header(path: Path) -> GgufHeader:
    """Parse the header of ``path``.

    Raises:
        WeightsError: not a GGUF file, an unknown version, or corrupt or truncated before the tensor data.
    """
    try:
        with path.open("rb") as file:
            try:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise WeightsError(f"{path} is empty; download it again") from None
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    try:
        return _parse(path, _Cursor(path, data))
    finally:
        data.close()


def end_token_ids(header: GgufHeader) -> list[int]:
    """Ids of the tokens that end generation, without repetition; the end-of-sequence token first."""
    ids = [header.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int)))


class _Cursor:
    """A position in the mapped file; every read is bounds-checked."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def fail(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path} is truncated or corrupt ({what} at byte {self.at}); download it again")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.at:
            raise self.fail(what)

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number("Q", what)
        if limit is not None and length > limit:
            raise self.fail(what)
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        # Vocabularies of some converters hold pieces that are not UTF-8; they must not stop the whole file.
        return raw.decode("utf-8", "replace")

    def texts(self, count: int, what: str) -> list[str]:
        self.need(8 * count, what)
        unpack, data, at, size = struct.Struct("<Q").unpack_from, self.data, self.at, self.size
        out: list[str] = []
        for _ in range(count):
            if at + 8 > size:
                raise self.fail(what)
            end = at + 8 + unpack(data, at)[0]
            if end > size:
                raise self.fail(what)
            out.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self.at = at
        return out

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self.array(what)
        if kind not in SCALARS:
            raise self.fail(f"{what}: unknown value type {kind}")
        return self.number(SCALARS[kind], what)

    def array(self, what: str) -> list[Any]:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == STRING:
            return self.texts(count, what)
        if kind not in SCALARS:
            raise self.fail(f"{what}: unknown element type {kind}")
        code = SCALARS[kind]
        num_bytes = struct.calcsize("<" + code) * count
        self.need(num_bytes, what)
        values = list(struct.unpack_from(f"<{count}{code}", self.data, self.at))
        self.at += num_bytes
        return values


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.data[:4] != MAGIC:
        raise WeightsError(f"{path} is not a GGUF file (it does not start with 'GGUF')")
    cursor.at = 4
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        hint = " (big-endian file?)" if version & 0xFFFF == 0 else ""
        raise WeightsError(f"{path} is GGUF version {version}{hint}; versions 2 and 3, little-endian, are read")
    num_tensors, num_keys = cursor.number("Q", "tensor count"), cursor.number("Q", "key count")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise cursor.fail(f"{num_tensors} tensors, {num_keys} keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text("metadata key", MAX_NAME)
        metadata[key] = cursor.value(cursor.number("I", key), key)
    records = [_record(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"alignment {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = [GgufTensor(r.name, r.shape, r.type_id, start + r.offset) for r in records]
    if len({t.name for t in tensors}) != len(tensors):
        raise WeightsError(f"{path} names a tensor twice; the file is corrupt")
    return GgufHeader(path, metadata, tensors, cursor.size)


def _record(cursor: _Cursor) -> GgufTensor:
    name = cursor.text("tensor name", MAX_NAME)
    num_dims = cursor.number("I", name)
    if num_dims > MAX_DIMS:
        raise cursor.fail(f"{name}: {num_dims} dimensions")
    dims = [cursor.number("Q", name) for _ in range(num_dims)]
    return GgufTensor(name, tuple(reversed(dims)), cursor.number("I", name), cursor.number("Q", name))
