"""Which tokens the rows of a step run again, and which rows store their recurrent states: what rings of inputs need to know.

replay_rows(storage, packed, query_start, row_slots, seq_lens, stored_at, store_at, places, width) -> ()
    storage     int32 [S, E], a row for each slot; storage[s, 0] is the number of tokens that its recurrent states have seen.
                Written in place
    packed      int32 [P], the packed step: packed[2] = rows, packed[4] = offset of the row records (slot, query_len,
                query_start, outcomes), packed[6] = leading rows that continue a generation with one token
    query_start, row_slots, seq_lens   see ``kernels.state_rows``
    stored_at, store_at   int32 [R], out: tokens that a row's states have seen, and after how many they are stored; see there
    places      M, of the rings
    width       W, most tokens of a row that continues a generation

Of a row that continues a generation only the first token is certain: others are drafts. It stores its states behind that
one, where its own tokens and those of a next row would otherwise not fit into the ring; else not at all (-1). So it does once
in M - 2 (W - 1) tokens at most. All other rows have known tokens alone, and store their states behind the last one: these may
be copied to a checkpoint. A row at position 0 has no state. Rows that are not live have stored_at 0 and store_at -1, and
leave ``storage`` alone.
"""

from __future__ import annotations

from headway.kernels.registry import Op
from headway.kernels.replay_rows.reference import replay_rows as _reference

replay_rows = Op(
    "replay_rows(Tensor(a!) storage, Tensor packed, Tensor query_start, Tensor row_slots, Tensor seq_lens, "
    "Tensor(b!) stored_at, Tensor(c!) store_at, int places, int width) -> ()",
    reference=_reference,
    triton="headway.kernels.replay_rows.triton:replay_rows",
)
