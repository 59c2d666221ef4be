"""What the simulated device says of copies of states, of what is run again, and of where rows go on: nothing of right ones, and
of each wrong one what is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.chunks import CHUNKS_AT, LOADS_AT, chunk_table
from headway.device.sim.errors import InvariantError
from headway.device.sim.state_invariants import StateWatch

SLOTS = 6


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- copies -----------------------------------------------------------------------------------------------------------


def copies(*pairs: tuple[int, int], most: int = 4) -> Any:
    packed = torch.zeros(64, dtype=torch.int32)
    packed[LOADS_AT], packed[LOADS_AT + 1] = 20, len(pairs)
    for n, pair in enumerate(pairs):
        packed[20 + 2 * n : 22 + 2 * n] = ints(*pair)
    return SimpleNamespace(
        storage=torch.zeros(SLOTS, 8, dtype=torch.int32), packed=packed, header_at=LOADS_AT, max_copies=most
    )


def watching(args: Any) -> StateWatch:
    """Slots 4 and 5 are checkpoints behind eight and sixteen tokens; 0 has seen three."""
    watch, parts = StateWatch(), (args.storage[:, :4], args.storage[:, 4:])
    for part in parts:
        for slot, count in ((4, 8), (5, 16), (0, 3)):
            watch.seen(part)[slot] = count
    return watch


def test_a_copy_takes_over_what_was_seen() -> None:
    args = copies((4, 1), (5, 2), (4, 3))
    watch = watching(args)
    assert watch.check_copies(args) is None
    for part in (args.storage[:, :4], args.storage[:, 4:]):
        assert watch.seen(part).tolist() == [3, 8, 16, 8, 8, 16]


@pytest.mark.parametrize(
    ("pairs", "most", "says"),
    [
        (((4, 1), (5, 2)), 1, "2 copies, but max_copies=1"),
        (((4, 1), (5, 1)), 4, "copies meet"),
        (((4, 5), (5, 1)), 4, "copies meet"),
        (((4, 6),), 4, "outside the pool"),
        (((-1, 1),), 4, "outside the pool"),
        (((3, 1),), 4, "there is none to copy"),
    ],
)
def test_wrong_copies(pairs: tuple[tuple[int, int], ...], most: int, says: str) -> None:
    args = copies(*pairs, most=most)
    with pytest.raises(InvariantError, match=says):
        watching(args).check_copies(args)


def test_states_of_different_ages_are_no_checkpoint() -> None:
    args = copies((4, 1))
    watch = watching(args)
    watch.seen(args.storage[:, 4:])[4] = 7
    with pytest.raises(InvariantError, match=r"seen \[7, 8\] tokens"):
        watch.check_copies(args)


# -- what is run again ------------------------------------------------------------------------------------------------


def replays(**changes: Any) -> Any:
    """Rows of one token behind 9, of three drafts behind 20, and padding; rings of eight places."""
    packed = torch.zeros(64, dtype=torch.int32)
    packed[4] = 20
    packed[20:32] = ints(1, 1, 0, 1, 2, 4, 1, 4, 0, 0, 0, 0)
    found = {
        "packed": packed, "storage": torch.zeros(SLOTS, 4, dtype=torch.int32), "query_start": ints(0, 1, 5, 5),
        "seq_lens": ints(10, 24, 0), "row_slots": ints(1, 2, -1), "stored_at": ints(6, 20, 0), "store_at": ints(-1, 21, -1),
        "places": 8,
    }  # fmt: skip
    return SimpleNamespace(**found | changes)


def replayed(args: Any, stored: dict[int, int]) -> None:
    after = StateWatch().check_replays(args)
    for slot, seen in stored.items():
        args.storage[slot, 0] = seen
    after()


def test_right_replays_pass() -> None:
    replayed(replays(), {2: 21})
    replayed(replays(store_at=ints(10, -1, -1)), {1: 10})


@pytest.mark.parametrize(
    ("changes", "stored", "says"),
    [
        ({}, {}, "does not say what its states have seen"),
        ({}, {2: 21, 3: 1}, "does not say"),
        ({"store_at": ints(-1, 22, -1)}, {2: 22}, "stores a state of drafts"),
        ({"store_at": ints(-1, 20, -1)}, {2: 20}, "stores a state of drafts"),
        ({"store_at": ints(11, 21, -1)}, {1: 11, 2: 21}, "row 0 stores a state of drafts"),
        ({"store_at": ints(-1, 21, 3)}, {2: 21}, "row 2 is not live"),
        ({"stored_at": ints(10, 20, 0)}, {2: 21}, "row 0 runs tokens 10 to 9 again"),
        ({"stored_at": ints(-1, 20, 0)}, {2: 21}, "row 0 runs tokens -1"),
        ({"stored_at": ints(1, 20, 0)}, {2: 21}, "row 0 has more tokens than its ring"),
        ({"stored_at": ints(2, 20, 0), "places": 7}, {2: 21}, "row 0 has more tokens than its ring"),
    ],
)
def test_wrong_replays(changes: dict[str, Any], stored: dict[int, int], says: str) -> None:
    with pytest.raises(InvariantError, match=says):
        replayed(replays(**changes), stored)


# -- where rows go on -------------------------------------------------------------------------------------------------


def scan(rows: list[tuple[int, int, int]], **changes: Any) -> Any:
    """A scan over rows (slot, tokens before, tokens)."""
    lens, starts = [count for _, _, count in rows], [0]
    for count in lens:
        starts.append(starts[-1] + count)
    packed, table = torch.zeros(64, dtype=torch.int32), torch.from_numpy(chunk_table(ints(*lens).numpy(), 1))
    packed[CHUNKS_AT], packed[CHUNKS_AT + 1] = 20, len(table) // 2
    packed[20 : 20 + len(table)] = table
    found = {
        "state": torch.zeros(SLOTS, 3), "query_start": ints(*starts), "seq_lens": ints(*[start + n for _, start, n in rows]),
        "row_slots": ints(*[slot for slot, _, _ in rows]), "packed": packed, "max_chunks": len(table) // 2,
        "max_query_len": max(lens), "short": 1, "inputs": None,
    }  # fmt: skip
    return SimpleNamespace(**found | changes)


def after_prompts() -> tuple[StateWatch, torch.Tensor]:
    """A watch that has seen prompts of four and of two tokens in slots 1 and 2."""
    watch, args = StateWatch(), scan([(1, 0, 4), (2, 0, 2)])
    done = watch.check("selective_scan", args)
    args.state[[1, 2]] += 1.0
    assert done is not None
    done()
    assert watch.seen(args.state).tolist() == [-1, 4, 2, -1, -1, -1]
    return watch, args.state


def test_rows_go_on_where_their_states_stand() -> None:
    watch, state = after_prompts()
    for rows in ([(1, 4, 1), (2, 2, 1)], [(2, 3, 3), (3, 0, 2)], [(1, 0, 1), (3, 2, 1)]):
        done = watch.check("selective_scan", scan(rows, state=state))
        assert done is not None
        done()
    assert watch.seen(state).tolist() == [-1, 1, 6, 3, -1, -1]


@pytest.mark.parametrize(
    ("rows", "changes", "says"),
    [
        ([(1, 5, 1)], {}, "goes on at 5, but the state of slot 1 has seen 4"),
        ([(1, 3, 1)], {}, "goes on at 3, but the state of slot 1 has seen 4"),
        ([(3, 4, 1)], {}, "the state of slot 3 has seen -1"),
        ([(1, 4, 1), (1, 5, 1)], {}, "slot 1 has two rows"),
        ([(6, 0, 1)], {}, "row 0 has tokens and slot 6"),
        ([(-1, 0, 1)], {}, "row 0 has tokens and slot -1"),
        ([(1, 4, 3)], {"max_query_len": 2}, "max_query_len=2, but a row has 3"),
        ([(1, 4, 3)], {"max_chunks": 0}, "1 chunks, but max_chunks=0"),
        ([(1, 4, 3)], {"packed": torch.zeros(64, dtype=torch.int32)}, "the chunk table is not this step's"),
        ([(1, 4, 1)], {"max_chunks": 1}, "programs for chunks of a step that has none"),
    ],
)
def test_wrong_rows(rows: list[tuple[int, int, int]], changes: dict[str, Any], says: str) -> None:
    watch, state = after_prompts()
    with pytest.raises(InvariantError, match=says):
        watch.check("selective_scan", scan(rows, state=state, **changes))


@pytest.mark.parametrize("slot", [0, 2, 5])
def test_states_of_others_stay(slot: int) -> None:
    watch, state = after_prompts()
    done = watch.check("selective_scan", scan([(1, 4, 1), (2, 2, 0)], state=state))
    state[1] += 1.0
    state[slot, 2] += 1.0
    assert done is not None
    with pytest.raises(InvariantError, match="changed the state of a slot without a live row"):
        done()
