"""From samples to what a request carries of a recording in its prompt."""

from __future__ import annotations

from hashlib import blake2b

from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError
from headway.core.ints import cdiv
from headway.core.media import SoundInfo
from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.layout import FRAMES_PER_ROW, SoundLayout
from headway.multimodal.audio.spectra import MelSettings, spectra
from headway.multimodal.audio.wav import Floats
from headway.multimodal.images import FIELD
from headway.multimodal.items import KEY_BYTES


def longest_seconds(info: SoundInfo, settings: MelSettings) -> float:
    """Of a recording: as many spectra as the model hears at most."""
    return settings.most_samples(info.most_units * FRAMES_PER_ROW) / RATE


def make_sound(info: SoundInfo, settings: MelSettings, samples: Floats) -> EncoderItem:
    """The item of a recording.

    Args:
        samples: float32 [n] at ``RATE``, one channel.

    Raises:
        InvalidRequestError: it is too short, or too long.
    """
    layout = SoundLayout(settings.frames(len(samples)), info.mel_bins)
    if not layout.frames:
        raise InvalidRequestError(
            f"the recording has {len(samples)} samples at {RATE} Hz; that is less than one spectrum needs", FIELD
        )
    if layout.units > info.most_units:
        raise InvalidRequestError(
            f"the recording lasts {len(samples) / RATE:.1f} s; at most {longest_seconds(info, settings):.1f} s are heard "
            "at once: send it in parts",
            FIELD,
        )
    data = spectra(samples, settings).tobytes()
    key = blake2b(repr(layout).encode(), digest_size=KEY_BYTES)
    key.update(data)
    rows = info.longest if info.pads else cdiv(layout.units, info.reduces)
    return EncoderItem(
        kind="audio", key=key.digest(), rows=rows, sizes=layout.sizes, data=data, first=0, units=layout.units,
        reach=(info.reach, info.reach),
    )  # fmt: skip
