"""What operations on states obey: zombies and padding write none, and a row goes on exactly where its state stands.

A state has no length of its own to look at, so the watch keeps one: for every state tensor and slot, how many tokens
of the present owner it has seen. A row that starts at position 0 begins anew, whatever is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headway.core.chunks import CHUNKS_AT, chunk_table
from headway.device.sim.errors import need, same

STATE_OPS = {"causal_conv": "ring", "selective_scan": "state", "ssd_scan": "state", "gated_delta": "state"}
"""Operation -> the name of its state among its arguments."""


class StateWatch:
    """The positions at which states stand. One for each simulated device."""

    def __init__(self) -> None:
        self._seen: dict[int, torch.Tensor] = {}  # of a state's memory: int64 [S], -1 where there is nothing of use

    def seen(self, state: torch.Tensor) -> torch.Tensor:
        """int64 [S], tokens that the state of each slot has seen; -1: it means nothing."""
        return self._seen.setdefault(state.data_ptr(), torch.full((len(state),), -1))

    def check_copies(self, args: Any) -> Callable[[], None] | None:
        """Checkpoints are copied whole, from slots that mean something; the bound covers them."""
        storage, packed = args.storage, args.packed
        at, count = packed[args.header_at : args.header_at + 2].tolist()
        need(count <= args.max_copies, f"copy_states: {count} copies, but max_copies={args.max_copies}")
        pairs = packed[at : at + 2 * count].view(-1, 2).tolist()
        sources, destinations = {source for source, _ in pairs}, [destination for _, destination in pairs]
        need(len({*destinations}) == count and not sources & {*destinations}, "copy_states: copies meet")
        need(
            all(0 <= slot < len(storage) for slot in [*sources, *destinations]), "copy_states: a slot outside the pool"
        )
        first, size = storage.data_ptr(), storage.shape[1] * storage.itemsize
        for memory, seen in self._seen.items():
            if first <= memory < first + size:
                for source, destination in pairs:
                    need(int(seen[source]) > 0, f"copy_states: slot {source} has no state to copy")
                    seen[destination] = seen[source]
        return None

    def check(self, name: str, args: Any) -> Callable[[], None] | None:
        """Before an operation ``name``; gives what is to be checked after it."""
        state: torch.Tensor = getattr(args, STATE_OPS[name])
        starts, lens, slots = args.query_start.tolist(), args.seq_lens.tolist(), args.row_slots.tolist()
        check_table(name, args, starts)
        seen = self.seen(state)
        written = torch.zeros(len(state), dtype=torch.bool)
        for row, slot in enumerate(slots):
            count = starts[row + 1] - starts[row]
            need(count <= args.max_query_len, f"{name}: max_query_len={args.max_query_len}, but a row has {count}")
            if not lens[row] or not count:
                continue
            need(0 <= slot < len(state), f"{name}: row {row} has tokens and slot {slot}")
            need(not written[slot], f"{name}: slot {slot} has two rows in one step")
            start = lens[row] - count
            need(
                start == 0 or int(seen[slot]) == start,
                f"{name}: row {row} goes on at {start}, but the state of slot {slot} has seen {int(seen[slot])} tokens",
            )
            written[slot] = True
            seen[slot] = lens[row]
        before = state.clone()

        def after() -> None:
            need(same(state[~written], before[~written]), f"{name}: changed the state of a slot without a live row")

        return after


def check_table(name: str, args: Any, starts: list[int]) -> None:
    """The chunk table is this step's, and the grid covers it."""
    if args.max_query_len == 1:
        return
    at, count = args.packed[CHUNKS_AT : CHUNKS_AT + 2].tolist()
    need(count <= args.max_chunks, f"{name}: {count} chunks, but max_chunks={args.max_chunks}")
    lens = torch.tensor(starts).diff()
    wanted = torch.from_numpy(chunk_table(lens.int().numpy()))
    need(torch.equal(args.packed[at : at + 2 * count], wanted), f"{name}: the chunk table is not this step's")
