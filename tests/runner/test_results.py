"""What a step reports comes out of its packet as it went in, whatever else it reports, and however many rows were padded."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headway.core.plan import LogprobsResult
from headway.runner.results import Part, ResultLayout, pack_results, record_ints, unpack_results

SIZES = [(1, 1), (3, 3), (3, 8)]
"""Rows, and padded ones."""


class Made:
    """Numbers of which no two are equal."""

    def __init__(self) -> None:
        self.next = 1

    def ints(self, *shape: int) -> torch.Tensor:
        count = int(np.prod(shape))
        self.next += count
        return torch.arange(self.next - count, self.next, dtype=torch.int32).view(*shape)

    def floats(self, *shape: int) -> torch.Tensor:
        return self.ints(*shape).float() / 4

    def logprobs(self, number: int, entries: int) -> Part:
        wide = (number, 1 + entries)
        return self.ints(*wide), self.floats(*wide), self.ints(number), self.ints(number)


def check(found: LogprobsResult | None, part: Part, rows: slice) -> None:
    assert found is not None
    for mine, theirs in zip((found.token_ids, found.logprobs, found.ranks, found.counts), part, strict=True):
        np.testing.assert_array_equal(mine, theirs[rows].numpy())


@pytest.mark.parametrize(("rows", "padded"), SIZES)
@pytest.mark.parametrize("width", [1, 3])
def test_tokens_with_all_that_may_be_asked_of_them(rows: int, padded: int, width: int) -> None:
    asked = [[], [(0, 2)], [(0, 2), (2, 3)]][: 2 if rows == 1 else 3]
    for entries, prompts, aligned in product(
        (-1, 0, 2), asked, ([], [(0, 4)], [(0, 4), (rows - 1 + padded, 2), (99, 3)])
    ):
        made, each = Made(), record_ints(width)
        records = made.ints(padded, each)
        parts: list[Part] = [made.logprobs(padded, entries) for _ in range(width)] if entries >= 0 else []
        total = sum(count for _, count in prompts)
        parts += [made.logprobs(total, 1)] if prompts else []
        parts += [(made.ints(count),) for _, count in aligned]
        layout = ResultLayout(rows, padded, entries, width, each, prompts, 1 if prompts else -1, aligned)
        packet = pack_results(records.view(-1), each, padded, parts).numpy()
        found = unpack_results(packet, layout)
        np.testing.assert_array_equal(found.counts, records[:rows, 0])
        np.testing.assert_array_equal(found.token_ids, records[:rows, [1, *range(4, 3 + width)]])
        np.testing.assert_array_equal(found.finish, records[:rows, 2])
        if entries >= 0:
            for nth in range(width):
                assert found.logprobs is not None
                mine, own = found.logprobs, slice(nth, None, width)
                one = LogprobsResult(mine.token_ids[own], mine.logprobs[own], mine.ranks[own], mine.counts[own])
                check(one, parts[nth], slice(0, rows))
        start = 0
        for row, count in prompts:
            check(found.prompt_logprobs[row], parts[-1 - len(aligned)], slice(start, start + count))
            start += count
        assert len(found.aligned) == len(aligned)
        for (row, _), (told,) in zip(aligned, parts[len(parts) - len(aligned) :], strict=True):
            np.testing.assert_array_equal(found.aligned[row], told)


@pytest.mark.parametrize(("rows", "padded"), SIZES)
@pytest.mark.parametrize(("vector", "token_vector"), [(4, 0), (0, 3), (4, 3)])
def test_vectors_of_rows_and_of_tokens(rows: int, padded: int, vector: int, token_vector: int) -> None:
    made, tokens = Made(), 7
    records = made.ints(padded, 4)
    parts: list[Part] = [(made.floats(padded, vector),)] if vector else []
    parts += [(made.floats(tokens + 2, token_vector),)] if token_vector else []
    layout = ResultLayout(
        rows, padded, vector=vector, token_vector=token_vector, num_tokens=tokens, padded_tokens=tokens + 2
    )
    found = unpack_results(pack_results(records.view(-1), 4, padded, parts).numpy(), layout)
    if vector:
        np.testing.assert_array_equal(found.vectors, parts[0][0][:rows])
    if token_vector:
        np.testing.assert_array_equal(found.token_vectors, parts[-1][0][:tokens])


def test_nothing_of_a_result_lies_in_the_packets_buffer() -> None:
    """The buffer goes back to the next step's copy at once."""
    packet = np.arange(100, dtype=np.int32)
    layout = ResultLayout(num_rows=3, padded_rows=4, vector=5, token_vector=2, num_tokens=6, padded_tokens=8)
    result = unpack_results(packet, layout)
    before = {name: value.copy() for name, value in vars_of(result).items()}
    packet.fill(-1)
    assert {"vectors", "token_vectors"} <= set(before)
    for name, value in vars_of(result).items():
        assert value.tobytes() == before[name].tobytes(), name


def vars_of(result: object) -> dict[str, npt.NDArray[Any]]:
    """Its arrays."""
    names = [name for name in dir(result) if not name.startswith("_")]
    return {name: value for name in names if isinstance(value := getattr(result, name), np.ndarray)}
