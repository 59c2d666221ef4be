"""From an image file of unknown origin to pixels, within limits: every refusal names the limit or the reason."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Final

from headway.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is read; other decoders of Pillow's are older, larger, or start programs."""
MAX_FILE_BYTES: Final = 20 * 2**20
MAX_PIXELS: Final = 2**26
MAX_SIDE: Final = 16384
FIELD: Final = "multi_modal_data"


def decode_image(data: bytes) -> Image:
    """The picture in an image file, as RGB, the right way up; of an animation the first frame.

    Raises:
        InvalidRequestError: it is too large, damaged, or of a format that is not read.
    """
    if not data:
        raise InvalidRequestError("the image is empty", FIELD)
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"the image file has {len(data)} bytes; at most {MAX_FILE_BYTES} are read", FIELD)
    import PIL.Image
    from PIL import UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of decoders, about what they put right
        try:
            with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
                check_size(*image.size)
                image.load()
                return as_rgb(upright(image))
        except InvalidRequestError:
            raise
        except UnidentifiedImageError:
            raise InvalidRequestError(
                f"the data are not an image of a known kind: {', '.join(FORMATS)}", FIELD
            ) from None
        except MemoryError:
            raise InvalidRequestError("decoding the image takes too much memory", FIELD) from None
        # Decoders raise whatever a damaged file makes of them: OSError, SyntaxError, struct.error, ValueError, ...
        except Exception as error:
            raise InvalidRequestError(f"the image is damaged ({type(error).__name__}: {error!s:.120})", FIELD) from None


def upright(image: Image) -> Image:
    """The picture as a camera's note of its orientation says that it was held; other pictures as they are."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def check_size(width: int, height: int) -> None:
    """Raises InvalidRequestError: a picture of that size is not decoded."""
    if width < 1 or height < 1:
        raise InvalidRequestError("the image has no pixels", FIELD)
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise InvalidRequestError(
            f"the image has {width} x {height} pixels; at most {MAX_PIXELS} are read, {MAX_SIDE} on a side", FIELD
        )


def as_rgb(image: Image) -> Image:
    """The picture in RGB, as transformers converts it: what is transparent becomes white. Greys of sixteen bits become the
    upper eight, as they do in files of three colours; Pillow would make all that is brighter than a 256th white.

    Raises:
        InvalidRequestError: nobody knows which of its numbers is white, or Pillow cannot convert it.
    """
    if image.mode == "RGB":
        return image
    import PIL.Image

    if image.mode in ("I", "F"):
        raise InvalidRequestError(
            f"a picture of mode {image.mode!r} has numbers of no known range; convert it to 8 bits, mode 'L' or 'RGB'",
            FIELD,
        )
    if image.mode.startswith("I;16"):
        image = _upper_byte(image)
    try:
        if not image.has_transparency_data:
            return image.convert("RGB")
        image = image.convert("RGBA")
    except ValueError as error:
        raise InvalidRequestError(
            f"a picture of mode {image.mode!r} cannot be converted to RGB ({error})", FIELD
        ) from None
    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def _upper_byte(image: Image) -> Image:
    """Greys of sixteen bits in eight."""
    import numpy as np
    import PIL.Image

    return PIL.Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
