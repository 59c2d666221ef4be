"""How a picture lies in the words of an ``EncoderItem``: the tower's integers, scale and shift of each channel, then its
patches.

Pixels travel as bytes and are normalised on the device: a fourth of what floats would take, and the same to the bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.core.plan import Floats, Int32s

AFFINE_INTS = 6
"""Scale and shift of three channels."""


def join(ints: Int32s, scale: Floats, shift: Floats, patches: npt.NDArray[np.uint8]) -> bytes:
    """The words of a picture.

    Args:
        ints: of its layout.
        scale, shift: f32 [3]: a pixel becomes pixel * scale + shift.
        patches: [N, P], each (channel, row, column).
    """
    pixels = patches.tobytes()
    return ints.tobytes() + scale.tobytes() + shift.tobytes() + pixels + bytes(-len(pixels) % 4)
