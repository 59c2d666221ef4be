"""Which frames of a recording each token of a text was heard in, from what heads of cross-attention look at.

The method is that of Whisper's authors (openai/whisper, timing.py): weights of some heads over the frames, standardised over
the tokens, smoothed by a median over ``SMOOTHED`` frames, and averaged; then the likeliest way through them
(``kernels.time_warp``).

Shapes: T tokens of a text, N encoder outputs ("frames"), A heads, D their size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.time_warp import time_warp
from headway.state.batch import CrossBatch
from headway.state.cache_pool import LayerCache

SMOOTHED = 7
MOST_WEIGHTS = 2**22
"""Weights computed at once, but for those of a single head: about ten times as many float32 numbers lie side by side."""
_SORTED = ((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6), (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4))
"""Pairs to exchange, the smaller to the front: the median of seven is in the middle then (Devillard, Fast median search)."""


def read_keys(cross: CrossBatch, slot: int, frames: int, heads: list[int], cache: LayerCache) -> torch.Tensor:
    """f32 [A, N, D]: keys of a slot's first ``frames`` encoder outputs, in some heads of a layer."""
    keys = cache[0]  # [NB, bs, H, D]
    size = keys.shape[1]
    blocks = cross.block_tables[slot, : -(-frames // size)].clamp(0, keys.shape[0] - 1)
    stored = keys.view(torch.uint8) if keys.element_size() == 1 else keys  # torch picks rows of no float8
    found = stored.index_select(0, blocks).view(keys.dtype).flatten(0, 1)[:frames].float()
    return torch.stack([found[:, head] for head in heads])


def first_frames(
    q: torch.Tensor, k: torch.Tensor, scale: float, first: int, *, most_weights: int = MOST_WEIGHTS
) -> torch.Tensor:
    """The frame in which each token is first heard.

    Args:
        q: [A, T, D], of each token that the decoder has read; what it looks at is heard in the token behind it.
        k: f32 [A, N, D].
        most_weights: that are computed at once, but for those of a single head.
        first: tokens before this one, and the last, have a part in what is usual, and none in the way.

    Returns:
        int32 [T - 1 - first], rising.
    """
    return time_warp(-_looked_at(q.float(), k, scale, most_weights)[first:-1].contiguous())


def _looked_at(q: torch.Tensor, k: torch.Tensor, scale: float, most_weights: int) -> torch.Tensor:
    """f32 [T, N], how much more than usual the heads look at a frame."""
    heads, tokens, frames = q.shape[0], q.shape[1], k.shape[1]
    at_once = max(most_weights // (tokens * frames), 1)
    total = torch.zeros(tokens, frames, dtype=torch.float32, device=q.device)
    for some in range(0, heads, at_once):
        part = slice(some, some + at_once)
        weights = (torch.matmul(q[part], k[part].transpose(1, 2)) * scale).softmax(-1)  # [a, T, N]
        spread, mean = torch.std_mean(weights, dim=1, correction=0, keepdim=True)
        # What all tokens look at alike tells nothing.
        total += smoothed((weights - mean) / spread.clamp(min=torch.finfo(torch.float32).tiny)).sum(0)
    return total / heads


def smoothed(x: torch.Tensor) -> torch.Tensor:
    """[a, T, N] -> the same: of each frame the median of those around it; at the ends they are mirrored."""
    side, frames = SMOOTHED // 2, x.shape[-1]
    if frames <= side:
        return x
    padded = F.pad(x, (side, side), mode="reflect")
    values = [padded[..., i : i + frames] for i in range(SMOOTHED)]
    for low, high in _SORTED:
        values[low], values[high] = torch.minimum(values[low], values[high]), torch.maximum(values[low], values[high])
    return values[side]
