"""Pictures and recordings in prompts as API and engine speak of them: plain numbers, no pixels and no torch."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

MAX_RUNS: Final = 256
"""Most runs of placeholders in a prompt."""
RUNS_AT: Final = 2
"""Where runs begin in a slot's row of their table; see ``kernels.media_places``."""
RUN_WORDS: Final = 6
"""Words of each."""


class Grid(NamedTuple):
    """Patches of a picture.

    Attributes:
        tiles: parts of equal size, which do not see each other.
        height, width: of a tile, in patches.
    """

    tiles: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        """Of all tiles."""
        return self.tiles * self.height * self.width


class VisionInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What the API floor must know of a model with sight, to prepare pictures for it.

    Attributes:
        patch: side of a patch, in pixels; channels: of a pixel.
        group: patches of so many rows and columns become one row of the decoder.
        positions: side of the table of positions; 0: there is none, or it is read between its entries.
        window: side of attention's windows in merged patches; 0: whole tiles.
        one_size: pixels of a side of all pictures; 0: the model takes other sizes, too.
        token: id of the token that stands for each row in a prompt.
        sees: tokens that see later ones: "spans": those of one picture each other; "prompt": those of the prompt; "": none.
        video_token: the same in a video; -1: the model reads none.
        frames: pictures of a video that become one, a *part*; 1: each is a part.
        tempo: positions of time that a second takes; 0: a part takes one.
        stamps: parts of a video have places of their own, and the text says when each is.
        rotates_by_place: positions of a picture's tokens are (time, row, column), and text behind it goes on after the largest.
        longest: most rows of a picture; 0: the model takes none.
        cache_rows: rows of the encoder cache, those of a request's pictures that are needed at once at most.
        longest_whole: most tokens that see each other; 0: none do.
    """

    patch: int
    channels: int = 3
    group: int = 1
    positions: int = 0
    window: int = 0
    one_size: int = 0
    token: int
    sees: str = ""
    video_token: int = -1
    frames: int = 1
    tempo: float = 0.0
    stamps: bool = False
    rotates_by_place: bool = False
    longest: int = 0
    cache_rows: int = 0
    longest_whole: int = 0

    @property
    def tokens(self) -> tuple[int, int]:
        """Placeholders of pictures, and of videos."""
        return self.token, self.video_token


class SoundInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What the API floor must know of a model that hears recordings within its prompts.

    Attributes:
        token: id of the token that stands for each row in a prompt.
        mel_bins: of a spectrogram.
        reach: most rows that one sees in a block of the tower.
        longest: most rows of a recording.
        units: rows that pass the tower's blocks at most; 0: as many as of the decoder.
        reduces: every so many of them one is the decoder's.
        pads: each recording takes ``longest`` rows, however short it is.
    """

    token: int
    mel_bins: int
    reach: int
    longest: int
    units: int = 0
    reduces: int = 1
    pads: bool = False

    @property
    def most_units(self) -> int:
        """Of a recording, in rows that pass the tower's blocks."""
        return min(self.units or self.longest, self.longest * self.reduces)
