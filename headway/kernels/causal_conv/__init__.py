"""Causal depthwise convolution over the tokens of each row, with the window's past in the slot.

causal_conv(x, weight, bias, ring, query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short, silu)
-> y
    x          [T, C] activations, last dimension contiguous
    weight     [C, W]; weight[c, W - 1] is of the token itself      bias  [C] or None
    ring       [S, M, C], M >= W, in x's dtype; ring[slot, p % M] is the input at position p. Written in place
    query_start, row_slots, seq_lens   see ``kernels.state_rows``
    packed, max_chunks  the packed step with the chunk table of rows of more than ``short`` tokens, and a bound on its entries
    max_query_len  >= tokens of every row
    short      rows of so many tokens or fewer are not in the table
    silu       apply x * sigmoid(x) to the result
    y          [T, C] in x's dtype: sum over w of weight[c, w] * input[position - (W - 1) + w], plus bias, in f32,
    rounded once;
               inputs at negative positions are zeros.

The window lies in a ring that is indexed by position, not in a buffer that is shifted: a step writes each input once,
no program reads a place that another one of the step writes where M >= W + the row's tokens - 1, and rows of more
tokens are written by the program that has read the past. What rejected drafts, up to M - W of them, have left in it is
overwritten before it is read.
"""

from __future__ import annotations

from headway.kernels.causal_conv.reference import causal_conv as _reference
from headway.kernels.registry import Op, like_first

causal_conv = Op(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) ring, Tensor query_start, Tensor row_slots, "
    "Tensor seq_lens, Tensor packed, int max_chunks, int max_query_len, int short, bool silu) -> Tensor",
    reference=_reference,
    meta=like_first,
    triton="headway.kernels.causal_conv.triton:causal_conv",
    cpu="headway.kernels.causal_conv.cpu:causal_conv",
)
