"""The process that decodes recordings: ``python -m headway.api.pictures.sound_worker``; see ``headway.api.killable``.

The first frame is msgpack ``Boot``. A job is the bytes of a file, its answer a ``Reply``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from headway.api.killable import serve
from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError
from headway.core.media import SoundInfo
from headway.multimodal.audio.decode import decode_audio
from headway.multimodal.audio.errors import AudioError
from headway.multimodal.audio.spectra import MelSettings
from headway.multimodal.sounds import longest_seconds, make_sound


class Boot(msgspec.Struct, array_like=True):
    """How recordings are prepared."""

    info: SoundInfo
    settings: MelSettings


class Reply(msgspec.Struct, array_like=True):
    """The recording, or why there is none."""

    item: EncoderItem | None = None
    error: str | None = None


def prepare(boot: Boot, data: bytes) -> Reply:
    """Do one job; every failure becomes a Reply."""
    try:
        samples = decode_audio(data, most_seconds=longest_seconds(boot.info, boot.settings))
        return Reply(make_sound(boot.info, boot.settings, samples))
    except (AudioError, InvalidRequestError) as error:
        return Reply(error=str(error))
    except MemoryError:
        return Reply(error="the recording needs too much memory to be decoded")


def start(boot: bytes) -> Callable[[bytes], bytes]:
    """What prepares one recording after the other."""
    known = msgspec.msgpack.decode(boot, type=Boot)
    return lambda data: msgspec.msgpack.encode(prepare(known, data))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], start))
