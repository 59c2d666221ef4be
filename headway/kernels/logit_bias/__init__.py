"""``logit_bias``: adds each request's biases to its logits.

logit_bias(Tensor(a!) logits, Tensor slots, Tensor bias_counts, Tensor bias_ids, Tensor bias_values) -> ()

    logits       f32 [N, V], in place        slots  int32 [N]; rows with a slot outside [0, S) stay untouched
    bias_counts  int32 [S]: entries in use, 0 = off
    bias_ids     int32 [S, B]: distinct token ids; those outside [0, V) are dropped        bias_values  f32 [S, B]
"""

from __future__ import annotations

from headway.kernels.logit_bias.reference import logit_bias as _reference
from headway.kernels.registry import Op

logit_bias = Op(
    "logit_bias(Tensor(a!) logits, Tensor slots, Tensor bias_counts, Tensor bias_ids, Tensor bias_values) -> ()",
    reference=_reference,
    triton="headway.kernels.logit_bias.triton:logit_bias",
    cpu="headway.kernels.cpu.sampling_ops:logit_bias",
)
