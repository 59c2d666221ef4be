"""``FlexAttention``: any rule of scores and masks that a model brings as functions, over the paged cache, in plain torch.

The slow, right path for what no kernel knows. Rules have the signatures of ``torch.nn.attention.flex_attention``, so that
what is written for it runs here: ``score_mod(score, batch, head, q_idx, kv_idx)`` and ``mask_mod(batch, head, q_idx, kv_idx)``.
``batch`` is the request's slot, by which a rule may look things up in tensors of its own; indices are positions in the request.
A rule is called with tensors that broadcast to [rows, H, queries, keys], and only reads them.

Rules come on top of causality, windows, chunks and sinks: they cannot show a query later keys, which are not there yet where a
prompt comes in chunks. They must be functions of positions, heads and what is fixed for a text: prefixes are hit by text.

Nothing waits for the device: rows, queries and keys are laid out by bounds. Decode rows are done together, other rows one by
one and ``QUERIES`` at a time, keys ``KEYS`` at a time with a running softmax. What a rule says of a step's decode rows is the
same in all layers with the same rule, so it is asked once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headway.core.ints import cdiv
from headway.kernels.paged_attention.rule import ScoreRule
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache

QUERIES, KEYS = 256, 2048
"""Of a tile; together with H they bound what is held at a time."""

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class FlexRule:
    """What a model brings; layers with equal rules share masks.

    Attributes:
        mask_mod: whether a key is seen; None: all are that causality leaves.
        score_mod: the score, scaled and capped before, that takes a score's place; None: itself.
    """

    mask_mod: MaskMod | None = None
    score_mod: ScoreMod | None = None


class Tile(NamedTuple):
    """Rows and queries of a launch, all int64.

    Attributes:
        token: [r, n], of each query in the step; T where there is none.
        slot, length: [r], of the row; length 0: it is silent.
        position: [r, n], of the queries.
    """

    token: torch.Tensor
    slot: torch.Tensor
    length: torch.Tensor
    position: torch.Tensor


class FlexAttention:
    """One layer's attention under a model's own rule.

    Args:
        rule: scale, window or chunk, cap, sinks and slopes.
        flex: what the model brings.
        group: of the layer's cache.
    """

    def __init__(self, rule: ScoreRule, flex: FlexRule, group: int) -> None:
        self.rule, self.flex, self.group = rule, flex, group

    def __call__(self, q: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """q [T, H, D] of a step whose keys and values are in the cache -> [T, H, D]; zeros on padding and zombies."""
        tokens = q.shape[0]
        out = q.new_zeros((tokens + 1, *q.shape[1:]))  # the last one collects what belongs nowhere
        together = batch.num_decode_rows if batch.decode_rows is None else 0
        rows = len(batch.row_slots)
        tiles = [self._tile(batch, 0, together, 0, 1, tokens)] if together else []
        for row in range(together, rows):
            for first in range(0, batch.max_query_len, QUERIES):
                most = min(QUERIES, batch.max_query_len - first)
                tiles.append(self._tile(batch, row, row + 1, first, most, tokens))
        for number, tile in enumerate(tiles):
            queries = q[tile.token.clamp(0, max(tokens - 1, 0))]  # [r, n, H, D]
            out[tile.token] = self._attend(queries, tile, batch, cache, shared=bool(together) and number == 0)
        return out[:tokens]

    def _tile(self, batch: StepBatch, low: int, high: int, first: int, most: int, tokens: int) -> Tile:
        starts, ends = batch.query_start[low:high].long(), batch.query_start[low + 1 : high + 1].long()
        slot, tables = batch.row_slots[low:high].long(), batch.groups[self.group].block_tables
        known = (slot >= 0) & (slot < len(tables))
        length = torch.where(known, batch.groups[self.group].seq_lens[low:high].long(), 0)
        index = first + torch.arange(most, device=slot.device)
        token = starts[:, None] + index
        token = torch.where((token < ends[:, None]) & (token >= 0) & (token < tokens), token, tokens)
        return Tile(token, slot.clamp(0, len(tables) - 1), length, (length - (ends - starts))[:, None] + index)

    def _attend(self, q: torch.Tensor, tile: Tile, batch: StepBatch, cache: LayerCache, shared: bool) -> torch.Tensor:
        """q [r, n, H, D] -> [r, n, H, D]."""
        (k_cache, v_cache), heads, dtype = cache[:2], q.shape[2], q.dtype
        num_blocks, size, kv_heads, _ = k_cache.shape
        tables = batch.groups[self.group].block_tables[tile.slot].long()  # [r, MB]
        tables = torch.where((tables >= 0) & (tables < num_blocks), tables, 0)
        bound = min(batch.max_seq_len_bound, tables.shape[1] * size)
        step = cdiv(KEYS, size)
        top = torch.full((*q.shape[:1], heads, q.shape[1], 1), float("-inf"), device=q.device)
        total, acc = torch.zeros_like(top), torch.zeros((*top.shape[:3], q.shape[3]), device=q.device)
        q = q.float().unflatten(2, (kv_heads, -1))  # [r, n, KH, G, D]
        for begin in range(0, cdiv(bound, size), step):
            blocks = tables[:, begin : min(begin + step, cdiv(bound, size))]
            key = begin * size + torch.arange(blocks.shape[1] * size, device=q.device)
            there = key < tile.length[:, None]  # [r, keys]
            k, v = (_of_blocks(part, blocks) for part in (k_cache, v_cache))  # [r, keys, KH, D]
            k, v = (
                torch.where(there[..., None, None], part, 0.0) for part in (k, v)
            )  # memory behind may hold anything
            scores = torch.einsum("rnkgd,rmkd->rkgnm", q, k).flatten(1, 2) * self.rule.scale
            scores = self._modified(scores, tile, key)
            name = (self.flex, self.group, self.rule.window, self.rule.chunk, heads, begin)
            seen = batch.masks.get(name) if shared else None
            if seen is None:
                seen = self._seen(tile, key, there, heads)
                if shared:
                    batch.masks[name] = seen
            scores = torch.where(seen, scores, float("-inf"))
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = torch.where(new_top == float("-inf"), 0.0, new_top)
            weights, decay = torch.exp(scores - shift), torch.exp(top - shift)
            total = total * decay + weights.sum(-1, keepdim=True)
            part = torch.einsum("rkgnm,rmkd->rkgnd", weights.unflatten(1, (kv_heads, -1)), v).flatten(1, 2)
            acc, top = acc * decay + part, new_top
        if self.rule.sinks is not None:
            sink = torch.exp(self.rule.sinks[:, None, None] - top)
            total = torch.where(total > 0, total + sink, total)
        out = acc / torch.where(total > 0, total, 1.0)
        return out.transpose(1, 2).to(dtype)

    def _modified(self, scores: torch.Tensor, tile: Tile, key: torch.Tensor) -> torch.Tensor:
        """Scores [r, H, n, keys], scaled: capped, biased and given to the model's rule."""
        rule = self.rule
        if rule.soft_cap > 0:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        if rule.slopes is not None:
            scores = scores + rule.slopes[:, None, None] * (key - tile.position[..., None])[:, None]
        if self.flex.score_mod is None:
            return scores
        return self.flex.score_mod(scores, *_indices(tile, key, scores.shape[1]))

    def _seen(self, tile: Tile, key: torch.Tensor, there: torch.Tensor, heads: int) -> torch.Tensor:
        """bool, broadcasts to [r, H, n, keys]."""
        position = tile.position[:, None, :, None]
        seen = there[:, None, None] & (key <= position)
        if self.rule.window:
            seen = seen & (key > position - self.rule.window)
        if self.rule.chunk:
            seen = seen & (key >= position // self.rule.chunk * self.rule.chunk)
        if self.flex.mask_mod is not None:
            seen = seen & self.flex.mask_mod(*_indices(tile, key, heads))
        return seen


def _indices(
    tile: Tile, key: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slot [r, 1, 1, 1], head [H, 1, 1], query's position [r, 1, n, 1], key's position [keys])."""
    head = torch.arange(heads, device=key.device)[:, None, None]
    return tile.slot[:, None, None, None], head, tile.position[:, None, :, None], key


def _of_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Keys or values of blocks int64 [r, b] as f32 [r, b * bs, KH, D]."""
    if cache.itemsize > 1:
        return cache[blocks].flatten(1, 2).float()
    return cache.view(torch.uint8)[blocks].view(cache.dtype).flatten(1, 2).float()  # few devices select 8-bit floats
