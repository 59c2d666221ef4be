"""``HearingModel``: a decoder whose prompts have recordings. Its tower stands alone, or beside one that sees, and both fill
rows of one cache.

What runs a pass over an item is the same for both towers; an item's sizes say whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from headway.core.encode import BlockCost
from headway.core.media import SoundInfo
from headway.kernels.store_rows import store_rows
from headway.models.audio.spec import AudioSpec
from headway.models.audio.tower import AudioBuffers, AudioTower, captured_rows
from headway.models.decoder import DecoderConfig
from headway.models.interface import EncoderInput, EncoderSpec, WeightMap
from headway.models.media_embedder import MediaEmbedder
from headway.models.media_language import MediaModel
from headway.models.vision.passes import PassBuffers, PassShape
from headway.multimodal.audio.layout import FRAMES_PER_ROW, SoundLayout, is_sound
from headway.state.cache_pool import CachePool

MOST_UNITS = 750
"""Rows that pass the blocks of a recording: 30 s, which is what these towers were trained on."""


@dataclass(slots=True)
class BothBuffers(PassBuffers):
    """What passes of either tower have on the device."""

    sounds: AudioBuffers

    @classmethod
    def of(cls, pictures: PassBuffers, sounds: AudioBuffers) -> BothBuffers:
        """Both of them."""
        return cls(**{each.name: getattr(pictures, each.name) for each in fields(pictures)}, sounds=sounds)


class HearingModel(MediaModel):
    """See the module; with ``audio`` None it hears nothing.

    Args:
        token: id of placeholders of recordings.
        embedder: see ``AudioTower``.
        more: what the model that it stands upon takes.
    """

    def __init__(
        self,
        config: DecoderConfig,
        audio: AudioSpec | None,
        token: int,
        embedder: MediaEmbedder | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        **more: Any,
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len, **more)
        self.audio_tower: AudioTower | None = None
        if audio is None:
            return
        # On stages behind the first it gives its tensors' names alone, as the tower of pictures does.
        place = device if self._enters else torch.device("meta")
        self.audio_tower = AudioTower(audio, embedder, dtype=dtype, device=place)
        longest = audio.rows or min(MOST_UNITS, max_model_len)
        units = min(longest * audio.reduces, MOST_UNITS)
        own = EncoderSpec(
            kind="audio", longest=longest, words_per_row=audio.words_per_row, width=audio.width,
            blocks=audio.block_costs, sizes=SoundLayout(FRAMES_PER_ROW * units, audio.mel_bins).sizes,
        )  # fmt: skip
        sound = SoundInfo(
            token=token, mel_bins=audio.mel_bins, reach=audio.window, longest=longest, units=units,
            reduces=audio.reduces, pads=audio.rows > 0,
        )  # fmt: skip
        first = self.spec.encoder
        if first is None:
            self.spec = replace(self.spec, encoder=own, sound=sound, encodes=self._enters)
            return
        assert first.width == audio.width, "rows of both towers lie in one table"
        self.spec = replace(self.spec, encoder=replace(first, beside=own), sound=sound)

    def pass_buffers(self) -> PassBuffers:
        """See ``PartedModel``."""
        pictures, tower, sound = super().pass_buffers(), self.audio_tower, self.spec.sound
        if tower is None or sound is None:
            return pictures
        sounds = AudioBuffers.make(tower.spec, sound.units, dtype=tower.dtype, device=self.device)
        return BothBuffers.of(pictures, sounds)

    def pass_shapes(self) -> list[PassShape]:
        """See ``PartedModel``."""
        sound = self.spec.sound
        sizes = [] if sound is None else captured_rows(sound.units)
        return [*super().pass_shapes(), *(_shape(units) for units in sizes)]

    def exact_shape(self, sizes: tuple[int, ...]) -> PassShape:
        """See ``PartedModel``."""
        if not is_sound(sizes):
            return super().exact_shape(sizes)
        return _shape(SoundLayout(*sizes).units)

    def blocks_of(self, shape: PassShape) -> tuple[BlockCost, ...]:
        """See ``PartedModel``."""
        return self._tower().spec.block_costs if shape.is_sound else super().blocks_of(shape)

    def open_pass(self, item: EncoderInput, buffers: PassBuffers, shape: PassShape) -> None:
        """See ``PartedModel``."""
        if not shape.is_sound:
            super().open_pass(item, buffers, shape)
            return
        layout = SoundLayout(*item.sizes)
        mel = item.data[: layout.num_words].view(torch.float32).view(layout)
        self._tower().open(_sounds(buffers), shape.units, mel)

    def run_block(self, number: int, buffers: PassBuffers, shape: PassShape) -> None:
        """See ``PartedModel``."""
        if shape.is_sound:
            self._tower().run_block(number, _sounds(buffers), shape.units)
        else:
            super().run_block(number, buffers, shape)

    def close_pass(self, item: EncoderInput, buffers: PassBuffers, caches: CachePool) -> None:
        """See ``PartedModel``."""
        if not is_sound(item.sizes):
            super().close_pass(item, buffers, caches)
            return
        assert caches.features is not None
        rows = self._tower().close(_sounds(buffers), SoundLayout(*item.sizes).units, item.rows)
        store_rows(caches.features, item.places, rows.to(caches.features.dtype))

    def _tower(self) -> AudioTower:
        assert self.audio_tower is not None, "requests with recordings are refused where the model hears none"
        return self.audio_tower

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""
        found = super().weights()
        if self.audio_tower is None:
            return replace(found, unused=(*found.unused, "audio_tower.", "embed_audio."))
        return self._with_entry(found, self.audio_tower.destinations())

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""
        if self.audio_tower is not None and self._enters:
            self.audio_tower.finalize()
        else:
            self.audio_tower = None
        super().finalize()


def _shape(units: int) -> PassShape:
    return PassShape(1, units, is_sound=True)


def _sounds(buffers: PassBuffers) -> AudioBuffers:
    assert isinstance(buffers, BothBuffers)
    return buffers.sounds
