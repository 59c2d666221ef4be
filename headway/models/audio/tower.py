"""``AudioTower``: a recording's spectrogram to rows of a decoder's input, block by block.

Shapes: F frames of a spectrogram, B mel bins, N = F / 4 rows that pass the blocks, C the tower's width. Lengths are the host's:
they come with the recording, so nothing is read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from headway.kernels.rms_norm import rms_norm
from headway.models.audio.conformer import ConformerBlock
from headway.models.audio.spec import AudioSpec
from headway.models.interface import Target
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import parameter
from headway.models.media_embedder import MediaEmbedder
from headway.multimodal.audio.layout import STRIDE, fourth

LEAST_ROWS = 32
"""Of the smallest size that is captured; each next one is twice as long."""


@dataclass(slots=True)
class AudioBuffers:
    """What a pass has on the device between two blocks.

    Attributes:
        x: [N, C] in the tower's dtype, hidden states.
        hidden: bool [N, 1, W], which of the keys around a row are not of the recording.
    """

    x: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def make(cls, spec: AudioSpec, rows: int, *, dtype: torch.dtype, device: torch.device) -> AudioBuffers:
        """Buffers of passes up to ``rows``."""
        return cls(
            x=torch.zeros(rows, spec.hidden_size, dtype=dtype, device=device),
            hidden=torch.zeros(rows, 1, spec.window, dtype=torch.bool, device=device),
        )


def captured_rows(longest: int) -> list[int]:
    """Sizes whose blocks are captured, rising."""
    sizes = [LEAST_ROWS << power for power in range(32)]
    return [*(rows for rows in sizes if rows < longest), longest]


class Subsampling(nn.Module):
    """act(norm(convolution)), twice, and a product: a fourth of the frames, and of the bins."""

    def __init__(self, spec: AudioSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        inputs = (1, spec.channels[0])
        self.weights = [
            parameter(width, own, 3, 3, dtype=dtype, device=device)
            for own, width in zip(inputs, spec.channels, strict=True)
        ]
        self.norms = [parameter(width, dtype=dtype, device=device) for width in spec.channels]
        size = fourth(spec.mel_bins) * spec.channels[1]
        self.out = Linear(size, {"input_proj_linear": spec.hidden_size}, bias=False, dtype=dtype, device=device)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        """f32 [F, B] -> [N, C]."""
        x = mel[None].to(self.dtype)
        for weight, norm in zip(self.weights, self.norms, strict=True):
            later = (0, 2) if self.spec.cumulative else (1, 1)
            x = F.conv2d(F.pad(x, (1, 1, *later)), weight, stride=STRIDE).permute(1, 2, 0)  # [frames, bins, channels]
            x = F.relu(self._normed(x, norm)).permute(2, 0, 1)
        return self.out.forward(x.permute(1, 2, 0).flatten(1))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self.spec.cumulative:
            return F.layer_norm(x, weight.shape, weight, None, self.spec.first_eps)
        return cumulative_norm(x, weight, self.spec.first_eps)

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.out.destinations(prefix)
        for name, weight, norm in zip(self.spec.names.convolutions, self.weights, self.norms, strict=True):
            found |= {f"{prefix}{name}conv.weight": Target(weight), f"{prefix}{name}norm.weight": Target(norm)}
        return found


def cumulative_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [frames, bins, channels], less the mean of all up to its frame, by the root of the mean square of such differences up
    to there, times ``weight`` [channels]; in float32 but for what comes out."""
    own = x.float()
    count = torch.arange(1, len(own) + 1, device=own.device) * own[0].numel()
    apart = own - (own.sum((1, 2)).cumsum(0) / count)[:, None, None]
    squares = apart.square().sum((1, 2)).cumsum(0) / count
    return (apart * torch.rsqrt(squares + eps)[:, None, None] * weight.float()).to(x.dtype)


class AudioTower(nn.Module):
    """See ``AudioSpec``. Its weights are uninitialised until ``finalize``.

    Args:
        embedder: what its rows go through; None: it has a product, a norm and a projector of its own.
    """

    def __init__(
        self, spec: AudioSpec, embedder: MediaEmbedder | None = None, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec, self.dtype, self.embedder = spec, dtype, embedder
        self.subsampling = Subsampling(spec, dtype=dtype, device=device)
        self._blocks = [ConformerBlock(spec, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        self.blocks = nn.ModuleList(self._blocks)
        if embedder is not None:
            return
        self.out = Linear(spec.hidden_size, {"output_proj": spec.out}, bias=True, dtype=dtype, device=device)
        parts = {"embedding_projection": spec.width}
        self.projector = Linear(spec.out, parts, bias=False, dtype=dtype, device=device)
        self.ones = torch.ones(spec.out, dtype=dtype, device=device)

    def open(self, buffers: AudioBuffers, units: int, mel: torch.Tensor) -> None:
        """One recording's pass begins, padded to ``units`` rows; ``mel``: f32 [F, B]."""
        spec, rows = self.spec, fourth(len(mel))
        buffers.x[:rows].copy_(self.subsampling.forward(mel))
        buffers.x[rows:units].zero_()
        row = torch.arange(units, device=mel.device)[:, None, None]
        key = row + torch.arange(1 - spec.past, spec.future + 1, device=mel.device)
        buffers.hidden[:units].copy_((key < 0) | (key >= rows))

    def run_block(self, number: int, buffers: AudioBuffers, units: int) -> None:
        """The pass goes through a block; the same work, whatever recording of up to ``units`` rows it is."""
        self._blocks[number].forward(buffers.x[:units], buffers.hidden[:units])

    def close(self, buffers: AudioBuffers, units: int, rows: int) -> torch.Tensor:
        """[rows, width] in the model's dtype, of a pass of so many units that has gone through all blocks."""
        x = buffers.x[: units : self.spec.reduces]
        if self.embedder is not None:
            found = self.embedder.forward(x.contiguous())
            return torch.cat([found, self.embedder.table[self.spec.padding].expand(rows - len(found), -1)])
        x = self.out.forward(x)
        return self.projector.forward(cast(torch.Tensor, rms_norm(x, self.ones, self.spec.eps)))

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        prefix = self.spec.prefix
        found = self.subsampling.destinations(f"{prefix}subsample_conv_projection.")
        for i, block in enumerate(self._blocks):
            found |= block.destinations(f"{prefix}{self.spec.names.blocks}{i}.")
        if self.embedder is not None:
            return found
        return found | self.out.destinations(prefix) | self.projector.destinations(self.spec.projector_prefix)

    def finalize(self) -> None:
        """Called once, when the weights are in place, ahead of ``Linear.finalize``."""
        for block in self._blocks:
            block.finalize()
