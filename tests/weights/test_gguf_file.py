"""The header reader: what gguf's own writer and reader say, and nothing worse than WeightsError on damaged files."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from gguf import GGUFReader

from headway.core.errors import ModelError, WeightsError
from headway.weights import open_checkpoint
from headway.weights.gguf_file import end_token_ids, read_header
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
