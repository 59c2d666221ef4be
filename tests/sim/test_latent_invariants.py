"""What the simulated device says of operations on latents: nothing of right ones, and of each wrong one what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.device.sim.errors import InvariantError
from headway.device.sim.latent_invariants import LATENT_CHECKS

CHECKS = dict(LATENT_CHECKS)
ROWS = (("a row of three tokens behind two", 2, 3), ("one that decodes", 4, 1), ("padding", 0, 0))


def right(name: str) -> Any:
    """Arguments of an operation over three rows: five tokens of blocks of 4, one behind four, and padding."""

    def ints(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    found: dict[str, Any] = {
        "query_start": ints(0, 3, 4, 4), "seq_lens": ints(5, 5, 0), "row_slots": ints(1, 0, -1),
        "block_tables": ints([3, 4, 0], [1, 2, 0]), "max_query_len": 3, "max_seq_len_bound": 5, "most_queries": 1,
        "prefix_bound": 2, "latents": torch.zeros(6, 4, 8), "keys": torch.zeros(6, 4, 8), "kv_slots": ints(6, 7, 8, 20),
        "selected": ints([2, 0, 1], [3, 0, 1], [4, 0, 3], [4, 1, 2]),
    }  # fmt: skip
    return SimpleNamespace(**found)


def put(name: str, *at: int, value: int) -> Callable[[Any], None]:
    def change(args: Any) -> None:
        getattr(args, name)[at] = value

    return change


def say(name: str, value: int) -> Callable[[Any], None]:
    return lambda args: setattr(args, name, value)


WRONG: list[tuple[str, Callable[[Any], None], str]] = [
    ("mla_decode", say("max_query_len", 2), "max_query_len=2, but a row has 3"),
    ("mla_decode", say("max_seq_len_bound", 4), "max_seq_len_bound=4, but a row has 5"),
    ("index_scores", say("max_seq_len_bound", 4), "max_seq_len_bound=4, but a row has 5"),
    ("mla_prefill", say("prefix_bound", 1), "prefix_bound=1, but contexts have 2"),
    ("mla_write", put("kv_slots", 2, value=24), "a slot outside"),
    ("mla_write", put("kv_slots", 2, value=-2), "a slot outside"),
    ("index_write", put("kv_slots", 0, value=24), "a slot outside"),
    *(
        (name, put("row_slots", 0, value=2), "tokens and slot 2")
        for name in ("mla_decode", "mla_gather", "index_scores")
    ),
    *(
        (name, put("row_slots", 1, value=-1), "tokens and slot -1")
        for name in ("mla_decode", "mla_gather", "index_scores")
    ),
    *(
        (name, put("block_tables", 1, 1, value=0), "bad blocks")
        for name in ("mla_decode", "mla_gather", "index_scores")
    ),
    *(
        (name, put("block_tables", 0, 1, value=6), "bad blocks")
        for name in ("mla_decode", "mla_gather", "index_scores")
    ),
    *(("mla_decode", put("selected", token, 0, value=-1), "attends to nothing") for token in range(4)),
    *(
        ("mla_decode", put("selected", token, place, value=position + 1), "sees a later one")
        for token, position in enumerate((2, 3, 4, 4))
        for place in range(3)
    ),
]


@pytest.mark.parametrize("name", CHECKS)
def test_right_operations_pass(name: str) -> None:
    args = right(name)
    after = CHECKS[name](args)
    if after is not None:
        cache = args.latents if name.startswith("mla") else args.keys
        cache.view(-1, 8)[[6, 7, 8, 20]] = 1.0
        after()


@pytest.mark.parametrize(("name", "change", "says"), WRONG)
def test_wrong_operations_are_named(name: str, change: Callable[[Any], None], says: str) -> None:
    args = right(name)
    change(args)
    with pytest.raises(InvariantError, match=f"{name}: .*{says}"):
        CHECKS[name](args)


@pytest.mark.parametrize("place", [0, 5, 9, 23])
@pytest.mark.parametrize("name", ["mla_write", "index_write"])
def test_a_write_elsewhere_is_named(name: str, place: int) -> None:
    args = right(name)
    after = CHECKS[name](args)
    assert after is not None
    (args.latents if name.startswith("mla") else args.keys).view(-1, 8)[place, 3] = 1.0
    with pytest.raises(InvariantError, match="changed what no token of the step owns"):
        after()


def test_every_check_is_violated_here() -> None:
    assert {name for name, _, _ in WRONG} == {*CHECKS}
