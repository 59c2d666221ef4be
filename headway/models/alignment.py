"""``CrossAligner``: when the tokens of a text are heard, by the cross-attention of some heads.

Queries are made once more from the residual stream ahead of each cross-attention, so that no other step pays for keeping them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.attention.alignment import first_frames, read_keys
from headway.core.hearing import AlignedRow
from headway.models.blocks import Block
from headway.models.layers.cross import CrossMixer
from headway.models.layers.junction import Stream
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


class CrossAligner:
    """See ``models.interface.Aligner``.

    Args:
        blocks: (number, block) of each block with cross-attention, layer by layer.
        heads: (layer, head) of those that are asked.
    """

    def __init__(self, blocks: Sequence[tuple[int, Block]], heads: Sequence[tuple[int, int]]) -> None:
        asked: dict[int, list[int]] = {}
        for layer, head in sorted(set(heads)):
            asked.setdefault(layer, []).append(head)
        self._asked = [(*blocks[layer], listed) for layer, listed in asked.items()]
        # What a block reads is what the one before gives.
        self.layers = tuple(number - 1 for number, *_ in self._asked)

    def __call__(
        self, auxiliary: Sequence[torch.Tensor], batch: StepBatch, rows: Sequence[AlignedRow], caches: CachePool
    ) -> torch.Tensor:
        """int32 [all the rows' tokens]; ``auxiliary``: of ``layers``, [T, C] each."""
        assert batch.cross is not None, "there are encoder outputs"
        found = []
        for row in rows:
            queries, keys, scale = [], [], 1.0
            for residual, (number, block, heads) in zip(auxiliary, self._asked, strict=True):
                mixer = block.mixer
                assert isinstance(mixer, CrossMixer)
                normed = block.into_mixer.normed(Stream(residual[row.begin : row.end]))
                q = mixer.query.forward(normed).unflatten(1, (-1, mixer.spec.head_dim))  # [t, H, D]
                queries += [q[:, head] for head in heads]
                keys.append(read_keys(batch.cross, row.slot, row.frames, heads, caches.layers[number]))
                scale = mixer.attend.scale
            found.append(first_frames(torch.stack(queries), torch.cat(keys), scale, row.first))
        return torch.cat(found)
