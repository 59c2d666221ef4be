"""What the simulated device says of layers that share keys: nothing of right ones, and of each wrong one what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.device.sim.errors import InvariantError
from headway.device.sim.invariants import check_decode_attention
from headway.device.sim.key_invariants import KeyWatch

BLOCK, WIDTH = 4, 3


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def reader() -> Any:
    """Rows of three tokens behind four, of one behind five, and padding."""
    return SimpleNamespace(
        qkv=torch.zeros(9, 8), k_cache=torch.zeros(7, BLOCK, 1, 8), v_cache=torch.zeros(7, BLOCK, 1, 8),
        block_tables=ints([6, 2, 0], [5, 1, 0], [3, 4, 0]), row_slots=ints(2, 0, -1), query_start=ints(0, 3, 4, 4),
        seq_lens=ints(7, 6, 0), kv_slots=ints(16, 17, 18, 9, -1, -1, -1, -1, -1), arrivals=torch.zeros(9, 1, dtype=torch.int32),
        max_seq_len_bound=12, window=0, chunk=0, width=WIDTH, shares=True,
    )  # fmt: skip


def writer(args: Any) -> Any:
    """The layer whose keys they are."""
    return SimpleNamespace(**vars(args) | {"shares": False})


def run(args: Any, between: Callable[[KeyWatch, Any], None]) -> None:
    """A pass: ``between`` is what happens before the layer that shares."""
    watch = KeyWatch()
    watch.begin(args)
    between(watch, args)
    watch.decode(args)


def wrote(watch: KeyWatch, args: Any) -> None:
    watch.decode(writer(args))


def wrote_more(watch: KeyWatch, args: Any) -> None:
    """The newest keys, and one before them."""
    wrote(watch, args)
    watch.decode(SimpleNamespace(**vars(writer(args)) | {"kv_slots": ints(8)}))


def wrote_others(watch: KeyWatch, args: Any) -> None:
    """All but one of a row's three."""
    watch.decode(SimpleNamespace(**vars(writer(args)) | {"kv_slots": ints(16, 18, 9)}))


def test_right_ones_pass() -> None:
    args = reader()
    run(args, wrote)
    after = check_decode_attention(args)
    assert after is not None
    after()


@pytest.mark.parametrize(
    ("between", "complaint"),
    [
        (lambda watch, args: None, "nobody wrote"),
        (wrote_others, "row 0 reads keys of its own tokens before"),
        (wrote_more, "row 1 may read keys of this step before its kernel waits"),
    ],
)
def test_newest_keys_come_first_and_earlier_ones_are_no_steps_own(between: Any, complaint: str) -> None:
    with pytest.raises(InvariantError, match=complaint):
        run(reader(), between)


def test_a_window_hides_what_lies_before_it() -> None:
    args = reader()
    args.window = 1
    run(args, wrote_more)
    args.window = 2  # the first of a row's tokens sees one key before it
    with pytest.raises(InvariantError, match="row 1 may read"):
        run(args, wrote_more)


@pytest.mark.parametrize(("token", "place"), [(1, 19), (3, 8), (0, -1)])
def test_their_places_are_those_of_the_tables(token: int, place: int) -> None:
    args = reader()
    args.kv_slots[token] = place
    with pytest.raises(InvariantError, match="reads its tokens' keys elsewhere"):
        check_decode_attention(args)


def test_nothing_is_written() -> None:
    args = reader()
    after = check_decode_attention(args)
    assert after is not None
    args.k_cache[4, 0] = 1.0
    with pytest.raises(InvariantError, match="changed KV"):
        after()
