"""A process that decodes recordings: ``python -m headway.api.hearing.decode_child``; see ``headway.api.killable``.

A job is the most seconds a recording may last, float64, and the file's bytes; the answer is a byte that says which of two
things follows: float32 samples at 16 kHz, or why there are none.
"""

from __future__ import annotations

import struct
import sys

from headway.api.killable import serve
from headway.multimodal.audio.decode import decode_audio
from headway.multimodal.audio.errors import AudioError

SAMPLES, REFUSED = b"s", b"r"


def decode(data: bytes) -> bytes:
    """Do one job; every failure becomes an answer."""
    [most] = struct.unpack_from("<d", data)
    try:
        return SAMPLES + decode_audio(data[8:], most_seconds=most).tobytes()
    except AudioError as error:
        return REFUSED + str(error).encode()
    except MemoryError:
        return REFUSED + b"the recording needs too much memory to be decoded"


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], lambda _: decode))
