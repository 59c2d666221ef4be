"""What an audio tower and its projector are, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.encode import BlockCost
from headway.multimodal.audio.layout import FRAMES_PER_ROW


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioNames:
    """Beginnings of names in the checkpoint; those here are Gemma 4's.

    Attributes:
        convolutions: of the two ahead of the blocks.
        blocks: of the list of blocks.
        parts: of a block's first and second feed-forward part.
        attention: of its products of queries, keys and values.
        post, positions: of the product behind, and of the one of relative positions, whole.
        norms: ahead of attention, behind it, and behind the block.
        linear: what stands behind names of products.
    """

    convolutions: tuple[str, str] = ("layer0.", "layer1.")
    blocks: str = "layers."
    parts: tuple[str, str] = ("feed_forward1.", "feed_forward2.")
    attention: str = "self_attn."
    post: str = "self_attn.post"
    positions: str = "self_attn.relative_k_proj.weight"
    norms: tuple[str, str, str] = ("norm_pre_attn.", "norm_post_attn.", "norm_out.")
    linear: str = ".linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioSpec:
    """A tower of conformer blocks (Gulati et al. 2020) as the Universal Speech Model has them (Zhang et al. 2023).

    Attributes:
        prefix, projector_prefix: of the tower and of its projector in the checkpoint.
        names: behind the former.
        mel_bins: of a spectrogram.
        channels: that the two convolutions ahead of the blocks give.
        hidden_size, num_heads, num_layers: C, H, and the number of blocks.
        activation: inside the blocks.
        past: keys that a query sees up to its own.
        future: keys that it sees behind its own.
        span: the relative position of the first key that a query sees is ``span`` - 1, that of each next one less by 1.
        placed: keys that have one, from the first on.
        key_scale: of scores with keys, which those with relative positions do not have.
        soft_cap: of scores.
        hidden_score: of keys that are not seen.
        kernel: outputs of the block's convolution see so many inputs, the last is their own.
        residual_weight: of both feed-forward parts.
        limit: what goes into norms is clamped to +-limit.
        clipped: products clamp what goes in and comes out to ranges of the checkpoint's.
        eps: of the norms of the block's convolution and of the projector.
        first_eps: of those of the convolutions ahead.
        cumulative: these norms are over all time so far, and the convolutions see later frames alone; else norms are over the
            channels of each place, and convolutions see as far back as ahead.
        out: width that the tower gives; 0: that of its blocks.
        reduces: every so many rows of the blocks one becomes a row of the decoder.
        rows: of the decoder that each recording takes, however short; 0: as many as it has.
        padding: number of the embedder's token that those are which it has not.
        width: of a row of the decoder.
    """

    prefix: str = "audio_tower."
    projector_prefix: str = "embed_audio."
    names: AudioNames = AudioNames()
    mel_bins: int
    channels: tuple[int, int]
    hidden_size: int
    num_heads: int
    num_layers: int
    activation: str
    past: int
    future: int
    span: int
    placed: int
    key_scale: float
    soft_cap: float
    hidden_score: float
    kernel: int
    residual_weight: float
    limit: float
    clipped: bool
    eps: float
    first_eps: float
    cumulative: bool = False
    out: int
    reduces: int = 1
    rows: int = 0
    padding: int = 0
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
        return FRAMES_PER_ROW * self.reduces * self.mel_bins

    @property
    def block_costs(self) -> tuple[BlockCost, ...]:
        """What each block computes: two feed-forward parts, four products of attention, three of the convolution."""
        hidden = self.hidden_size
        return (BlockCost((2 * 8 + 4 + 3) * hidden**2, 2 * hidden, True),) * self.num_layers
