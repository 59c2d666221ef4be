"""The meaning of the indexer's operations; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.latent_rows import cached, checked_tables, rows_of
from headway.kernels.rope_kv_write.reference import rotate, write_rows


def index_write(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    kv_slots: torch.Tensor,
    keys: torch.Tensor,
) -> None:
    turn = cos_sin[positions.long().clamp(0, cos_sin.shape[0] - 1)]
    normed = F.layer_norm(k.float(), k.shape[1:], weight.float(), bias.float(), eps).to(k.dtype)
    write_rows(keys, kv_slots, rotate(normed[:, None], turn)[:, 0])
    q.copy_(rotate(q, turn))


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    first: int,
    scale: float,
    max_seq_len_bound: int,
) -> torch.Tensor:
    num_rows, block_size = row_slots.shape[0], keys.shape[1]
    tables, _ = checked_tables(keys, block_tables, row_slots, seq_lens, max_seq_len_bound)
    row, _ = rows_of(query_start, first + q.shape[0])
    row = row[first:].clamp(max=num_rows - 1)
    place = torch.arange(max_seq_len_bound, device=q.device).clamp(max=tables.shape[1] * block_size - 1)
    found = cached(keys, tables[row][:, place // block_size], place % block_size)  # [N, B, D]
    scores = torch.relu(torch.einsum("nhd,nbd->nhb", q.float(), found) * scale)
    return torch.einsum("nhb,nh->nb", scores, weights.float())


def index_topk(scores: torch.Tensor, positions: torch.Tensor, selected: torch.Tensor) -> None:
    size, wanted = scores.shape[1], selected.shape[1]
    newest = positions.long().clamp(0, size - 1)[:, None]
    place = torch.arange(size, device=scores.device)
    ranked = torch.where(scores.isnan(), float("-inf"), scores)
    # What is not seen comes last, behind what is seen and has no chance.
    order = torch.where(place <= newest, ranked, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    unseen = order > newest
    order = order.gather(1, unseen.to(torch.int8).sort(dim=1, stable=True).indices)  # seen ones first, in their order
    kept = F.pad(order[:, :wanted], (0, max(wanted - size, 0)), value=size)
    kept = torch.where(kept > newest, size, kept).sort(dim=1).values
    selected.copy_(torch.where(kept == size, -1, kept))
