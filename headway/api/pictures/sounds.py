"""Recordings in prompts: files are decoded in processes that can be killed, samples in memory are prepared here."""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple

import msgspec

from headway.api.killable import Job, Pool, TooMuchError
from headway.api.pictures.sound_worker import Boot, Reply
from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError
from headway.core.media import SoundInfo
from headway.multimodal.audio.decode import check_samples
from headway.multimodal.audio.errors import AudioError
from headway.multimodal.audio.spectra import MelSettings
from headway.multimodal.images import FIELD
from headway.multimodal.sounds import longest_seconds, make_sound

MAX_SOUND_BYTES: Final = 20 * 2**20
NUM_WORKERS: Final = 2
SECONDS: Final = 10.0
"""Processor time that decoding one recording may take; half a minute of one takes a tenth."""
MEMORY_BYTES: Final = 2 * 2**30
_FORMS: Final = "(samples, rate), or the bytes of a file"


class Sound(NamedTuple):
    """A recording as it was given: the bytes of a file, or (samples, rate)."""

    data: Any


def read_sounds(data: object) -> list[Sound]:
    """The recordings of ``multi_modal_data``: one, or a list of them.

    Raises:
        InvalidRequestError: they are something else, or a file is too long.
    """
    if data is None:
        return []
    return [read_sound(each) for each in (data if isinstance(data, list) else [data])]


def read_sound(data: object) -> Sound:
    """One of them."""
    if isinstance(data, Sound):
        return data
    if isinstance(data, bytes | bytearray | memoryview):
        if len(data) > MAX_SOUND_BYTES:
            raise InvalidRequestError(
                f"a recording has {len(data)} bytes; at most {MAX_SOUND_BYTES} are read: send it shorter, or compressed",
                FIELD,
            )
        return Sound(bytes(data))
    if isinstance(data, tuple) and len(data) == 2:
        return Sound(data)
    raise InvalidRequestError(f"a recording must be {_FORMS}; got {type(data).__name__}", FIELD)


class Sounds:
    """How a model's recordings are prepared; safe to share between threads."""

    def __init__(self, info: SoundInfo, settings: MelSettings) -> None:
        self.info, self.settings = info, settings
        self._pool: Pool | None = None
        self._lock = threading.Lock()

    @property
    def longest_seconds(self) -> float:
        """Of a recording."""
        return longest_seconds(self.info, self.settings)

    def prepare(self, sound: Sound, number: int, job: Job | None = None) -> EncoderItem:
        """Its item.

        Args:
            number: of the medium in its prompt.
            job: by which another thread can give up.

        Raises:
            InvalidRequestError: it is damaged, too short, too long, or none.
            BusyError: it could not be done now.
        """
        if not isinstance(sound.data, bytes):
            try:
                samples = check_samples(*sound.data, most_seconds=self.longest_seconds)
                return make_sound(self.info, self.settings, samples)
            except AudioError as error:
                raise InvalidRequestError(f"recording {number}: {error}", FIELD) from None
        try:
            answer = self._workers().run(sound.data, job)
        except TooMuchError as error:
            limit = f"longer than {SECONDS:g} seconds" if error.time else "too much memory"
            raise InvalidRequestError(f"preparing recording {number} takes {limit}", FIELD) from None
        reply = msgspec.msgpack.decode(answer, type=Reply)
        if reply.item is None:
            raise InvalidRequestError(f"recording {number}: {reply.error}", FIELD)
        return reply.item

    def _workers(self) -> Pool:
        with self._lock:
            if self._pool is None:
                boot = msgspec.msgpack.encode(Boot(self.info, self.settings))
                self._pool = Pool(
                    "headway.api.pictures.sound_worker",
                    boot,
                    NUM_WORKERS,
                    SECONDS,
                    MEMORY_BYTES,
                    "preparing a recording",
                )
            return self._pool

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None
