"""``gather_logprobs``: log-probabilities of the chosen token and of the most likely (or of given) tokens.

gather_logprobs(Tensor logits, Tensor token_ids, Tensor slots, Tensor num_logprobs, Tensor id_counts, Tensor id_table,
                int max_entries) -> (Tensor ids, Tensor logprobs, Tensor ranks, Tensor counts)

    logits        f32, bf16 or f16 [N, V], the model's raw output; NaN counts as -inf
    token_ids     int32 [N], the chosen tokens          slots  int32 [N]
    num_logprobs  int32 [S]: most likely tokens wanted; -1 = no log-probabilities
    id_counts     int32 [S]: when > 0, the first that many ids of id_table are reported instead of the most likely
                  tokens (also when num_logprobs is -1)
    id_table      int32 [S, I]
    max_entries   M >= what any row asks for (more is cut)

    ids           int32 [N, 1 + M]: the chosen token, then the entries, most likely first, lower id first on ties
    logprobs      f32 [N, 1 + M]: log-softmax of the raw logits, in f32
    ranks         int32 [N]: how many logits are >= the chosen token's
    counts        int32 [N]: valid entries, the chosen token included; 0 for rows that did not ask and slots outside
                  [0, S)

Entries past counts are (0, 0.0); ranks there are 0. An id outside [0, V) is reported as (0, -inf).
"""

from __future__ import annotations

import torch

from headway.kernels.gather_logprobs.reference import gather_logprobs as _reference
from headway.kernels.registry import Op


def _meta(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    num_logprobs: torch.Tensor,
    id_counts: torch.Tensor,
    id_table: torch.Tensor,
    max_entries: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    ids = slots.new_empty(rows, 1 + max_entries, dtype=torch.int32)
    per_row = slots.new_empty(rows, dtype=torch.int32)
    return ids, torch.empty_like(ids, dtype=torch.float32), per_row, torch.empty_like(per_row)


gather_logprobs = Op(
    "gather_logprobs(Tensor logits, Tensor token_ids, Tensor slots, Tensor num_logprobs, Tensor id_counts, "
    "Tensor id_table, int max_entries) -> (Tensor ids, Tensor logprobs, Tensor ranks, Tensor counts)",
    reference=_reference,
    meta=_meta,
    triton="headway.kernels.gather_logprobs.triton:gather_logprobs",
    cpu="headway.kernels.cpu.sampling_ops:gather_logprobs",
)
