"""``min_tokens``: forbids a request's stop tokens until it has its minimum of tokens.

min_tokens(Tensor(a!) logits, Tensor slots, Tensor num_tokens, Tensor min_total, Tensor stop_counts,
           Tensor stop_ids) -> ()

    logits       float [N, V], in place      slots  int32 [N]; rows with a slot outside [0, S) stay untouched
    num_tokens   int32 [S], before this step's token        min_total  int32 [S] = prompt length + min_tokens
    stop_counts  int32 [S, 2] = (eos ids, all stop ids)
    stop_ids     int32 [S, C] ([S] when C = 1); ids outside [0, V) are dropped

While num_tokens[slot] < min_total[slot], the logits of stop_ids[slot, :stop_counts[slot, 1]] become -inf.
"""

from __future__ import annotations

from headway.kernels.min_tokens.reference import min_tokens as _reference
from headway.kernels.registry import Op

min_tokens = Op(
    "min_tokens(Tensor(a!) logits, Tensor slots, Tensor num_tokens, Tensor min_total, Tensor stop_counts, "
    "Tensor stop_ids) -> ()",
    reference=_reference,
    triton="headway.kernels.min_tokens.triton:min_tokens",
    cpu="headway.kernels.cpu.sampling_ops:min_tokens",
)
