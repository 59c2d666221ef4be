"""What the encoder cache obeys: a token reads a row that an encoder has written, and tokens that lie side by side in a
picture read rows of one item, side by side."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from headway.device.sim.errors import need


class MediaWatch:
    """Who wrote the rows of encoder caches. One for each simulated device."""

    def __init__(self) -> None:
        self._written: dict[int, torch.Tensor] = {}  # of a cache's memory: int64 [rows, 2]: item, output
        self._items = itertools.count(1)

    def check_store(self, args: Any) -> None:
        """Outputs go to rows of the cache, each to one of its own."""
        table, places = args.table, args.places.long()
        places = places[places != -1]  # those of a rehearsal
        need(bool(((places >= 0) & (places < len(table))).all()), "store_rows: an output's row lies outside the cache")
        need(len(places.unique()) == len(places), "store_rows: two outputs share a row")
        written = self._written.setdefault(table.data_ptr(), torch.zeros(len(table), 2, dtype=torch.int64))
        written[places, 0] = next(self._items)
        written[places, 1] = torch.arange(len(places))

    def check_place(self, args: Any) -> None:
        """Every row that a token reads was written; where rows of neighbours rise by one, they are of one item."""
        rows = args.rows.long()
        reads = rows >= 0
        if not bool(reads.any()):
            return
        written = self._written.get(args.features.data_ptr())
        need(written is not None, "place_rows: a token reads the encoder cache, and nothing was ever encoded")
        assert written is not None
        need(bool((rows < len(args.features)).all()), "place_rows: a row lies outside the encoder cache")
        item, output = written[rows.clamp(min=0)].unbind(1)
        need(bool((item[reads] > 0).all()), "place_rows: a token reads a row that no encoder has written")
        side_by_side = reads[1:] & reads[:-1] & (rows[1:] == rows[:-1] + 1) & (output[1:] != 0)
        need(bool((item[1:] == item[:-1])[side_by_side].all()), "place_rows: a picture's tokens read rows of two items")
        need(bool((output[1:] == output[:-1] + 1)[side_by_side].all()), "place_rows: a picture's rows are out of order")
