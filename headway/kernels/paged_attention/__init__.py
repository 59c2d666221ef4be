"""Causal attention over the paged KV cache, for decode rows, prefill rows and any mix of the two.

paged_attention(q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, arrivals, scale, window, soft_cap,
                num_decode_rows, max_query_len, max_seq_len_bound, decode_rows, chunk, sinks, slopes,
                reads_this_step, width) -> out
    q             [T, H, D] (bf16, f16, f32), last two dimensions contiguous; any D; H a multiple of KH
    k_cache, v_cache  [NB, bs, KH, D] in q's dtype or float8_e4m3fn, equal strides, head dimensions contiguous;
                  bs a power of two from 8 to 256
    block_tables  int32 [S, MB]; an id outside [0, NB) reads block 0
    row_slots     int32 [R], row -> row of block_tables; outside [0, S) (-1 on padding) the row's output is zeros
    query_start   int32 [R + 1], first token of each row; token r belongs to decode row r
    seq_lens      int32 [R], context including this step's tokens, at most MB * bs; 0 (padding, zombie): output is zeros
    arrivals      int32 [>= R width, KH] scratch, zero before and after: where programs that share a row count who
                  is done, and where those that share prompts draw what is next
    scale         > 0, multiplies q . k
    window        > 0: a query sees the last ``window`` positions, itself included; 0: all of them
    soft_cap      > 0: logits become soft_cap * tanh(logits / soft_cap); 0: off
    num_decode_rows   leading rows with exactly one token (padding rows among them may have none)
    max_query_len     >= every row's tokens; sizes grids only
    max_seq_len_bound >= every seq_len; sizes grids only
    decode_rows   int32 [1], the true number of such rows where the host knows a bound: the first min(decode_rows,
                  num_decode_rows) rows have one token each, and at most R - num_decode_rows rows that are not padding follow
    chunk         > 0: positions are cut into chunks of so many, and a query sees its own chunk up to itself; 0: they are not.
                  No layer has a window, too
    sinks         float32 [H] or None: per head a logit more in the softmax, as it is (neither scaled nor capped), whose value
                  is zero: it takes weight and gives nothing. Once a row and head, however the row is split
    slopes        float32 [H] or None: slope * (key's position - query's) is added to a logit behind the cap (ALiBi)
    reads_this_step   decode rows may read keys before their newest one that this very step has written
    width         > 1: no row is a decode row, and all rows have up to so many tokens, drafts among them; T <= width R. A step
                  has one of few widths, since kernels are compiled for them. 1: rows are of any length
    out           [T, H, D] in q's dtype; tokens past query_start[R] are zeros

A decode row's keys and values before its newest token were written by earlier steps: kernels may read them before the step's
writes have landed (``triton_early``, 2). With ``reads_this_step`` they wait for all kernels before them first. The simulated
device holds callers to it.

Query j of a row with n queries sits at position seq_len - n + j and sees the positions up to its own. Query heads
[kh * H / KH, (kh + 1) * H / KH) share KV head kh. Logits and sums are f32.
"""

from __future__ import annotations

from headway.kernels.paged_attention import reference
from headway.kernels.registry import Op, like_first

paged_attention = Op(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor row_slots, "
    "Tensor query_start, Tensor seq_lens, Tensor(a!) arrivals, float scale, int window, float soft_cap, int num_decode_rows, "
    "int max_query_len, int max_seq_len_bound, Tensor? decode_rows=None, int chunk=0, Tensor? sinks=None, "
    "Tensor? slopes=None, bool reads_this_step=False, int width=1) -> Tensor",
    reference=reference.paged_attention,
    meta=like_first,
    triton="headway.kernels.paged_attention.launch:paged_attention",
    cpu="headway.kernels.cpu.ops:paged_attention",
)
