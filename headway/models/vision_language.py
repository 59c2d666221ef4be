"""``VisionLanguageModel``: a decoder whose placeholders are rows of an encoder cache, which its tower fills.

The tower runs ahead of the rows of its step, some blocks in each of several steps or all in one; the decoder's embedding takes
an id's row or a cached one, by indexes that lie in slot tables. Positions of a picture's tokens may be places in it: then the
step has a table of rotations of its own, row by row, and kernels that rotate read that by the token's number in the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

import msgspec
import torch

from headway.core.encode import BlockCost
from headway.core.media import Grid, VisionInfo
from headway.kernels.place_rows import place_rows
from headway.kernels.store_rows import store_rows
from headway.models.decoder import DecoderConfig
from headway.models.interface import EncoderInput, EncoderSpec, WeightMap
from headway.models.layers.attention import Attention
from headway.models.layers.forms import LayerForms
from headway.models.layers.junction import Stream
from headway.models.media_language import MediaModel
from headway.models.vision.passes import PassBuffers, PassShape, exact_shape, largest_shape, pass_shapes
from headway.models.vision.spec import VisionSpec
from headway.models.vision.tower import VisionTower
from headway.multimodal.layout import Layout, lay_out
from headway.multimodal.wire import AFFINE_INTS
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool

MOST_ROWS = 4096
"""Of a picture; a longer one would make every buffer as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SightConfig:
    """What a decoder with sight has beside the decoder.

    Attributes:
        vision: its tower.
        token: id of placeholders.
        sees: see ``VisionInfo``.
        sections: pairs of a head that rotate by time, row and column; (): all by position.
        interleaved: those of rows and columns lie between those of time (Qwen3-VL); else one behind the other.
        one_size, video_token, tempo, stamps: see ``VisionInfo``.
        most_rows: of a picture; 0: as many as there is room for.
        beginnings: beginnings of names that exporters write -> those here, tried in order.
    """

    vision: VisionSpec
    token: int
    sees: Literal["", "spans", "prompt"] = ""
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    one_size: int = 0
    most_rows: int = 0
    video_token: int = -1
    tempo: float = 0.0
    stamps: bool = False
    beginnings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SightedConfig(DecoderConfig):
    """A decoder with sight."""

    sight: SightConfig


class VisionLanguageModel(MediaModel):
    """See the module."""

    knows_stages: ClassVar[tuple[str, ...]] = ("_inputs", "_add_behind")

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        self.sight = sight = cast(SightedConfig, config).sight
        # On stages behind the first it gives its tensors' names alone.
        self.tower = VisionTower(sight.vision, dtype=dtype, device=device if self._enters else torch.device("meta"))
        self.num_added = len(sight.vision.deepstack)
        self._narrow_from = max(self._narrow_from, self.num_added)  # what is added is for all tokens
        vision = sight.vision
        patches = vision.group**2
        values = vision.patch_values * (1 if sight.video_token < 0 else vision.frames)
        words = patches * (-(-values // 4) + 3) + 3 + patches
        info = VisionInfo(
            patch=vision.patch,
            channels=vision.channels,
            group=vision.group,
            positions=0 if vision.interpolates or vision.by_axis else vision.positions,
            window=vision.window,
            one_size=sight.one_size,
            token=sight.token,
            sees=sight.sees,
            video_token=sight.video_token,
            frames=vision.frames,
            tempo=sight.tempo,
            stamps=sight.stamps,
            rotates_by_place=bool(sight.sections),
        )
        grid = _largest(info, min(MOST_ROWS, max_model_len))
        if sight.most_rows:  # in whatever shape
            grid = Grid(1, vision.group, min(sight.most_rows, MOST_ROWS, max_model_len) * vision.group)
        longest = grid.patches // patches
        info = msgspec.structs.replace(info, longest=longest)
        encoder = EncoderSpec(
            kind="image", longest=longest, words_per_row=words + AFFINE_INTS, sizes=lay_out(info, grid)[0].sizes,
            width=vision.width, patches=patches, blocks=vision.block_costs,
        )  # fmt: skip
        self.spec = replace(self.spec, encoder=encoder, vision=info, encodes=self._enters)
        self._most = largest_shape(lay_out(info, grid)[0], vision)
        self._axes: torch.Tensor | None = None
        if sight.sections:
            mixer = self._layers[0].mixer
            assert isinstance(mixer, Attention)
            self._positions_table = mixer.cos_sin
            self._axes = _axes(sight, mixer.cos_sin.shape[1]).to(device)

    def pass_buffers(self) -> PassBuffers:
        """See ``PartedModel``."""
        tower = self.tower
        return PassBuffers.make(self.sight.vision, self._most, dtype=tower.dtype, device=self.device)

    def pass_shapes(self) -> list[PassShape]:
        """See ``PartedModel``."""
        return pass_shapes(self._most, self.sight.vision, one_size=self.sight.one_size > 0)

    def exact_shape(self, sizes: tuple[int, ...]) -> PassShape:
        """See ``PartedModel``."""
        return exact_shape(Layout.of(sizes), has_first=bool(self.sight.vision.names.cls))

    def blocks_of(self, shape: PassShape) -> tuple[BlockCost, ...]:
        """See ``PartedModel``."""
        return self.sight.vision.block_costs

    def open_pass(self, item: EncoderInput, buffers: PassBuffers, shape: PassShape) -> None:
        """See ``PartedModel``."""
        layout = Layout.of(item.sizes)
        values, area = self.sight.vision.patch_values * layout.frames, self.sight.vision.patch**2
        ints, rest = item.data[: layout.num_ints], item.data[layout.num_ints :]
        affine = (
            rest[:AFFINE_INTS]
            .view(torch.float32)
            .view(2, 1, 3, 1)
            .expand(-1, layout.frames, -1, area)
            .reshape(2, values)
        )
        scale, shift = affine.unbind()
        pixels = rest[AFFINE_INTS:].view(torch.uint8)[: layout.grid.patches * values].view(-1, values)
        self.tower.open(buffers, shape, pixels.float() * scale + shift, ints, layout)

    def run_block(self, number: int, buffers: PassBuffers, shape: PassShape) -> None:
        """See ``PartedModel``."""
        self.tower.run_block(number, buffers, shape)

    def close_pass(self, item: EncoderInput, buffers: PassBuffers, caches: CachePool) -> None:
        """See ``PartedModel``: the picture's rows go to the encoder cache."""
        assert caches.features is not None
        rows = self.tower.close(buffers, Layout.of(item.sizes))
        store_rows(caches.features, item.places, rows.to(caches.features.dtype))

    def _inputs(self, batch: StepBatch, caches: CachePool) -> tuple[torch.Tensor, StepBatch]:
        x, batch = super()._inputs(batch, caches)
        if self._axes is None or batch.places is None:
            return x, batch
        table = self._positions_table
        own = batch.places.index_select(0, self._axes).T.long().clamp(0, len(table) - 1)  # [T, Drot]
        numbers = torch.arange(len(x), dtype=torch.int32, device=x.device)
        return x, replace(batch, positions=numbers, cos_sin=table.gather(0, own))

    def _add_behind(
        self, layer: int, stream: Stream, batch: StepBatch, caches: CachePool, forms: Sequence[LayerForms]
    ) -> Stream:
        if batch.media_rows is None:
            return stream
        assert caches.features is not None
        x = stream.residual
        place_rows(x, caches.features, batch.media_rows, (1 + layer) * x.shape[1], True)
        following = layer + 1
        return self._layers[following].enter(x, forms[following]) if following < len(self._layers) else Stream(x, None)

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""
        found = self._with_entry(super().weights(), self.tower.destinations())
        return replace(found, unused=(*found.unused, *self.tower.unused()), beginnings=self.sight.beginnings)

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""
        if self._enters:
            self.tower.finalize()
        else:
            del self.tower
        super().finalize()


def _largest(info: VisionInfo, rows: int) -> Grid:
    """The largest picture of up to ``rows`` rows; one of a single tile in any case."""
    if info.one_size:
        side = info.one_size // info.patch
        tile = (side // info.group) ** 2
        tiles = 1 if info.sees else max(rows // tile, 1)
        return Grid(tiles, side, side)
    side = max(math.isqrt(rows), 1) * info.group
    return Grid(1, side, side)


def _axes(sight: SightConfig, rotated: int) -> torch.Tensor:
    """int32 [Drot]: whether a column of the table rotates by time (0), row (1) or column (2)."""
    half = rotated // 2
    axes = torch.zeros(half, dtype=torch.int32)
    if sight.interleaved:
        for axis in (1, 2):
            axes[axis : 3 * sight.sections[axis] : 3] = axis
    else:
        ends = torch.tensor(sight.sections).cumsum(0).tolist()  # host: host memory
        axes[ends[0] : ends[1]], axes[ends[1] : ends[2]] = 1, 2
    return torch.cat([axes, axes])
