"""``MediaModel``: a decoder whose placeholders are rows of an encoder cache. Towers fill these: ``vision_language``,
``mobile_language`` and ``audio_language`` add one each, alone or one upon the other.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

import torch

from headway.core.encode import BlockCost
from headway.kernels.place_rows import place_rows
from headway.models.decoder import DecoderModel
from headway.models.interface import EncoderInput
from headway.models.vision.passes import PassBuffers, PassShape
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


class MediaModel(DecoderModel):
    """See the module, and ``PartedModel`` for what towers do. By itself it has none."""

    knows_stages: ClassVar[tuple[str, ...]] = ("_inputs",)

    def pass_buffers(self) -> PassBuffers:
        """What passes have on the device, beside what towers add."""
        return PassBuffers.none(self.device)

    def pass_shapes(self) -> list[PassShape]:
        """Sizes whose blocks are captured."""
        return []

    def exact_shape(self, sizes: tuple[int, ...]) -> PassShape:
        """Of an item that no tower above takes."""
        self._refuse()

    def blocks_of(self, shape: PassShape) -> tuple[BlockCost, ...]:
        """Of an item that no tower above takes."""
        self._refuse()

    def open_pass(self, item: EncoderInput, buffers: PassBuffers, shape: PassShape) -> None:
        """Of an item that no tower above takes."""
        self._refuse()

    def run_block(self, number: int, buffers: PassBuffers, shape: PassShape) -> None:
        """Of an item that no tower above takes."""
        self._refuse()

    def close_pass(self, item: EncoderInput, buffers: PassBuffers, caches: CachePool) -> None:
        """Of an item that no tower above takes."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("the door refuses media that no tower takes")

    def _inputs(self, batch: StepBatch, caches: CachePool) -> tuple[torch.Tensor, StepBatch]:
        x = self._entering(batch)
        if self._enters and batch.media_rows is not None:
            assert caches.features is not None
            place_rows(x, caches.features, batch.media_rows, 0, False)
        return x, batch
