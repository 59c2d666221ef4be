"""What an audio tower and its projector are, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.encode import BlockCost
from headway.multimodal.audio.layout import FRAMES_PER_ROW


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioSpec:
    """A tower of conformer blocks (Gulati et al. 2020) as the Universal Speech Model has them (Zhang et al. 2023).

    Attributes:
        prefix, projector_prefix: of the tower and of its projector in the checkpoint.
        mel_bins: of a spectrogram.
        channels: that the two convolutions ahead of the blocks give.
        hidden_size, num_heads, num_layers: C, H, and the number of blocks.
        activation: inside the blocks.
        past: keys that a query sees up to its own.
        future: keys that it sees behind its own.
        span: the relative position of the first key that a query sees is ``span`` - 1, that of each next one less by 1;
            behind 0 there is none.
        soft_cap: of scores.
        hidden_score: of keys that are not seen.
        kernel: outputs of the block's convolution see so many inputs, the last is their own.
        residual_weight: of both feed-forward parts.
        limit: what goes into norms is clamped to +-limit.
        clipped: products clamp what goes in and comes out to ranges of the checkpoint's.
        eps: of the norms of the block's convolution, of the convolutions ahead and of the projector.
        out: width that the tower gives.
        width: of a row of the decoder.
    """

    prefix: str = "audio_tower."
    projector_prefix: str = "embed_audio."
    mel_bins: int
    channels: tuple[int, int]
    hidden_size: int
    num_heads: int
    num_layers: int
    activation: str
    past: int
    future: int
    span: int
    soft_cap: float
    hidden_score: float
    kernel: int
    residual_weight: float
    limit: float
    clipped: bool
    eps: float
    out: int
    width: int

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden_size // self.num_heads

    @property
    def window(self) -> int:
        """W: keys that a query sees."""
        return self.past + self.future

    @property
    def words_per_row(self) -> int:
        """Most words of a recording's spectrogram for each of its rows."""
        return FRAMES_PER_ROW * self.mel_bins

    @property
    def block_costs(self) -> tuple[BlockCost, ...]:
        """What each block computes: two feed-forward parts, four products of attention, three of the convolution."""
        hidden = self.hidden_size
        return (BlockCost((2 * 8 + 4 + 3) * hidden**2, 2 * hidden, True),) * self.num_layers
