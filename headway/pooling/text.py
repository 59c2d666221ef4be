"""``TextPooler``: hidden states to vectors of texts and of tokens, as a ``PoolingSpec`` says.

Shapes: R rows, T tokens of the step, C hidden size, S slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headway.core.task import Task
from headway.kernels.masked_write import masked_write_
from headway.kernels.segment_pool import MAXIMUM, SUM, WEIGHTED_SUM, segment_pool
from headway.pooling.spec import PoolingSpec
from headway.state.batch import StepBatch
from headway.state.slots import SlotArena, Table

POOL_START, POOL_RAW = "pool_start", "pool_raw"
"""Slot tables that admissions write: the position from which tokens count, and 1 where the request wants vectors as they are,
neither normalised nor activated."""
_KINDS = {"mean": SUM, "mean_sqrt": SUM, "max": MAXIMUM, "weighted_mean": WEIGHTED_SUM}
_KEPT = {
    "mean": "pool_sum",
    "mean_sqrt": "pool_sum",
    "max": "pool_max",
    "weighted_mean": "pool_weighted",
    "cls": "pool_first",
}
"""Methods -> the slot table that keeps what earlier chunks of a text gave."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""[N, C] -> f32 [N, width]."""


def pooling_tables(spec: PoolingSpec, width: int, *, chunked: bool) -> list[Table]:
    """Slot tables of a ``TextPooler``.

    Args:
        width: numbers that are pooled.
        chunked: texts may come in several steps.
    """
    kept = sorted({_KEPT[method] for method in spec.methods if method in _KEPT}) if chunked else []
    return [Table(POOL_START), Table(POOL_RAW), *(Table(name, width, torch.float32) for name in kept)]


class TextPooler:
    """See ``Pooler``.

    Args:
        arena: has ``pooling_tables``.
        hidden: C.
        head: what follows pooling, or comes before it (``PoolingSpec.head_first``).
        head_width: numbers that it gives for one vector.
        chunked: texts may come in several steps.
        token_head: gives a token's numbers, for ``PoolingSpec.token_parts``; None: the head does.
    """

    def __init__(
        self,
        arena: SlotArena,
        spec: PoolingSpec,
        hidden: int,
        head: Head,
        head_width: int,
        *,
        chunked: bool,
        token_head: Head | None = None,
    ) -> None:
        self._spec, self._arena, self._head, self._chunked = spec, arena, head, chunked
        self._token_head = token_head
        self.wants_all = spec.by_token or any(method != "last" for method in spec.methods)
        self.width = 0 if spec.by_token else head_width
        self.token_width = head_width if any(task.by_token for task in spec.tasks()) else 0
        if spec.token_parts:
            self.token_width = sum(size for _, size in spec.token_parts)

    def __call__(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """See ``Pooler``."""
        spec = self._spec
        if spec.head_first:
            hidden = self._head(hidden)
        found = [self._pooled(method, hidden, batch) for method in spec.methods]
        pooled = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return self._finished(pooled if spec.head_first else self._head(pooled), batch.row_slots)

    def tokens(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """See ``Pooler``."""
        token = torch.arange(len(hidden), device=hidden.device, dtype=torch.int32)
        row = torch.searchsorted(batch.query_start[1:], token, right=True).clamp(max=len(batch.row_slots) - 1)
        slots = batch.row_slots.index_select(0, row)
        if self._token_head is None:
            return self._finished(self._head(hidden), slots)
        raw, columns = self._token_head(hidden), self._spec.token_columns()
        parts = [
            F.normalize(raw[:, start:end], dim=-1) if task is Task.TOKEN_EMBED else F.relu(raw[:, start:end])
            for task, (start, end) in columns.items()
        ]
        return self._unless_raw(raw, torch.cat(parts, dim=1), slots)

    def _finished(self, raw: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Normalised or activated f32 [N, width], but as it is for requests that want that."""
        spec = self._spec
        if spec.normalize:
            done = F.normalize(raw, dim=-1)
        elif spec.activation == "sigmoid":
            done = torch.sigmoid(raw)
        elif spec.activation == "softmax":
            done = torch.softmax(raw, dim=-1)
        elif spec.activation == "relu":
            done = F.relu(raw)
        else:
            return raw
        return self._unless_raw(raw, done, slots)

    def _unless_raw(self, raw: torch.Tensor, done: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``done``, but ``raw`` where the slot's request wants that."""
        wanted = self._arena.view(POOL_RAW).index_select(0, slots.clamp(min=0)) != 0
        return torch.where(wanted[:, None], raw, done)

    def _pooled(self, method: str, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """f32 [R, C] of one method."""
        if method == "last":
            return (hidden.index_select(0, batch.logit_indices) if self.wants_all else hidden).float()
        skip = self._arena.view(POOL_START).index_select(0, batch.row_slots.clamp(min=0))
        if method == "cls":
            start, end = batch.query_start[:-1], batch.query_start[1:]
            first = torch.minimum(start + (skip - batch.seq_lens + end - start).clamp(min=0), end - 1)
            first = first.clamp(0, len(hidden) - 1)  # of padding rows there may be none
            return self._with_earlier(method, hidden.index_select(0, first).float(), batch, skip)
        kind = _KINDS[method]
        pooled = segment_pool(hidden, batch.query_start, batch.seq_lens, skip, kind)
        pooled = self._with_earlier(method, pooled, batch, skip)
        if kind == MAXIMUM:
            return torch.where(batch.seq_lens[:, None] > 0, pooled, 0.0)
        counted, skipped = batch.seq_lens.float(), skip.float()
        if method == "weighted_mean":
            weight = (counted * (counted + 1) - skipped * (skipped + 1)) / 2
        else:
            weight = counted - skipped
        weight = weight.clamp(min=1.0)
        return pooled / (weight.sqrt() if method == "mean_sqrt" else weight)[:, None]

    def _with_earlier(self, method: str, pooled: torch.Tensor, batch: StepBatch, skip: torch.Tensor) -> torch.Tensor:
        """f32 [R, C] of this step's tokens, joined with what earlier chunks of the rows' texts gave and kept for later ones."""
        if not self._chunked:
            return pooled
        table = self._arena.view(_KEPT[method])
        slot = batch.row_slots.clamp(min=0)
        before = table.index_select(0, slot)
        begun = batch.seq_lens - (batch.query_start[1:] - batch.query_start[:-1])  # tokens of earlier chunks
        goes_on = begun > 0
        if method == "cls":
            goes_on, joined = begun > skip, before
        else:
            joined = torch.maximum(before, pooled) if method == "max" else before + pooled
        found = torch.where(goes_on[:, None], joined, pooled)
        live = (batch.row_slots >= 0) & (batch.seq_lens > 0)
        place = slot.long()[:, None] * table.shape[1] + torch.arange(table.shape[1], device=table.device)
        # Bits, not numbers: what is written is exact, and lanes that write nothing may share a place.
        masked_write_(table.view(torch.int32), place, found.view(torch.int32), live[:, None].expand_as(place))
        return found
