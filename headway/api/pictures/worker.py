"""The process that decodes and cuts pictures: ``python -m headway.api.pictures.worker``; see ``headway.api.killable``.

The first frame is msgpack ``Boot``. A job is the bytes of an image file, its answer a ``Reply``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from headway.api.killable import serve
from headway.api.pictures.placeholders import Piece, Placeholders
from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError
from headway.core.media import VisionInfo
from headway.multimodal.images import decode_image
from headway.multimodal.items import make_item
from headway.multimodal.process import ImageSettings, cut


class Boot(msgspec.Struct, array_like=True):
    """How pictures are prepared."""

    info: VisionInfo
    settings: ImageSettings
    placeholders: Placeholders


class Reply(msgspec.Struct, array_like=True):
    """The picture and what stands for it in the prompt, or why there is none."""

    item: EncoderItem | None = None
    pieces: list[Piece] = []
    error: str | None = None


def prepare(boot: Boot, data: bytes) -> Reply:
    """Do one job; every failure becomes a Reply."""
    try:
        tiles = cut(decode_image(data), boot.settings)
    except InvalidRequestError as error:
        return Reply(error=str(error))
    except MemoryError:
        return Reply(error="preparing the image takes too much memory")
    return Reply(make_item(boot.info, tiles.pixels, *boot.settings.affine()), boot.placeholders.pieces(tiles))


def start(boot: bytes) -> Callable[[bytes], bytes]:
    """What prepares one picture after the other."""
    known = msgspec.msgpack.decode(boot, type=Boot)
    return lambda data: msgspec.msgpack.encode(prepare(known, data))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], start))
