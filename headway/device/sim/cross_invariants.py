"""What cross-attention obeys: it reads the outputs of one whole encoder item, written before, and nothing else.

Blocks of encoder outputs and those of tokens come from one pool, so the watch remembers of every place which item wrote it
last, and as which of its outputs; a token that is written there makes it nobody's.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from headway.device.sim.errors import need


class CrossWatch:
    """Who wrote the places of the caches. One for each simulated device."""

    def __init__(self) -> None:
        self._written: dict[int, torch.Tensor] = {}  # of a cache's memory: int64 [places, 3]: call, output, ends
        self._items = itertools.count(1)

    def check_write(self, args: Any) -> None:
        """Outputs go to real places, each to one of its own. A call may have several items, each in blocks of its own."""
        cache, places = args.k_cache, args.places.long()
        places = places[places != -1]  # those of a rehearsal
        most = cache.shape[0] * cache.shape[1]
        real = bool(((places >= cache.shape[1]) & (places < most)).all())
        need(real, "cross_kv_write: an output's place lies outside the cache, or in the null block")
        need(len(places.unique()) == len(places), "cross_kv_write: two outputs of an item share a place")
        written = self._written.setdefault(cache.data_ptr(), torch.zeros(most, 3, dtype=torch.int64))
        written[places, 0] = next(self._items)
        written[places, 1] = torch.arange(len(places))
        ends = torch.ones(
            len(places), dtype=torch.int64
        )  # behind which outputs an item may end: before a block's first place
        ends[:-1] = places[1:] % cache.shape[1] == 0
        written[places, 2] = ends

    def check_tokens(self, args: Any) -> None:
        """Keys of tokens are written: their places no longer hold outputs."""
        written = self._written.get(args.k_cache.data_ptr())
        if written is not None:
            written[args.kv_slots[args.kv_slots >= 0].long()] = 0

    def check_attention(self, args: Any) -> None:
        """Every token sees all outputs of one item, in order, and the bound covers them."""
        cache, tables, slots, lens = args.k_cache, args.block_tables, args.slots, args.lens
        need(not bool(args.arrivals.any()), "cross_attention: counters of shared rows are not zero")
        longest = int(lens.max()) if len(lens) else 0
        need(longest <= args.max_len_bound, f"cross_attention: max_len_bound={args.max_len_bound}, {longest} outputs")
        written, size = self._written.get(cache.data_ptr()), cache.shape[1]
        for slot, length in set(zip(slots.tolist(), lens.tolist(), strict=True)):
            if slot < 0:
                need(length == 0, "cross_attention: a token without a slot has outputs")
                continue
            need(length > 0, f"cross_attention: slot {slot} reads, and has no encoder outputs")
            need(written is not None, "cross_attention: nothing was ever encoded")
            assert written is not None
            blocks = tables[slot, : -(-length // size)].long()
            places = (blocks[:, None] * size + torch.arange(size)).flatten()[:length]
            call, output, ends = written[places].unbind(1)
            whole = bool((call == call[0]).all() and call[0] > 0 and (output - output[0] == torch.arange(length)).all())
            need(whole, f"cross_attention: slot {slot} reads what its item's encoder has not written")
            need(
                bool(ends[-1]), f"cross_attention: slot {slot} reads {length} outputs, which are not all of its item's"
            )
