"""What a tower that hears must be told of a recording, as host integers: how long its spectrogram is."""

from __future__ import annotations

from typing import Final, NamedTuple

from headway.core.ints import cdiv

STRIDE: Final = 2
"""Of both convolutions ahead of a tower's blocks, in time and in frequency."""
FRAMES_PER_ROW: Final = STRIDE * STRIDE


class SoundLayout(NamedTuple):
    """A spectrogram, float32 [frames, bins]."""

    frames: int
    bins: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """As they travel with the recording; pictures have more."""
        return tuple(self)

    @property
    def num_words(self) -> int:
        """Of the spectrogram."""
        return self.frames * self.bins

    @property
    def units(self) -> int:
        """Rows that pass the tower's blocks."""
        return fourth(self.frames)


def fourth(count: int) -> int:
    """What both convolutions leave of so many frames or bins."""
    return cdiv(cdiv(count, STRIDE), STRIDE)


def is_sound(sizes: tuple[int, ...]) -> bool:
    """Whether an item of ``sizes`` is a recording, and no picture."""
    return len(sizes) == len(SoundLayout._fields)
