"""A model's processor files -> ``MelSettings``. A field that is not honoured is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import structs

from headway.api.pictures.settings import FILES, read_fields
from headway.core.errors import ConfigError
from headway.core.media import SoundInfo
from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.spectra import MelSettings

_MINE: Final = {
    "min_frequency": "lowest", "max_frequency": "highest", "preemphasis": "emphasis", "input_scale_factor": "scale",
    "mel_floor": "floor",
}  # fmt: skip
_MOST_SAMPLES: Final = 16 * RATE
"""Of a window, or from one to the next."""


class Family(NamedTuple):
    """Of an architecture: what its feature extractor takes absent fields for, and what no field says."""

    defaults: dict[str, Any]
    rules: dict[str, Any]


_FAMILIES: Final = {
    "Gemma3nForConditionalGeneration": Family(
        {
            "frame_length_ms": 32.0, "min_frequency": 125.0, "max_frequency": 7600.0, "preemphasis": 0.97,
            "fft_overdrive": True, "mel_floor": 1e-5,
        },
        {"clamps": True, "multiple": 128, "centred": False},
    )
}  # fmt: skip


def read_sound_settings(folder: Path | None, info: SoundInfo, architecture: str = "") -> tuple[MelSettings, SoundInfo]:
    """How a model's recordings are prepared, and what it hears with the bound that its processor's files set.

    Args:
        folder: with the processor's files, where there are any.

    Raises:
        ConfigError: something there is not implemented, or does not fit the model; names the field.
    """
    family = _FAMILIES.get(architecture, Family({}, {}))
    given = {
        name: value for name, value in read_fields(folder, FILES, "feature_extractor").items() if value is not None
    }
    values = {**family.defaults, **given}
    most = read_fields(folder, ("processor_config.json",), "").get("audio_seq_length")
    most = info.longest if most is None else most
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConfigError(f"the processor's audio_seq_length = {most!r:.60} must be a positive integer")
    if info.pads and most != info.longest:
        raise ConfigError(f"the processor's audio_seq_length = {most} is not what the model hears, {info.longest}")
    for name, wanted in (("sampling_rate", RATE), ("feature_size", info.mel_bins), ("dither", 0)):
        if values.get(name, wanted) != wanted:
            raise _refused(name, values[name], f"does not fit; {wanted} does")
    found: dict[str, Any] = {
        ours: _number(values, name) for name, ours in _MINE.items() if values.get(name) is not None
    }
    for name, ours, stored, usual in (
        ("frame_length_ms", "window", "frame_length", 20.0), ("hop_length_ms", "hop", "hop_length", 10.0),
    ):  # fmt: skip
        found[ours] = round(RATE * (_number(values, name) if values.get(name) is not None else usual) / 1000)
        # transformers writes lengths in samples, and reads those in milliseconds.
        if values.get(stored, found[ours]) != found[ours] or not 1 <= found[ours] <= _MOST_SAMPLES:
            raise _refused(stored, values.get(stored, found[ours]), f"is not {name}'s, {found[ours]} samples")
    for name, ours in (("per_bin_mean", "mean"), ("per_bin_stddev", "deviation")):
        found[ours] = _each(values, name, info.mel_bins)
    doubled, first = bool(values.get("fft_overdrive", False)), bool(values.get("preemphasis_htk_flavor", True))
    found |= family.rules
    settings = MelSettings(bins=info.mel_bins, doubled=doubled, keeps_first=first, **found)
    if not 0 <= settings.lowest < settings.highest <= RATE / 2:
        raise _refused("max_frequency", settings.highest, f"must lie between min_frequency and {RATE // 2}")
    if settings.floor <= 0:
        raise _refused("mel_floor", settings.floor, "must be positive")
    return settings, structs.replace(info, longest=min(info.longest, most))


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise _refused(name, value, "must be a number")
    return float(value)


def _each(values: Mapping[str, Any], name: str, bins: int) -> tuple[float, ...]:
    value = values.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) != bins or not all(isinstance(each, int | float) for each in value):
        raise _refused(name, value, f"must be {bins} numbers")
    return tuple(map(float, value))


def _refused(name: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"the feature extractor's {name} = {value!r:.60} {reason}")
