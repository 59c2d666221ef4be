"""Keys in the order in which a step makes and reads them: no layer reads the newest ones before their layer wrote them, and
where an early launch would read keys before it waits, none of them is of this pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from headway.device.sim.errors import need


class KeyWatch:
    """What the step has written so far, by place of each cache; and what it has since its last embedding, whose kernel waits:
    all that was written before has landed when the second kernel behind it starts (``triton_early``, 2). Of a step in halves
    each has one."""

    def __init__(self) -> None:
        self._written: dict[int, torch.Tensor] = {}
        self._fresh: dict[int, torch.Tensor] = {}

    def begin(self, args: Any) -> None:
        """A step begins, or a pass of a drafter."""
        self._written.clear()
        self._fresh.clear()

    def embed(self, args: Any) -> None:
        """A pass begins."""
        self._fresh.clear()

    def note(self, args: Any) -> None:
        """The op writes keys at ``kv_slots``."""
        cache, slots = args.k_cache, args.kv_slots
        if cache.shape[2] == 0:  # queries alone
            return
        places = cache.shape[0] * cache.shape[1]
        for kept in (self._written, self._fresh):
            mine = kept.setdefault(cache.data_ptr(), torch.zeros(places, dtype=torch.bool))
            mine[slots[(slots >= 0) & (slots < places)].long()] = True

    def decode(self, args: Any) -> None:
        """``decode_attention``: it reads all but its tokens' own keys early. What writes keys is noted."""
        if not args.shares:
            self.note(args)
        every = {"num_decode_rows": len(args.row_slots), "decode_rows": None, "reads_this_step": False}
        self.check(SimpleNamespace(**vars(args) | every))

    def check(self, args: Any) -> None:
        """The newest keys of each row are written. Earlier ones of decode rows are not of this pass, or the op was told."""
        cache, starts, lens, size = (
            args.k_cache,
            args.query_start.tolist(),
            args.seq_lens.tolist(),
            args.k_cache.shape[1],
        )
        written, fresh = self._written.get(cache.data_ptr()), self._fresh.get(cache.data_ptr())
        count = (
            args.num_decode_rows if args.decode_rows is None else min(int(args.decode_rows[0]), args.num_decode_rows)
        )
        for row, (length, slot) in enumerate(zip(lens, args.row_slots.tolist(), strict=True)):
            queries = starts[row + 1] - starts[row]
            if not length or not queries or not 0 <= slot < len(args.block_tables):
                continue
            need(written is not None, "paged_attention: reads keys that nobody wrote in this pass")
            assert written is not None
            oldest = length - queries
            least = max(oldest - args.window + 1, 0) if args.window else 0
            least = oldest // args.chunk * args.chunk if args.chunk else least
            position = torch.arange(least, length)
            place = args.block_tables[slot, position // size].long() * size + position % size
            need(
                bool(written[place[-queries:]].all()),
                f"paged_attention: row {row} reads keys of its own tokens before they are written",
            )
            early = row < count and not args.reads_this_step
            need(
                not (early and fresh is not None and bool(fresh[place[:-queries]].any())),
                f"paged_attention: row {row} may read keys of this step before its kernel waits; say reads_this_step",
            )
