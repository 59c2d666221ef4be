"""Work of an encoder: what a request brings to it, and what one step does of that. Plain data; no torch.

A request whose decoder reads encoder outputs carries ``EncoderItem``s. The scheduler makes an ``EncodeJob`` of each one whose
outputs are nowhere yet, in the plan of the step with the first row that reads them: encoders run ahead of the rows, on the same
stream, and nobody waits for them. The packer turns jobs into ``Encoding``s, host integers that say where in one buffer their
inputs lie. An encoder whose blocks run one by one may do a job in several steps: then a job is some of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

ALL_BLOCKS: Final = 2**31 - 1
"""The end of a job that is done whole."""


class BlockCost(NamedTuple):
    """What a block of an encoder computes.

    Attributes:
        unit: multiply-adds for each unit of an item.
        pair: multiply-adds for each other unit that one sees.
        windowed: it sees those of its window alone.
    """

    unit: int
    pair: int
    windowed: bool = False

    def of(self, item: EncoderItem) -> int:
        """Multiply-adds of an item."""
        seen = item.reach[self.windowed]
        return item.units * (self.unit + self.pair * seen)


class EncoderItem(msgspec.Struct, kw_only=True, array_like=True, frozen=True):
    """One recording, picture or text, prepared for the encoder.

    Attributes:
        kind: "audio", "text", "image", or "video" of a part of one; of a recording in a prompt "audio", too.
        key: names the outputs: a digest of the content and of every option that changes them. Equal keys, equal outputs.
        rows: outputs, exactly; >= 1.
        sizes: what else the encoder must know as host integers: frames, patches, grids.
        data: its input as 4-byte words in native byte order: float32 features, or int32 token ids.
        first: position in the prompt of the first of ``rows`` tokens that the outputs stand in for; -1: the decoder reads
            them by cross-attention.
        units: patches or frames that pass each block of the encoder; 0: nobody asks.
        reach: most units that one sees: in blocks that see all, and in those that see windows.
        late: of a later part of a video, which shares the places of the part before: how much later than the first it is, in
            positions; -1: it has a place of its own.
    """

    kind: str
    key: bytes
    rows: int
    sizes: tuple[int, ...] = ()
    data: bytes = b""
    first: int = -1
    units: int = 0
    reach: tuple[int, int] = (0, 0)
    late: int = -1

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
        columns: of the picture then; token i of the run is at row i // columns. 0: it is no picture, and its tokens see no
            later ones.
        behind: what is added to positions of the tokens behind the run, up to the next one.
        late: what is added to ``base`` for its time.
    """

    item: int
    first: int = 0
    start: int
    end: int
    base: int = 0
    columns: int = 1
    behind: int = 0
    late: int = 0


@dataclass(slots=True)
class EncodeJob:
    """One item is encoded, or passes some of the encoder's blocks, before the step's rows run.

    Attributes:
        slot: of the request, for which it is done.
        item: what is encoded.
        places: int32 [rows], where each output goes: of cross-attention a place in the blocks of its group (block *
            block_size + offset), else a row of the encoder cache.
        name: of the outputs in the encoder cache.
        first, end: the blocks that run, [first, end). Job by job they follow each other: what lies between two of them is the
            encoder's, and holds one item.
        is_last: the outputs go to their places behind these blocks.
    """

    slot: int
    item: EncoderItem
    places: npt.NDArray[np.int32]
    name: object = None
    first: int = 0
    end: int = ALL_BLOCKS
    is_last: bool = True


class Encoding(NamedTuple):
    """A job as whoever executes the step sees it; offsets are into ``Launch.encoder_ints``.

    Attributes:
        rows, sizes: see ``EncoderItem``.
        data_at, num_words: its input.
        places_at: its places, ``rows`` of them.
        first, end, is_last: see ``EncodeJob``; the input is sent with the first blocks, the places with the last.
    """

    rows: int
    sizes: tuple[int, ...]
    data_at: int
    num_words: int
    places_at: int
    first: int = 0
    end: int = ALL_BLOCKS
    is_last: bool = True


NO_WORDS: Final = np.empty(0, np.int32)


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
        data = NO_WORDS if job.first else np.frombuffer(item.data, np.int32)
        at = put(data), len(data), put(job.places if job.is_last else NO_WORDS)
        found.append(Encoding(item.rows, item.sizes, *at, job.first, job.end, job.is_last))
    return tuple(found), np.concatenate(parts)


def most_words(num_rows: int, words_per_row: int, most_jobs: int) -> int:
    """Size of the largest buffer of ``pack_jobs``, of jobs that begin with ``num_rows`` outputs together."""
    return num_rows * (words_per_row + 1) + 8 * (most_jobs + 1)
