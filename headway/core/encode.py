"""Work of an encoder: what a request brings to it, and what one step does of that. Plain data; no torch.

A request whose decoder reads encoder outputs carries ``EncoderItem``s. The scheduler makes an ``EncodeJob`` of each one whose
outputs are nowhere yet, in the plan of the step with the first row that reads them: encoders run ahead of the rows, on the same
stream, and nobody waits for them. The packer turns jobs into ``Encoding``s, host integers that say where in one buffer their
inputs lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt


class EncoderItem(msgspec.Struct, kw_only=True, array_like=True, frozen=True):
    """One recording, picture or text, prepared for the encoder.

    Attributes:
        kind: "audio", "text" or "image".
        key: names the outputs: a digest of the content and of every option that changes them. Equal keys, equal outputs.
        rows: outputs, exactly; >= 1.
        sizes: what else the encoder must know as host integers: frames, patches, grids.
        data: its input as 4-byte words in native byte order: float32 features, or int32 token ids.
        first: position in the prompt of the first of ``rows`` tokens that the outputs stand in for; -1: the decoder reads
            them by cross-attention.
    """

    kind: str
    key: bytes
    rows: int
    sizes: tuple[int, ...] = ()
    data: bytes = b""
    first: int = -1

    @property
    def num_words(self) -> int:
        """Of ``data``."""
        return len(self.data) // 4


class MediaRun(msgspec.Struct, kw_only=True, array_like=True, frozen=True):
    """Tokens of a prompt that outputs of an item stand in for.

    Attributes:
        item: number of the item in the request.
        first: its output that the first token is.
        start, end: positions.
        base: first position of the rotation, where that is by place in a picture.
        columns: of the picture then; token i of the run is at row i // columns.
        behind: what is added to positions of the tokens behind the run, up to the next one.
    """

    item: int
    first: int = 0
    start: int
    end: int
    base: int = 0
    columns: int = 1
    behind: int = 0


@dataclass(slots=True)
class EncodeJob:
    """One item is encoded before the step's rows run.

    Attributes:
        slot: of the request, for which it is done.
        item: what is encoded.
        places: int32 [rows], where each output goes: of cross-attention a place in the blocks of its group (block *
            block_size + offset), else a row of the encoder cache.
        name: of the outputs in the encoder cache.
    """

    slot: int
    item: EncoderItem
    places: npt.NDArray[np.int32]
    name: object = None


class Encoding(NamedTuple):
    """A job as whoever executes the step sees it; offsets are into ``Launch.encoder_ints``.

    Attributes:
        rows, sizes: see ``EncoderItem``.
        data_at, num_words: its input.
        places_at: its places, ``rows`` of them.
    """

    rows: int
    sizes: tuple[int, ...]
    data_at: int
    num_words: int
    places_at: int


def pack_jobs(jobs: list[EncodeJob]) -> tuple[tuple[Encoding, ...], npt.NDArray[np.int32]]:
    """The jobs of a step, and the buffer with their inputs and places; each begins at a multiple of 16 bytes.

    The buffer begins with the first output of each job among all of them, and their number: int32 [jobs + 1].
    """
    found, parts, end = [], [], 0

    def put(values: npt.NDArray[np.int32]) -> int:
        nonlocal end
        start, room = end, -len(values) % 4
        parts.append(values)
        if room:
            parts.append(np.zeros(room, np.int32))
        end += len(values) + room
        return start

    put(np.cumsum([0, *(job.item.rows for job in jobs)], dtype=np.int32))
    for job in jobs:
        item = job.item
        data_at = put(np.frombuffer(item.data, np.int32))
        found.append(Encoding(item.rows, item.sizes, data_at, item.num_words, put(job.places)))
    return tuple(found), np.concatenate(parts)


def most_words(num_rows: int, words_per_row: int, most_jobs: int) -> int:
    """Size of the largest buffer of ``pack_jobs``, of jobs of ``num_rows`` outputs together."""
    return num_rows * (words_per_row + 1) + 8 * (most_jobs + 1)
