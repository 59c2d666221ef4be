"""``sample``: greedy ties, exact supports of the filters, frequencies, and the kernel against the reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest
import torch

from headway.kernels.sample import MIN_P, PENALTIES, RANDOM, TOP, TWICE, WIDE, WIDE_K, may_be_wide, sample
from headway.kernels.sample.reference import _threshold
from headway.kernels.sample.rng import log_exponential, token_bits
from headway.kernels.testing import interpreter_loops, kernel_dtypes
from tests.kernels.guarded import floats, ints, run_both
from tests.kernels.penalty_tables import OFF, no_tables, penalised, tables

INF = float("inf")


@dataclass
class Row:
    """Parameters of one slot."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: tuple[int, int] = (1, 2)
    position: int = 9
    slot: int | None = field(default=None)
    penalties: tuple[float, float, float] = OFF


def _args(logits: torch.Tensor, rows: list[Row], flags: int | None = None) -> tuple[object, ...]:
    if flags is None:
        flags = RANDOM * any(row.temperature >= 1e-5 for row in rows)
        flags |= TOP * any(row.top_k > 0 or row.top_p < 1 for row in rows) | MIN_P * any(row.min_p > 0 for row in rows)
        flags |= WIDE * any(may_be_wide(row.top_k, row.top_p, row.min_p) for row in rows)
        flags |= TWICE * any(row.top_k > WIDE_K and row.top_p < 1 for row in rows)
        flags |= PENALTIES * any(row.penalties != OFF for row in rows)
    return (
        logits, ints([i if row.slot is None else row.slot for i, row in enumerate(rows)]),
        floats([row.temperature for row in rows]), ints([row.top_k for row in rows]), floats([row.top_p for row in
        rows]), floats([row.min_p for row in rows]), ints([list(row.seed) for row in rows]), ints([row.position for
        row in rows]), *tables([row.penalties for row in rows], logits.shape[1]), flags,
    )  # fmt: skip


def _kept(logits: list[float], row: Row) -> set[int]:
    """The filters' meaning, from the definition, in Python floats."""
    x = [value / row.temperature for value in logits]
    top = max(x)
    kept = {i for i, value in enumerate(x) if not row.min_p or value >= top + math.log(row.min_p)}
    if 0 < row.top_k < len(x):
        kth = sorted(x, reverse=True)[row.top_k - 1]
        kept = {i for i in kept if x[i] >= kth}
    if row.top_p < 1:
        total = sum(math.exp(x[i] - top) for i in kept)
        for bound in sorted({x[i] for i in kept}, reverse=True):
            nucleus = {i for i in kept if x[i] >= bound}
            if sum(math.exp(x[i] - top) for i in nucleus) >= row.top_p * total:
                return nucleus
    return kept


def _oracle(logits: torch.Tensor, rows: list[Row]) -> list[dict[int, float]]:
    """For each row the scores of the tokens that may be drawn."""
    scores = []
    counts = tables([row.penalties for row in rows], logits.shape[1])[0]
    for n, row in enumerate(rows):
        values = [-INF if math.isnan(v) else v for v in logits[n].float().tolist()]
        if row.penalties != OFF:
            values = torch.tensor(penalised(values, counts[n].tolist(), row.penalties)).tolist()  # as float32
        if row.slot is not None and not 0 <= row.slot < len(rows):
            scores.append({0: 0.0})
        elif row.temperature < 1e-5:
            scores.append(dict(enumerate(values)))
        else:
            noise = log_exponential(token_bits(ints([list(row.seed)]), ints([row.position]), len(values)))[0].tolist()
            scores.append({i: values[i] / row.temperature - noise[i] for i in _kept(values, row)})
    return scores


def _check(logits: torch.Tensor, rows: list[Row], flags: int | None = None) -> None:
    """Both implementations draw the oracle's winner; a near tie may go either way, by the rounding of log and exp."""
    scores = _oracle(logits, rows)
    for name, (_, drawn) in zip(("reference", "kernel"), run_both(sample, _args(logits, rows, flags)), strict=True):
        assert drawn.dtype == torch.int32
        for n, token in enumerate(drawn.tolist()):
            assert token in scores[n], f"{name} row {n} drew {token}, which is filtered out"
            best = max(scores[n].values())
            tolerance = 0.0 if rows[n].temperature < 1e-5 else 1e-5 * max(1.0, abs(best))
            assert scores[n][token] == best or scores[n][token] >= best - tolerance, f"{name} row {n}"
            if rows[n].temperature < 1e-5:
                assert token == min(i for i, value in scores[n].items() if value == best)


def _random_row(rng: random.Random) -> Row:
    return Row(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.5, 100.0]),
        top_k=rng.choice([0, 0, 1, 3, 50, 2**31 - 1]),
        top_p=rng.choice([1.0, 0.999, 0.9, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=(rng.randrange(-(2**31), 2**31), rng.randrange(-(2**31), 2**31)),
        position=rng.randrange(10000),
        penalties=rng.choice([OFF, OFF, (1.3, 0.1, 0.2)]),
    )


@pytest.mark.parametrize(("vocab", "seed"), [*((v, s) for v in (1, 5, 97, 1031) for s in range(2)), (4500, 0)])
def test_random_rows(vocab: int, seed: int) -> None:
    rng = random.Random(seed * 10000 + vocab)
    torch.manual_seed(vocab + seed)
    rows = [_random_row(rng) for _ in range(9)]
    rows[4].slot = -1
    rows[6].slot = 9
    _check(torch.randn(9, vocab) * rng.choice([1.0, 4.0]), rows)


@pytest.mark.parametrize("dtype", kernel_dtypes())
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rng = random.Random(5)
    _check((torch.randn(7, 331) * 3).to(dtype), [_random_row(rng) for _ in range(7)])


@pytest.mark.parametrize("vocab", [5, 97, 3000])
def test_greedy_takes_the_lowest_index_of_ties(vocab: int) -> None:
    logits = torch.zeros(5, vocab)
    logits[1, 3:] = 2.0
    logits[2] = torch.linspace(-1, 0, vocab)
    logits[2, [1, vocab - 1]] = 7.0
    logits[3] = torch.arange(vocab) // 3
    logits[4, 0], logits[4, 1:] = -0.0, 0.0
    rows = [Row(temperature=0.0) for _ in range(5)]
    for flags in (0, RANDOM, RANDOM | TOP | MIN_P, TOP):
        expected = [0, 3, 1, (vocab - 1) // 3 * 3, 0]
        for _, drawn in run_both(sample, _args(logits, rows, flags)):
            assert drawn.tolist() == expected


@pytest.mark.parametrize(
    "row",
    [Row(temperature=0.0), Row(), Row(top_k=2), Row(top_p=0.5), Row(min_p=0.5), Row(top_k=3, top_p=0.5, min_p=0.1)],
)
def test_infinities_and_nan(row: Row) -> None:
    nan, vocab = float("nan"), 70
    logits = torch.full((6, vocab), -INF)
    logits[1] = nan
    logits[2, 69] = -3.0  # the only one possible
    logits[3, 5], logits[3, 9] = INF, 2.0
    logits[4] = nan
    logits[4, 41] = -1e30
    logits[5, 3], logits[5, 6] = nan, 4.0
    rows = [Row(row.temperature, row.top_k, row.top_p, row.min_p) for _ in range(6)]
    for flags in (None, 31):
        for _, drawn in run_both(sample, _args(logits, rows, flags)):
            assert drawn.tolist() == [-1, -1, 69, 5, 41, 6]


@pytest.mark.parametrize("flags", [1, 3, 7, 15, 31])
def test_a_superset_of_flags_changes_nothing(flags: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 777)
    rows = [Row(temperature=t, seed=(n, 0)) for n, t in enumerate([0.0, 0.7, 1.0, 1.5, 0.0, 3.0])]
    plain = [drawn for _, drawn in run_both(sample, _args(logits, rows, RANDOM))]
    more = [drawn for _, drawn in run_both(sample, _args(logits, rows, flags))]
    for a, b in zip(plain, more, strict=True):
        assert torch.equal(a, b)


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(2)
    rng = random.Random(8)
    rows, logits = [_random_row(rng) for _ in range(34)], torch.randn(34, 301) * 3
    together = [drawn.tolist() for _, drawn in run_both(sample, _args(logits, rows, 31))]
    for n in (0, 7, 33):
        alone = [drawn.tolist() for _, drawn in run_both(sample, _args(logits[n : n + 1], rows[n : n + 1], 31))]
        assert [t[n] for t in together] == [a[0] for a in alone]


def test_rows_may_be_strided(device: str) -> None:
    torch.manual_seed(3)
    wide = torch.randn(4, 128)
    rows = [Row(0.0), Row(top_k=5), Row(top_p=0.7), Row(min_p=0.1)]
    args = _args(wide[:, :101], rows)
    moved = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    moved[0] = wide.to(device)[:, :101]
    with interpreter_loops():
        assert torch.equal(sample.implementation("cuda")(*moved).cpu(), sample.reference(*args))


SUPPORT_ROWS = [
    Row(top_k=1), Row(top_k=7), Row(top_p=0.001), Row(top_p=0.8), Row(0.7, top_p=0.95), Row(min_p=0.2),
    Row(1.5, 20, 0.7), Row(1.5, 20, 0.7, 0.1), Row(top_p=0.9, min_p=0.05), Row(top_k=40, min_p=0.3),
    Row(2.0, top_p=0.9999),
]  # fmt: skip


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("index", range(len(SUPPORT_ROWS)))
def test_supports_are_exact(index: int, spread: float) -> None:
    """With ties on both sides of the bounds, the reference's threshold keeps exactly the oracle's set."""
    torch.manual_seed(index)
    row = SUPPORT_ROWS[index]
    logits = (torch.randn(1, 257) * spread * 8).round() / 8  # many ties
    column = [torch.tensor([[value]]) for value in (row.top_k, row.top_p, row.min_p)]
    x = logits / row.temperature
    kept = (x >= _threshold(x, *column))[0].nonzero().flatten().tolist()
    assert set(kept) == _kept(logits[0].tolist(), row)


@pytest.mark.parametrize(("vocab", "spread"), [(97, 0.05), (97, 4.0), (4500, 1.0), (4500, 4.0), (9000, 0.05)])
def test_kernel_draws_inside_the_threshold(vocab: int, spread: float, device: str) -> None:
    """Many seeds for each kind of filter. Flat rows of the largest vocabulary have too many candidates and search the row."""
    torch.manual_seed(vocab)
    rows = [replace(row, seed=(n, 0)) for row in SUPPORT_ROWS for n in range(2)]
    logits = (torch.randn(len(SUPPORT_ROWS), vocab) * spread).repeat_interleave(2, 0)
    args = _args(logits, rows, 31)
    moved = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    with interpreter_loops():
        drawn = sample.implementation("cuda")(*moved).cpu()
    # Sums of exponentials round differently: the mass may be reached one token earlier or later when it is that close.
    assert int((drawn != sample.reference(*args)).sum()) <= 1


def _frequencies(row: Row, logits: torch.Tensor, draws: int) -> torch.Tensor:
    """Counts per token over consecutive positions of one seed, half of them, and over consecutive seeds."""
    rows, vocab = draws, logits.shape[0]
    index = torch.arange(rows, dtype=torch.int32)
    half = index < rows // 2
    seeds = torch.stack((torch.where(half, 7, index), torch.zeros_like(index)), 1).to(torch.int32)
    fill = torch.ones(rows)
    drawn = sample.reference(
        logits.expand(rows, vocab), index, fill * row.temperature, (fill * row.top_k).int(), fill * row.top_p,
        fill * row.min_p, seeds, torch.where(half, index, 3).int(), *no_tables(1, vocab), 7,
    )  # fmt: skip
    return torch.bincount(drawn, minlength=vocab)


@pytest.mark.parametrize(
    "row",
    [
        Row(0.7),
        Row(1.0),
        Row(1.5),
        Row(1.0, top_k=6),
        Row(1.5, top_p=0.8),
        Row(0.7, min_p=0.1),
        Row(1.5, 12, 0.9, 0.02),
    ],
)
def test_frequencies_match_the_probabilities(row: Row) -> None:
    torch.manual_seed(4)
    draws, logits = 40000, torch.randn(41) * 1.5
    counts = _frequencies(row, logits, draws)
    kept = sorted(_kept(logits.tolist(), row))
    probability = torch.zeros(41, dtype=torch.float64)
    probability[kept] = torch.softmax(logits[kept].double() / row.temperature, 0)
    assert counts[probability == 0].sum() == 0
    expected = probability[kept] * draws
    common = expected >= 5
    statistic = float(((counts[kept] - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)), (statistic, freedom)
    assert (counts[kept] > 0)[expected >= 20].all()


def test_successive_draws_are_independent() -> None:
    """Pairs of tokens at neighbouring positions occur as often as the product of their probabilities."""
    draws, vocab = 30000, 6
    position = torch.arange(draws, dtype=torch.int32)
    zeros = torch.zeros(draws)
    seeds = torch.tensor([[5, 6]], dtype=torch.int32).expand(draws, 2).contiguous()
    drawn = sample.reference(
        torch.zeros(draws, vocab), position, zeros + 1, zeros.int(), zeros + 1, zeros, seeds, position,
        *no_tables(1, vocab), RANDOM,
    )  # fmt: skip
    pairs = torch.bincount(drawn[:-1].long() * vocab + drawn[1:], minlength=vocab * vocab).double()
    expected = (draws - 1) / vocab**2
    statistic = float(((pairs - expected) ** 2 / expected).sum())
    assert statistic < 35 + 5 * math.sqrt(70)


def test_meta_gives_shapes() -> None:
    meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in _args(torch.zeros(3, 8), [Row()] * 3)]
    drawn = sample(*meta)
    assert drawn.shape == (3,) and drawn.dtype == torch.int32


@pytest.mark.parametrize(("top_p", "number"), [(0.5, 1), (0.75, 2), (0.875, 3), (0.9375, 4)])
def test_tokens_that_reach_the_mass_exactly_are_enough(top_p: float, number: int) -> None:
    """Weights of a half, a quarter, and so on: each sum is exact, and so is the share that is asked for."""
    logits = torch.tensor([0.5**n for n in range(5)] + [0.5**4]).log().expand(64, -1).contiguous()
    weight = (logits[0] - logits[0, 0]).exp()
    assert weight.tolist() == [0.5**n for n in range(5)] + [0.5**4], "exp is not exact here, and the test means nothing"
    rows = [Row(top_p=top_p, seed=(n, 7)) for n in range(64)]
    assert {*sample.reference(*_args(logits, rows)).tolist()} == {*range(number)}
    for _, drawn in run_both(sample, _args(logits[:3], rows[:3])):
        assert {*drawn.tolist()} <= {*range(number)}
