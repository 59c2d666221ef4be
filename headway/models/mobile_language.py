"""``MobileSightModel``: a decoder that sees through ``MobileTower``: each picture is one square, and comes to as many rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.core.encode import BlockCost
from headway.core.media import Grid, VisionInfo
from headway.kernels.store_rows import store_rows
from headway.models.decoder import DecoderConfig
from headway.models.interface import EncoderInput, EncoderSpec, WeightMap
from headway.models.media_embedder import MediaEmbedder
from headway.models.media_language import MediaModel
from headway.models.vision.mobile import ROWS, MobileSpec, MobileTower
from headway.models.vision.passes import PassBuffers, PassShape
from headway.multimodal.layout import Layout, lay_out
from headway.multimodal.wire import AFFINE_INTS
from headway.state.cache_pool import CachePool

INTS_PER_ROW = 4
"""Words beside pixels, at least: three places of a patch, and a share of what is one of a picture."""


class MobileSightModel(MediaModel):
    """See the module.

    Args:
        sight: the tower, the id of placeholders of pictures, and what the tower's rows go through; the first None: it sees
            nothing.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        sight: tuple[MobileSpec | None, int, MediaEmbedder],
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        self.tower: MobileTower | None = None
        spec, token, embedder = sight
        self._seen = embedder
        info = VisionInfo(patch=1, token=token)
        if spec is not None:
            self.tower = MobileTower(spec, dtype=dtype, device=device if self._enters else torch.device("meta"))
            info = VisionInfo(patch=spec.side // ROWS, one_size=spec.side, token=token, longest=ROWS**2)
            layout, _ = lay_out(info, Grid(1, ROWS, ROWS))
            pixels = -(-info.channels * info.patch**2 // 4)
            encoder = EncoderSpec(
                kind="image", longest=ROWS**2, words_per_row=pixels + INTS_PER_ROW,
                width=embedder.spec.width, blocks=self.tower.costs, sizes=layout.sizes,
            )  # fmt: skip
            self.spec = replace(self.spec, encoder=encoder, encodes=self._enters)
        self.spec = replace(self.spec, vision=info)

    def pass_buffers(self) -> PassBuffers:
        """See ``PartedModel``."""
        return super().pass_buffers() if self.tower is None else self.tower.pass_buffers(self.device)

    def pass_shapes(self) -> list[PassShape]:
        """See ``PartedModel``."""
        return [] if self.tower is None else [PassShape(1, ROWS**2)]

    def exact_shape(self, sizes: tuple[int, ...]) -> PassShape:
        """See ``PartedModel``."""
        return PassShape(1, ROWS**2)

    def blocks_of(self, shape: PassShape) -> tuple[BlockCost, ...]:
        """See ``PartedModel``."""
        return self._mobile().costs

    def open_pass(self, item: EncoderInput, buffers: PassBuffers, shape: PassShape) -> None:
        """See ``PartedModel``: squares of a picture become the picture."""
        assert self.spec.vision is not None
        channels, patch = self.spec.vision.channels, self.spec.vision.patch
        rest = item.data[Layout.of(item.sizes).num_ints :]
        scale, shift = rest[:AFFINE_INTS].view(torch.float32).view(2, channels, 1, 1).unbind()
        pixels = rest[AFFINE_INTS:].view(torch.uint8)[: ROWS**2 * channels * patch**2]
        squares = pixels.view(ROWS, ROWS, channels, patch, patch).permute(2, 0, 3, 1, 4)
        self._mobile().open(buffers, squares.reshape(channels, ROWS * patch, -1).float() * scale + shift)

    def run_block(self, number: int, buffers: PassBuffers, shape: PassShape) -> None:
        """See ``PartedModel``."""
        self._mobile().run_block(number, buffers)

    def close_pass(self, item: EncoderInput, buffers: PassBuffers, caches: CachePool) -> None:
        """See ``PartedModel``."""
        assert caches.features is not None
        rows = self._seen.forward(self._mobile().close(buffers))
        store_rows(caches.features, item.places, rows.to(caches.features.dtype))

    def _mobile(self) -> MobileTower:
        assert self.tower is not None, "requests with pictures are refused where the model sees none"
        return self.tower

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""
        found = super().weights()
        if self.tower is None:
            return replace(found, unused=(*found.unused, "vision_tower."))
        return self._with_entry(found, self.tower.destinations())
