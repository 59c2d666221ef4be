"""The header reader: what gguf's own writer and reader say, and nothing worse than WeightsError on damaged files."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from gguf import GGUFReader

from headway.core.errors import ModelError, WeightsError
from headway.weights import open_checkpoint
from headway.weights.gguf_file import MAX_KEYS, MAX_NAME, MAX_TENSORS, GgufHeader, end_token_ids, read_header
from tests.weights.tiny_gguf import header_bytes, llama_arrays, write_gguf

EXTRA = {
    "a.bool": True,
    "a.text": "häßlich",
    "a.floats": [0.5, -1.0],
    "a.texts": ["x", "", "日本"],
    "a.ints": [1, -2],
    "general.alignment": 64,
}


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_arrays(), extra=EXTRA)
    header, other = read_header(path), GGUFReader(path)
    fields = {k: f.contents() for k, f in other.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == fields
    assert [(t.name, t.offset, t.type_id) for t in header.tensors] == [
        (t.name, t.data_offset, int(t.tensor_type)) for t in other.tensors
    ]
    assert [t.shape for t in header.tensors] == [tuple(reversed(t.shape.tolist())) for t in other.tensors]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF", "truncated"),
        (header_bytes(version=1), "version 1"),
        (header_bytes(version=3 << 24), "big-endian"),
        (header_bytes(keys=2**40), "corrupt"),
        (header_bytes(tensors=2**40), "corrupt"),
        (header_bytes(keys=1, rest=struct.pack("<Q", 2**62)), "metadata key"),
        (header_bytes(keys=1, rest=struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**61)), "truncated"),
        (header_bytes(keys=1, rest=struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 2**61)), "truncated"),
        (header_bytes(keys=1, rest=struct.pack("<Q1sIIQQ", 1, b"k", 9, 8, 1, 100)), "truncated"),
        (header_bytes(keys=1, rest=struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1)), "element type 9"),
        (header_bytes(keys=1, rest=struct.pack("<Q1sI", 1, b"k", 77)), "value type 77"),
        (header_bytes(tensors=1, rest=struct.pack("<Q1sI", 1, b"t", 9999)), "9999 dimensions"),
    ],
)
def test_damaged_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        read_header(path)


@pytest.mark.parametrize("alignment", [0, 3])
def test_bad_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    key = b"general.alignment"
    rest = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, alignment)
    path.write_bytes(header_bytes(keys=1, rest=rest))
    with pytest.raises(WeightsError, match="alignment"):
        read_header(path)


def test_duplicate_tensor_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    record = struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, 0, 0)
    path.write_bytes(header_bytes(tensors=2, rest=record * 2))
    with pytest.raises(WeightsError, match="twice"):
        read_header(path)


def test_every_truncation_and_many_bit_flips_give_model_errors_only(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", llama_arrays(), extra=EXTRA).read_bytes()
    path, rng = tmp_path / "m.gguf", random.Random(0)
    refused = 0
    for i in range(300):
        content = bytearray(whole)
        if i % 2:
            del content[rng.randrange(len(content)) :]
        else:
            content[rng.randrange(2048)] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            checkpoint = open_checkpoint(str(path))
            for _ in checkpoint.tensors():
                pass
        except ModelError:
            refused += 1
        assert i % 2 == 0 or refused > 0
    assert refused >= 150  # every truncation


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot read"):
        read_header(tmp_path / "no.gguf")


def test_end_token_ids_without_repetition(tmp_path: Path) -> None:
    keys = {f"tokenizer.ggml.{name}_token_id": i for name, i in {"eos": 7, "eot": 9, "eom": 7}.items()}
    header = read_header(write_gguf(tmp_path / "m.gguf", llama_arrays(), extra=keys))
    assert end_token_ids(header) == [7, 9]


def named(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...]) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, 0)


def read(path: Path, content: bytes) -> GgufHeader:
    path.write_bytes(content)
    return read_header(path)


@pytest.mark.parametrize("version", [2, 3])
def test_versions(tmp_path: Path, version: int) -> None:
    header = read(tmp_path / "m.gguf", header_bytes(version=version, keys=1, rest=named(b"k", 4, struct.pack("<I", 7))))
    assert header.metadata == {"k": 7} and header.tensors == []


def test_names_and_dimensions_up_to_their_limits(tmp_path: Path) -> None:
    path, name = tmp_path / "m.gguf", b"n" * MAX_NAME
    header = read(path, header_bytes(tensors=1, keys=1, rest=named(name, 0, b"\x05") + tensor(name, (1, 2, 3, 4))))
    assert header.metadata == {name.decode(): 5}
    assert [(each.name, each.shape) for each in header.tensors] == [(name.decode(), (4, 3, 2, 1))]
    for rest in (
        named(name + b"n", 0, b"\x05") + tensor(b"t", (1,)),
        named(b"k", 0, b"\x05") + tensor(name + b"n", (1,)),
    ):
        with pytest.raises(WeightsError, match="truncated or corrupt"):
            read(path, header_bytes(tensors=1, keys=1, rest=rest))
    with pytest.raises(WeightsError, match="5 dimensions"):
        read(path, header_bytes(tensors=1, keys=0, rest=tensor(b"t", (1,) * 5)))


@pytest.mark.parametrize(("keys", "tensors"), [(MAX_KEYS + 1, 0), (0, MAX_TENSORS + 1)])
def test_counts_beyond_their_limits_are_not_begun_with(tmp_path: Path, keys: int, tensors: int) -> None:
    with pytest.raises(WeightsError, match=f"{tensors} tensors, {keys} keys"):
        read(tmp_path / "m.gguf", header_bytes(keys=keys, tensors=tensors))
    with pytest.raises(WeightsError, match=r"metadata key|tensor name"):  # as many as there may be: they are looked for
        read(tmp_path / "m.gguf", header_bytes(keys=min(keys, MAX_KEYS), tensors=min(tensors, MAX_TENSORS)))


@pytest.mark.parametrize(("keys", "start"), [(b"", 32), (named(b"general.alignment", 4, struct.pack("<I", 64)), 64)])
def test_data_begins_at_a_multiple_of_the_alignment(tmp_path: Path, keys: bytes, start: int) -> None:
    header = read(tmp_path / "m.gguf", header_bytes(tensors=1, keys=bool(keys), rest=keys + tensor(b"t", (1,))))
    end = 24 + len(keys) + len(tensor(b"t", (1,)))
    assert header.tensors[0].offset == -(-end // start) * start


def test_pieces_that_are_no_utf8_stop_nothing(tmp_path: Path) -> None:
    listed = struct.pack("<IQ", 8, 2) + struct.pack("<Q", 1) + b"\xff" + struct.pack("<Q", 2) + b"ok"
    rest = named(b"a", 8, struct.pack("<Q", 2) + b"\xc3\x28") + named(b"b", 9, listed)
    assert read(tmp_path / "m.gguf", header_bytes(keys=2, rest=rest)).metadata == {
        "a": "\ufffd(",
        "b": ["\ufffd", "ok"],
    }
