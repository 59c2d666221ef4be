"""Uploaded recordings, decoded in processes that can be killed: what a client sends may be anything."""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from headway.api.hearing.decode_child import SAMPLES
from headway.api.killable import Job, Pool, TooMuchError
from headway.api.lanes import Lane
from headway.core.errors import InvalidRequestError
from headway.multimodal.audio.wav import Floats

WORKERS: Final = 2
MAX_SECONDS: Final = 60.0
"""Of processor time for one recording: an hour of MP3 takes some five."""
MAX_MEMORY_BYTES: Final = 4 * 2**30
MAX_WAITING_BYTES: Final = 256 * 2**20


class AudioDecoder:
    """Files to samples.

    Args:
        most_seconds: of a recording.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most = most_seconds
        module = "headway.api.hearing.decode_child"
        self._pool = Pool(module, b"", WORKERS, MAX_SECONDS, MAX_MEMORY_BYTES, "decoding a recording")
        self._lane = Lane("decoding of recordings", WORKERS, MAX_WAITING_BYTES)

    async def decode(self, data: bytes) -> Floats:
        """Samples float32 [n] at 16 kHz; gives the work up when the caller is cancelled.

        Raises:
            InvalidRequestError: nothing can be made of the file.
            BusyError: too much is being decoded.
        """
        return await self._lane.run(lambda job: self._decode(data, job), len(data))

    def _decode(self, data: bytes, job: Job) -> Floats:
        try:
            # A process that has held a recording ends, so that its memory returns to the system.
            answer = self._pool.run(struct.pack("<d", self._most) + data, job, keep=len(data) < 2**20)
        except TooMuchError as error:
            raise InvalidRequestError(f"file: decoding it takes too much {error}", "file") from None
        if answer[:1] != SAMPLES:
            raise InvalidRequestError(f"file: {answer[1:].decode()}", "file")
        return np.frombuffer(answer[1:], np.float32)

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        self._pool.close()
        self._lane.close()
