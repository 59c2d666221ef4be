"""Kernel and definition agree to the bit where nothing but integers, copies and single roundings is at stake.

Tolerances of the other kernel tests hide a wrong rounding, a rank that is one off and a rule that is wrong for the first token
alone. These have none. Without a GPU they run in Triton's interpreter, but for bfloat16, which it cuts off instead of rounding;
``make gpu`` runs all of them on the card, with vocabularies as models have them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from headway.kernels.bad_words import bad_words
from headway.kernels.count_tokens import count_tokens
from headway.kernels.embed import embed
from headway.kernels.gather_logprobs import gather_logprobs
from headway.kernels.logit_bias import logit_bias
from headway.kernels.min_tokens import min_tokens
from headway.kernels.registry import Op
from headway.kernels.rms_norm import add_rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.sample import MIN_P, PENALTIES, RANDOM, TOP, sample
from headway.kernels.slot_advance import slot_advance
from tests.engine.oracle import log_exponentials
from tests.kernels.guarded import DEVICE, floats, ints, run_both, same
from tests.kernels.penalty_tables import OFF, no_tables, tables

HERE = [(torch.float32, 997), (torch.float16, 997)]
CARD = [(torch.float32, 151_936), (torch.float16, 32_000), (torch.bfloat16, 151_936), (torch.bfloat16, 997)]
PLACES = [*HERE, *(pytest.param(*each, marks=pytest.mark.gpu) for each in CARD)]
SIXTEEN = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
FP8 = torch.float8_e4m3fn


def both(op: Op, args: list[Any]) -> tuple[list[Any], Any]:
    """What the kernel leaves and gives, after comparing all of it with the reference, bit by bit."""
    (wanted, answer), (left, given) = run_both(op, args)
    for place, (mine, theirs) in enumerate(zip(left, wanted, strict=True)):
        if isinstance(mine, torch.Tensor):
            assert bits_equal(mine, theirs), f"{op.name}: argument {place}"
    pairs = [(given, answer)] if isinstance(given, torch.Tensor) else [*zip(given or (), answer or (), strict=True)]
    assert all(bits_equal(mine, theirs) for mine, theirs in pairs), f"{op.name}: the result"
    return left, given


def bits_equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Same dtype, same bits, NaN of any bits equal."""
    if mine.dtype == FP8:
        mine, theirs = mine.float(), theirs.float()
    return mine.dtype == theirs.dtype and same(mine, theirs)


def grid(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Logits on a grid of eighths, exact in every dtype, with many ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-60, 61, (rows, vocab), generator=generator) / 8).to(dtype)


@pytest.mark.parametrize(("dtype", "vocab"), PLACES)
def test_ids_ranks_and_counts_of_log_probabilities(dtype: torch.dtype, vocab: int) -> None:
    logits, rng = grid(6, vocab, dtype), random.Random(1)
    tokens = [int(logits[0].argmax()), 0, vocab - 1, *(rng.randrange(vocab) for _ in range(3))]
    listed = [[rng.randrange(vocab) for _ in range(8)] for _ in range(6)]
    args = (
        logits,
        ints(tokens),
        ints(range(6)),
        ints([5, 0, 20, -1, 7, -1]),
        ints([0, 0, 0, 8, 3, 0]),
        ints(listed),
        20,
    )
    (_, (ids, logs, ranks, counts)), (_, (mine, my_logs, my_ranks, my_counts)) = run_both(gather_logprobs, args)
    assert torch.equal(mine, ids) and torch.equal(my_ranks, ranks) and torch.equal(my_counts, counts)
    torch.testing.assert_close(my_logs, logs, atol=2e-5, rtol=0)
    values = logits.float()
    assert my_ranks[:5].tolist() == [int((values[n] >= values[n, tokens[n]]).sum()) for n in range(5)]
    assert my_ranks[0] >= 1 and my_ranks[5] == 0, "the most likely has rank 1, ties counted; who did not ask has none"


@pytest.mark.parametrize(("dtype", "vocab"), PLACES)
def test_greedy_tokens_and_penalties_that_are_exact(dtype: torch.dtype, vocab: int) -> None:
    """Factors of two and eighths: every product and sum is exact, so ties stay ties and go to the lowest index."""
    each = [(2.0, 0.25, 0.5), (0.5, -0.25, -2.0), (1.0, -2.0, 0.125), OFF]
    penalties = tables(each, vocab)
    logits, count = grid(8, vocab, dtype, 3), len(each)
    slots = [0, 1, 2, 3, 0, 1, 2, -1]
    plain = (floats([0.0] * count), ints([0] * count), floats([1.0] * count), floats([0.0] * count))
    for flags in (PENALTIES, PENALTIES | RANDOM | TOP | MIN_P):
        args = [logits, ints(slots), *plain, ints([[1, 2]] * count), ints([5] * count), *penalties, flags]
        both(sample, args)


@pytest.mark.parametrize(("dtype", "vocab"), PLACES)
@pytest.mark.parametrize("position", [0, 1, 2**20 + 3])
def test_the_race_is_won_by_the_documented_number(dtype: torch.dtype, vocab: int, position: int) -> None:
    """Equal logits: the winner has the smallest of the hashed numbers, here from the oracle that shares no code."""
    seeds = [3, 2**32 + 3, 2**63 + 11, 2**64 - 1]
    words = [[(seed & 0xFFFFFFFF), seed >> 32] for seed in seeds]
    count = len(seeds)
    tables_of = (floats([1.0] * count), ints([0] * count), floats([1.0] * count), floats([0.0] * count))
    pairs = torch.tensor(np.array(words, np.uint32).view(np.int32))
    logits = torch.zeros(count, vocab, dtype=dtype)
    args = [logits, ints(range(count)), *tables_of, pairs, ints([position] * count), *no_tables(count, vocab), RANDOM]
    _, tokens = both(sample, args)
    assert tokens.tolist() == [int(log_exponentials(seed, position, vocab).argmin()) for seed in seeds]


@pytest.mark.parametrize(("dtype", "vocab"), PLACES)
def test_the_first_generated_token(dtype: torch.dtype, vocab: int) -> None:
    """Nothing is generated yet: phrases of one token match, the prompt's end completes none, minimum lengths hold."""
    prompt, length = [5, 9, 4], 8
    history = ints([[*prompt, 7, 7, 7, 7, 7]] * 4)
    num, plen = ints([3, 4, 3, 3]), ints([3, 3, 3, 3])
    phrases = ints(
        [[11, 4, 12, 7, 13, 0]] * 4
    )  # [11], [4, 12], [7, 13]: behind the prompt's 4, and behind a generated 7
    left, _ = both(
        bad_words,
        [
            grid(4, vocab, dtype),
            ints([0, 1, 2, -1]),
            history,
            num,
            plen,
            ints([3, 3, 0, 3]),
            ints([[0, 1, 3, 5]] * 4),
            phrases,
        ],
    )
    forbidden = [torch.isinf(left[0][n]).nonzero().flatten().tolist() for n in range(4)]
    assert forbidden == [[11], [11, 13], [], []]
    stops = ints([[2, 6, vocab - 1], [2, 6, vocab]] * 2)
    args = [
        grid(4, vocab, dtype),
        ints([0, 1, 2, 3]),
        num,
        ints([3, 5, 4, 4]),
        ints([[1, 3], [1, 3], [0, 2], [0, 0]]),
        stops,
    ]
    left, _ = both(min_tokens, args)
    forbidden = [torch.isinf(left[0][n]).nonzero().flatten().tolist() for n in range(4)]
    assert forbidden == [[], [2, 6], [2, 6], []]
    counts = torch.full((4, vocab), 77, dtype=torch.int16)
    left, _ = both(count_tokens, [counts, ints([0, 1, -1]), history, plen, num, length])
    assert (
        left[0][0].nonzero().flatten().tolist() == [4, 5, 9]
        and int(left[0][1, 7]) == 1
        and int(left[0][0, 5]) == -32768
    )


def test_the_record_of_a_first_token_that_may_not_end_yet() -> None:
    """min_total one above the prompt: the first token is not the end, whatever it is; the second is."""
    for before, ends in ((3, False), (4, True)):
        packed = ints([0, 0, 1, 0, 16, 0] + [0] * 10 + [0, 1, 0, 1])
        slots = [ints([0]), ints([6]), ints([[5, 9, 4, 0, 0, 0, 0, 0]] * 2), ints([before, 0]), ints([before - 1, 0])]
        counted = [ints([1, 0]), torch.zeros(2, 11, dtype=torch.int16), ints([1, 0])]
        limits = [ints([4, 0]), ints([8, 0]), ints([[1, 1], [0, 0]]), ints([[6, 0]] * 2)]
        args = [packed, *slots, *counted, *limits, torch.full((2, 2, 4), -7, dtype=torch.int32)]
        left, _ = both(slot_advance, args)
        assert left[-1][0, 0].tolist() == [1, 6, 1 if ends else 0, before + 1]


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_a_sum_is_rounded_once_to_the_nearest_even(dtype: torch.dtype) -> None:
    """The residual stream: halfway cases in both directions, carries into the exponent, subnormal numbers."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    count = len(every) // 64 * 64
    x = every[:count].view(-1, 64)[
        :: 1 if DEVICE == "cuda" else 25
    ]  # rows from everywhere; the interpreter takes its time
    for other in (x.flip(0, 1), x * 0.00390625, torch.full_like(x, 1.0)):
        residual = other.to(dtype).clone()
        wanted = (residual.float() + x.float()).to(dtype)
        rows = wanted.isfinite().all(1)
        args = [x[rows].clone(), residual[rows].clone(), torch.ones(64, dtype=dtype), 1e-5]
        (_, _), (left, _) = run_both(add_rms_norm, args)
        assert bits_equal(left[1], wanted[rows])


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("cached", [None, FP8], ids=["as it is", "8 bits"])
def test_every_number_is_cached_as_the_definition_says(dtype: torch.dtype, cached: torch.dtype | None) -> None:
    """All 65536 bit patterns as values, unrotated ones as keys: copied, or rounded to 8 bits once, ended at +-448."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    heads, size = 16, 64
    tokens = len(every) // (heads * size)
    values = every[: tokens * heads * size].view(tokens, heads * size)
    qkv = torch.cat((values, values, values), 1)
    cos_sin = torch.cat((torch.ones(4, size // 2), torch.zeros(4, size // 2)), 1)
    cache = torch.zeros(tokens // 8 + 1, 8, heads, size, dtype=cached or dtype)
    where = ints(list(range(tokens)))
    args = [qkv, ints([0] * tokens), cos_sin, None, None, 1e-6, where, cache, cache.clone(), heads]
    left, q = run_both(rope_kv_write, args)[1]
    wanted = values.view(tokens, heads, size)
    assert bits_equal(q + 0.0, wanted + 0.0)
    if cached is not None:
        wanted = wanted.float().clamp(-448, 448).to(cached)
    for place in (7, 8):
        mine = left[place].flatten(0, 1)[:tokens]
        assert bits_equal(mine.float() + 0.0, wanted.float() + 0.0), ("keys", "values")[place - 7]


@pytest.mark.parametrize(("dtype", "vocab"), PLACES)
def test_copies_and_single_additions(dtype: torch.dtype, vocab: int) -> None:
    rng = random.Random(2)
    ids = [0, vocab - 1, -1, vocab, *(rng.randrange(vocab) for _ in range(9))]
    _, rows = both(embed, [ints(ids), grid(1, vocab, dtype).T.expand(vocab, 24).contiguous()])
    assert rows.shape == (len(ids), 24)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1))
    bias = [[0.1, -100.0, 3e-7], [1e-8, 33.3, 0.0], [5.0, 6.0, 7.0]]
    args = [
        logits,
        ints([0, 1, -1]),
        ints([3, 2, 3]),
        ints([[0, vocab - 1, 5], [7, vocab, 8], [1, 2, 3]]),
        floats(bias),
    ]
    left, _ = both(logit_bias, args)
    assert torch.equal(left[0][2], logits[2]) and int((left[0] != logits).sum()) >= 2
