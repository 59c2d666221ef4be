"""RMS norms beside a gate, as Mamba-2 and the gated delta net have them behind their scans.

gated_rms_norm(x, gate, weight, eps, group, gate_first, sigmoid) -> y
    x, gate    [T, C] activations, last dimension contiguous
    weight     [C], or [group]: all groups have the same
    group      elements that are normalised together; divides C
    gate_first normalise x * act(gate); else the norm of x is multiplied by act(gate)
    sigmoid    act is the sigmoid; else silu
    y          [T, C] in x's dtype

All in f32, the norm rounded to x's dtype before the weight as ``rms_norm`` does.
"""

from __future__ import annotations

from headway.kernels.gated_rms_norm.reference import gated_rms_norm as _reference
from headway.kernels.registry import Op, like_first

gated_rms_norm = Op(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, int group, bool gate_first, bool sigmoid) -> Tensor",
    reference=_reference,
    meta=like_first,
    triton="headway.kernels.gated_rms_norm.triton:gated_rms_norm",
)
