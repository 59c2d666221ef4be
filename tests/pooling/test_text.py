"""``TextPooler`` beside a loop over tokens: each way of pooling, whole texts and chunks, with tokens that take no part."""

from __future__ import annotations

import math

import pytest
import torch

from headway.pooling.spec import PoolingSpec
from headway.pooling.text import POOL_RAW, POOL_START, TextPooler, pooling_tables
from headway.state.batch import StepBatch
from headway.state.slots import SlotArena

WIDTH, NUM_SLOTS = 5, 5
TEXTS = {0: (7, 0), 2: (9, 3), 3: (6, 5), 4: (1, 0)}
"""Slot -> tokens, and how many of the first take no part."""


def by_tokens(method: str, text: torch.Tensor, skip: int) -> torch.Tensor:
    """[C] of a text's hidden states [n, C]."""
    kept = list(enumerate(text.double(), 1))[skip:]
    if method == "last":
        return text[-1]
    if method == "cls":
        return kept[0][1].float()
    if method == "max":
        return torch.stack([x for _, x in kept]).amax(0).float()
    weights = [float(place) if method == "weighted_mean" else 1.0 for place, _ in kept]
    total = sum(weight * x for weight, (_, x) in zip(weights, kept, strict=True))
    assert isinstance(total, torch.Tensor)
    return (total / (math.sqrt(len(kept)) if method == "mean_sqrt" else sum(weights))).float()


def step(rows: list[tuple[int, int, int]]) -> StepBatch:
    """Of (slot, tokens before this step, tokens of this one); slot -1: padding."""
    counts = torch.tensor([count for _, _, count in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    total = int(starts[-1])
    lens = [before + count if slot >= 0 else 0 for slot, before, count in rows]
    return StepBatch(
        input_ids=torch.zeros(total, dtype=torch.int32),
        positions=torch.zeros(total, dtype=torch.int32),
        query_start=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        row_slots=torch.tensor([slot for slot, _, _ in rows], dtype=torch.int32),
        logit_indices=(starts[1:] - 1).clamp(min=0),
        groups=(),
        arrivals=torch.zeros(len(rows), 1, dtype=torch.int32),
        num_decode_rows=0,
        max_query_len=max(int(counts.max()), 1),
        max_seq_len_bound=16,
    )


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(
    "methods", [("cls",), ("last",), ("mean",), ("max",), ("weighted_mean",), ("mean_sqrt",), ("max", "mean")]
)
def test_vectors_are_those_of_the_definition(methods: tuple[str, ...], chunks: int) -> None:
    torch.manual_seed(chunks)
    spec = PoolingSpec(kind="embed", methods=methods)
    arena = SlotArena(pooling_tables(spec, WIDTH, chunked=True), NUM_SLOTS, torch.device("cpu"))
    pooler = TextPooler(arena, spec, WIDTH, lambda x: x.float(), WIDTH * len(methods), chunked=True)
    for name in {table for table in ("pool_sum", "pool_max", "pool_weighted", "pool_first") if arena.has(table)}:
        arena.view(name).fill_(1e6)  # of the slots' former owners
    texts = {slot: torch.randn(length, WIDTH) for slot, (length, _) in TEXTS.items()}
    for slot, (_, skip) in TEXTS.items():
        arena.view(POOL_START)[slot] = skip
    found: dict[int, torch.Tensor] = {}
    for number in range(chunks):
        rows, hidden = [], []
        for slot, text in texts.items():
            begin, end = (len(text) * each // chunks for each in (number, number + 1))
            if end > begin:
                rows.append((slot, begin, end - begin))
                hidden.append(text[begin:end])
        batch = step([*rows, (-1, 0, 0)])
        told = (
            pooler(torch.cat(hidden), batch)
            if pooler.wants_all
            else pooler(torch.stack([*(each[-1] for each in hidden), hidden[0][0]]), batch)
        )
        found |= {slot: told[row].clone() for row, (slot, _, _) in enumerate(rows)}
    for slot, (_, skip) in TEXTS.items():
        wanted = torch.cat([by_tokens(method, texts[slot], skip) for method in methods])
        torch.testing.assert_close(found[slot], wanted, msg=f"{methods} of slot {slot}")


@pytest.mark.parametrize("activation", ["none", "sigmoid", "softmax", "relu"])
def test_rows_that_want_vectors_as_they_are_get_them_so(activation: str) -> None:
    spec = PoolingSpec(kind="classify", methods=("mean",), activation=activation)
    arena = SlotArena(pooling_tables(spec, WIDTH, chunked=False), NUM_SLOTS, torch.device("cpu"))
    arena.view(POOL_RAW)[1] = 1
    pooler = TextPooler(arena, spec, WIDTH, lambda x: x.float(), WIDTH, chunked=False)
    text = torch.randn(4, WIDTH)
    done, raw = pooler(torch.cat([text, text]), step([(0, 0, 4), (1, 0, 4)]))
    torch.testing.assert_close(raw, text.mean(0))
    ways = {"none": lambda x: x, "sigmoid": torch.sigmoid, "softmax": lambda x: x.softmax(0), "relu": torch.relu}
    torch.testing.assert_close(done, ways[activation](text.mean(0)))
