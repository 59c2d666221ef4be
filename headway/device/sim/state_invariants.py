"""What operations on states obey: zombies and padding write none, a row goes on exactly where its state stands, and what it
runs again are the tokens in between.

A state has no length of its own to look at, so the watch keeps one: for every state tensor and slot, how many tokens
of the present owner it has seen, and for every place of windows and rings the position whose input lies there. A row that
starts at position 0 begins anew, whatever is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headway.core.chunks import CHUNKS_AT, chunk_table
from headway.device.sim.errors import need, same

STATE_OPS = {
    "causal_conv": ("ring",),
    "selective_scan": ("state",),
    "ssd_scan": ("state",),
    "gated_delta": ("state",),
    "ssd_decode": ("ring", "state"),
    "delta_decode": ("ring", "state"),
}
"""Operation -> the names of its states among its arguments."""


class StateWatch:
    """The positions at which states stand. One for each simulated device."""

    def __init__(self) -> None:
        self._seen: dict[int, torch.Tensor] = {}  # of a state's memory: int64 [S], -1 where there is nothing of use
        self._places: dict[int, torch.Tensor] = {}  # of a window's or ring's: int64 [S, M], positions; -1 likewise
        self._ends: dict[
            int, dict[int, tuple[int, int]]
        ] = {}  # of a window's: slot -> first token, end of its last row

    def seen(self, state: torch.Tensor) -> torch.Tensor:
        """int64 [S], tokens that the state of each slot has seen; -1: it means nothing."""
        return self._seen.setdefault(state.data_ptr(), torch.full((len(state),), -1))

    def places(self, ring: torch.Tensor) -> torch.Tensor:
        """int64 [S, M], whose input lies in each place; -1: nobody's."""
        return self._places.setdefault(ring.data_ptr(), torch.full(ring.shape[:2], -1))

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
        inside = [kept for memory, kept in self._places.items() if first <= memory < first + size]
        states = [seen for memory, seen in self._seen.items() if first <= memory < first + size]
        for source, destination in pairs:
            stands = {int(seen[source]) for seen in states} | {int(kept[source].max()) + 1 for kept in inside}
            need(
                len(stands) < 2 and min(stands, default=1) > 0,
                f"copy_states: the states of slot {source} have seen {sorted(stands)} tokens: there is none to copy",
            )
            for kept in (*states, *inside):
                kept[destination] = kept[source]
            for rows in self._ends.values():  # another request's, if any
                rows.pop(destination, None)
        return None

    def check_replays(self, args: Any) -> Callable[[], None]:
        """Only what is certain is stored; rows that are not live store nothing."""
        packed, storage = args.packed, args.storage
        starts, lens, slots = args.query_start.tolist(), args.seq_lens.tolist(), args.row_slots.tolist()
        at, before = int(packed[4]), storage[:, 0].clone()

        def after() -> None:
            wanted = before.clone()
            for row, (length, slot) in enumerate(zip(lens, slots, strict=True)):
                stored, store = int(args.stored_at[row]), int(args.store_at[row])
                count = starts[row + 1] - starts[row]
                if not length or not count:
                    need(store < 0, f"replay_rows: row {row} is not live, and stores its state")
                    continue
                start, drafts = length - count, int(packed[at + 4 * row + 3]) > 1
                need(0 <= stored <= start, f"replay_rows: row {row} runs tokens {stored} to {start} again")
                fits = stored == start or length - stored <= args.places
                need(fits, f"replay_rows: row {row} has more tokens than its ring has places")
                certain = start + 1 if drafts else length
                need(store < 0 or start < store <= certain, f"replay_rows: row {row} stores a state of drafts")
                if store >= 0:
                    wanted[slot] = store
            need(torch.equal(storage[:, 0], wanted), "replay_rows: a slot does not say what its states have seen")

        return after

    def check(self, name: str, args: Any) -> Callable[[], None] | None:
        """Before an operation ``name``; gives what is to be checked after it."""
        joined = len(STATE_OPS[name]) > 1
        need(not joined or args.max_query_len <= args.short, f"{name}: short rows alone, not of {args.max_query_len}")
        checks = [self._check(name, args, kind) for kind in STATE_OPS[name]]

        def after() -> None:
            for each in checks:
                each()

        return after

    def _check(self, name: str, args: Any, kind: str) -> Callable[[], None]:
        """The same, of one of its states."""
        state: torch.Tensor = getattr(args, kind)
        inputs = getattr(args, "inputs", None)
        starts, lens, slots = args.query_start.tolist(), args.seq_lens.tolist(), args.row_slots.tolist()
        check_table(name, args, starts)
        live = torch.zeros(len(state), dtype=torch.bool)
        stores = live.clone()
        for row, slot in enumerate(slots):
            count = starts[row + 1] - starts[row]
            need(count <= args.max_query_len, f"{name}: max_query_len={args.max_query_len}, but a row has {count}")
            if not lens[row] or not count:
                continue
            need(0 <= slot < len(state), f"{name}: row {row} has tokens and slot {slot}")
            need(not live[slot], f"{name}: slot {slot} has two rows in one step")
            live[slot] = True
            if kind == "ring":
                stores[slot] = True
                self._check_window(name, args, slot, lens[row] - count, lens[row])
            else:
                stored = lens[row] - count if inputs is None else int(args.stored_at[row])
                store = lens[row] if inputs is None else int(args.store_at[row])
                stores[slot] = store >= 0
                self._check_state(name, args, slot, (stored, lens[row] - count, lens[row], store))
        before = state.clone()
        rings = None if inputs is None else inputs.clone()

        def after() -> None:
            need(same(state[~stores], before[~stores]), f"{name}: changed the state of a slot without a live row")
            if inputs is not None and rings is not None:
                others = ~live[: len(rings)]
                need(same(inputs[others], rings[others]), f"{name}: changed the ring of a slot without a live row")

        return after

    def _check_window(self, name: str, args: Any, slot: int, start: int, end: int) -> None:
        """The inputs before the row lie in its window, and it begins within the row before, or behind it."""
        places, taps = self.places(args.ring), args.weight.shape[1]
        length = places.shape[1]
        rows = self._ends.setdefault(args.ring.data_ptr(), {})
        if start == 0:
            places[slot] = -1
        elif slot in rows and rows[slot][0] < start:
            need(start <= rows[slot][1], f"{name}: slot {slot} goes on at {start}, behind {rows[slot][1]}")
        for position in range(max(start - taps + 1, 0), start):
            found = int(places[slot, position % length])
            need(
                found == position,
                f"{name}: slot {slot} goes on at {start}, but its window has {found} for the input at {position}",
            )
        for position in range(max(start, end - length), end):
            places[slot, position % length] = position
        rows[slot] = start, end

    def _check_state(self, name: str, args: Any, slot: int, row: tuple[int, int, int, int]) -> None:
        """``row``: tokens that its stored state has seen, first token, end, and when its state is stored."""
        (stored, start, end, store), seen = row, self.seen(args.state)
        need(
            (start == 0 and stored == 0) or int(seen[slot]) == stored,
            f"{name}: a row goes on at {stored}, but the state of slot {slot} has seen {int(seen[slot])} tokens",
        )
        inputs = getattr(args, "inputs", None)
        if inputs is not None:
            places = self.places(inputs)
            length = places.shape[1]
            for position in range(stored, start):
                found = int(places[slot, position % length])
                need(found == position, f"{name}: the ring of slot {slot} has {found} for the input at {position}")
            for position in range(max(start, store), end):
                places[slot, position % length] = position
        if store >= 0:
            seen[slot] = store


def check_table(name: str, args: Any, starts: list[int]) -> None:
    """The chunk table is this step's, and the grid covers it."""
    if args.max_query_len <= args.short:
        need(args.max_chunks == 0, f"{name}: programs for chunks of a step that has none")
        return
    at, count = args.packed[CHUNKS_AT : CHUNKS_AT + 2].tolist()
    need(count <= args.max_chunks, f"{name}: {count} chunks, but max_chunks={args.max_chunks}")
    lens = torch.tensor(starts).diff()
    wanted = torch.from_numpy(chunk_table(lens.int().numpy(), args.short))
    need(torch.equal(args.packed[at : at + 2 * count], wanted), f"{name}: the chunk table is not this step's")
