"""The native sampling operations: every case of the operations' own tests, and thousands of rows against the references."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from headway.kernels.allowed_tokens import allowed_tokens
from headway.kernels.bad_words import bad_words
from headway.kernels.cpu import sampling_ops
from headway.kernels.gather_logprobs import gather_logprobs
from headway.kernels.grammar_advance import grammar_advance
from headway.kernels.grammar_mask import grammar_mask
from headway.kernels.logit_bias import logit_bias
from headway.kernels.min_tokens import min_tokens
from headway.kernels.sample import RANDOM, TOP, sample
from headway.kernels.sample.reference import _penalised
from tests.kernels import (
    test_allowed_tokens,
    test_bad_words,
    test_gather_logprobs,
    test_logit_bias,
    test_min_tokens,
    test_sample,
    test_sample_penalties,
)
from tests.kernels.guarded import floats, ints, same
from tests.kernels.native_kernel import native_as_kernel, native_function, poisoned_memory, torch_threads
from tests.kernels.penalty_tables import no_tables
from tests.kernels.test_sample import Row

pytestmark = pytest.mark.skipif(not sampling_ops.available(), reason="no C compiler here")
INF = float("inf")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
EDITS = (logit_bias, allowed_tokens, min_tokens, bad_words)


@pytest.fixture
def native() -> Iterator[None]:
    with native_as_kernel(), poisoned_memory():
        yield


def test_the_cpu_runs_them() -> None:
    for op in (*EDITS, sample, gather_logprobs, grammar_mask, grammar_advance):
        assert op.implementation("cpu") is native_function(op)


@pytest.mark.parametrize("vocab", [5, 97, 1031, 49152])
def test_edits_by_id(vocab: int, native: None) -> None:
    for width in (1, 6, 1024):
        test_logit_bias.test_adds_the_biases_in_use(vocab, width)
    for width in (1, 7, 80):
        test_min_tokens.test_forbids_stop_ids_until_the_minimum(vocab, width)


def test_edits_by_id_in_special_cases(native: None) -> None:
    for token in (-1, 5, 2**31 - 1, -(2**31)):
        test_logit_bias.test_ids_outside_the_vocabulary_are_dropped(token)
    test_logit_bias.test_a_count_beyond_the_table_is_cut()
    test_min_tokens.test_the_boundary()


@pytest.mark.parametrize("vocab", [5, 32, 97, 1031, 49152])
def test_allowed_tokens_forbids_the_rest(vocab: int, native: None) -> None:
    test_allowed_tokens.test_forbids_what_is_not_listed(vocab)


@pytest.mark.parametrize("vocab", [5, 97, 4500])
def test_penalties_follow_the_formula(vocab: int, native: None) -> None:
    test_sample_penalties.test_greedy_rows_take_the_largest_penalised_logit(vocab, torch.float32)
    test_sample_penalties.test_greedy_rows_take_the_largest_penalised_logit(vocab, torch.bfloat16)
    test_sample_penalties.test_a_row_of_which_all_is_forbidden_stays_so()


@pytest.mark.parametrize("threads", [1, 2])
def test_penalties_are_the_references_bit_for_bit(threads: int) -> None:
    torch.manual_seed(1)
    S, V = 5, 30011
    counts = (torch.randint(-40000, 40000, (S, V)) * (torch.rand(S, V) < 0.3)).to(torch.int16)
    strengths = [torch.rand(S) * 2 + 0.1 for _ in range(3)]
    slots = ints([3, -1, 0, S, 4, 2, 1, 0])
    args = (counts, ints([1, 1, 0, 1, 1]), *strengths)
    wide = torch.randn(8, V + 7) * 10
    mine, theirs = wide.clone()[:, :V], wide[:, :V]
    with torch_threads(threads):
        sampling_ops._penalise(mine, slots, *args)
    inside = (slots >= 0) & (slots < S)
    theirs = _penalised(theirs, torch.where(inside, slots, 0).long(), inside, *args)
    assert same(mine, theirs)


@pytest.mark.parametrize("seed", range(60))
def test_bad_words_of_random_phrases(seed: int, native: None) -> None:
    test_bad_words.test_random_phrases(seed)


def test_bad_words_in_special_cases(native: None) -> None:
    test_bad_words.test_the_prompt_never_matches()
    test_bad_words.test_empty_phrases_are_dropped()
    test_bad_words.test_offsets_outside_the_table_write_nothing()


@pytest.mark.parametrize("vocab", [1, 5, 97, 1031])
@pytest.mark.parametrize("seed", range(3))
def test_sample_of_random_rows(vocab: int, seed: int, native: None) -> None:
    test_sample.test_random_rows(vocab, seed)


def test_sample_in_special_cases(native: None) -> None:
    for vocab in (5, 97, 3000):
        test_sample.test_greedy_takes_the_lowest_index_of_ties(vocab)
    for row in (Row(0.0), Row(), Row(top_k=2), Row(top_p=0.5), Row(min_p=0.5), Row(top_k=3, top_p=0.5, min_p=0.1)):
        test_sample.test_infinities_and_nan(row)
    for flags in (1, 3, 5, 7):
        test_sample.test_a_superset_of_flags_changes_nothing(flags)
    test_sample.test_a_row_does_not_depend_on_its_batch()
    test_sample.test_rows_may_be_strided("cpu")


@DTYPES
@pytest.mark.parametrize(("vocab", "rows", "seeds"), [(5, 64, 20), (97, 64, 20), (1031, 64, 8), (49152, 6, 2)])
def test_sample_draws_the_references_tokens(vocab: int, rows: int, seeds: int, dtype: torch.dtype) -> None:
    """Wherever the two best scores are not so close that the rounding of log and exp decides; none are here."""
    for seed in range(seeds):
        rng = random.Random(vocab + seed)
        torch.manual_seed(seed)
        given = [test_sample._random_row(rng) for _ in range(rows)]
        logits = (torch.randn(rows, vocab) * rng.choice([1.0, 4.0])).to(dtype)
        args = test_sample._args(logits, given)
        mine, theirs = sampling_ops.sample(*args), sample.reference(*args)  # type: ignore[arg-type]
        wrong = (mine != theirs).nonzero().flatten().tolist()
        assert not wrong, [(given[n], int(mine[n]), int(theirs[n])) for n in wrong]


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("index", range(len(test_sample.SUPPORT_ROWS)))
def test_only_kept_tokens_are_drawn_and_each_of_them(index: int, spread: float) -> None:
    """4000 positions of one row whose logits tie on both sides of the bounds."""
    torch.manual_seed(index)
    draws, row = 4000, test_sample.SUPPORT_ROWS[index]
    logits = (torch.randn(1, 1031) * spread * 8).round() / 8
    args = list(test_sample._args(logits.expand(draws, -1), [row] * draws))
    args[7] = torch.arange(draws, dtype=torch.int32)
    drawn = sampling_ops.sample(*args).long()  # type: ignore[arg-type]
    kept = sorted(test_sample._kept(logits[0].tolist(), row))
    assert set(drawn.tolist()) <= set(kept)
    probability = torch.softmax(logits[0, kept].double() / row.temperature, 0)
    assert {token for token, p in zip(kept, probability.tolist(), strict=True) if p > 0.01} <= set(drawn.tolist())


def test_large_top_k_and_its_ties() -> None:
    """More than the strips' maxima can bound, with half the row at one value."""
    torch.manual_seed(5)
    logits = torch.randn(4, 5000)
    logits[1, ::2] = 0.25
    logits[2] = 1.0
    logits[3, 100:] = -INF
    for k in (3, 700, 2600, 4999):
        for p in (1.0, 0.9):
            args = test_sample._args(logits, [Row(1.0, k, p, seed=(k, n)) for n in range(4)])
            assert torch.equal(sampling_ops.sample(*args), sample.reference(*args))  # type: ignore[arg-type]


def test_a_bound_just_below_zero() -> None:
    """The part of the values' range where the bound lies holds zero, which a row that ends inside a vector must not add."""
    logits = torch.full((16, 5001), -4.0)
    logits[:, :1000], logits[:, 1000:4001] = 1.0, -0.001
    args = test_sample._args(logits, [Row(1.0, 1001, seed=(n, 0)) for n in range(16)])
    drawn = sampling_ops.sample(*args)  # type: ignore[arg-type]
    assert torch.equal(drawn, sample.reference(*args)) and (drawn >= 1000).any()


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_sample_does_not_depend_on_threads(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    rng = random.Random(rows)
    given = [test_sample._random_row(rng) for _ in range(rows)]
    given[0] = Row(0.8)
    args = test_sample._args((torch.randn(rows, 80011) * 3).to(dtype), given, RANDOM | TOP)
    drawn = []
    for threads in (1, 2):
        with torch_threads(threads):
            drawn.append(sampling_ops.sample(*args))  # type: ignore[arg-type]
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("vocab", [5, 97, 1031, 9000])
@pytest.mark.parametrize("most", [0, 1, 5, 20, 33, 130])
def test_gather_logprobs_of_random_rows(vocab: int, most: int, native: None) -> None:
    test_gather_logprobs.test_random_rows(vocab, most)


def test_gather_logprobs_in_special_cases(native: None) -> None:
    test_gather_logprobs.test_infinite_logits()
    test_gather_logprobs.test_more_listed_ids_than_the_table_holds()
    test_gather_logprobs.test_dtypes(torch.bfloat16)
    test_gather_logprobs.test_dtypes(torch.float16)  # the reference's
    for token in (-1, 70, 2**31 - 1, -(2**31)):
        test_gather_logprobs.test_a_chosen_token_outside_the_vocabulary(token)


@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_gather_logprobs_of_a_large_vocabulary(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(2)
    wide = (torch.randn(5, 49152 + 3) * 3).to(dtype)
    logits = wide[:, :49152]
    args = (logits, ints([3, 9, 49151, 0, 7]), ints([0, 1, 2, 3, 4]), ints([20, 0, 5, -1, 3]), ints([0, 0, 0, 0, 2]),
            ints([[1, 2]] * 5), 20)  # fmt: skip
    with torch_threads(threads), poisoned_memory():
        ids, logprobs, ranks, counts = sampling_ops.gather_logprobs(*args)
    expected = gather_logprobs.reference(*args)
    for mine, theirs in zip((ids, ranks, counts), (expected[0], *expected[2:]), strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    empty, none = torch.zeros(0, 9), ints([])
    for op in (sample, gather_logprobs):
        slots = (none,) if op is sample else (none, none)
        tables = (
            floats([1.0]),
            ints([2]),
            floats([0.9]),
            floats([0.1]),
            ints([[1, 2]]),
            ints([3]),
            *no_tables(1, 9),
            7,
        )
        listed = (ints([2]), ints([0]), ints([[1]]), 2)
        result = native_function(op)(empty, *slots, *(tables if op is sample else listed))
        assert (result if op is sample else result[0]).shape[0] == 0


def test_what_the_kernels_do_not_know_is_the_references() -> None:
    """float16 logits, columns apart, tables of another layout."""
    torch.manual_seed(3)
    rows = [Row(0.7, 5), Row(0.0)]
    for logits in (torch.randn(2, 50).half(), torch.randn(50, 2).t()):
        args = test_sample._args(logits, rows)
        assert torch.equal(sampling_ops.sample(*args), sample.reference(*args))  # type: ignore[arg-type]
    edited = torch.zeros(4, 2).t()
    sampling_ops.logit_bias(edited, ints([0, 1]), ints([1, 1]), ints([[1], [2]]), floats([[1.0], [2.0]]))
    assert edited.tolist() == [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]]
