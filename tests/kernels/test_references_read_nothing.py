"""The references of the step and sampling operations run on Meta tensors: they read no device value on the host.

Meta tensors have no data, so ``.item()``, ``bool()``, boolean masks, ``nonzero`` and loops over values raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.kernels.allowed_tokens import allowed_tokens
from headway.kernels.apply_edits import apply_edits
from headway.kernels.bad_words import bad_words
from headway.kernels.chain_unpack import chain_unpack
from headway.kernels.count_tokens import count_tokens
from headway.kernels.gather_logprobs import gather_logprobs
from headway.kernels.grammar_advance import grammar_advance
from headway.kernels.grammar_mask import grammar_mask, kept_ints
from headway.kernels.logit_bias import logit_bias
from headway.kernels.min_tokens import min_tokens
from headway.kernels.ngram_draft import ngram_draft
from headway.kernels.registry import Op
from headway.kernels.sample import sample
from headway.kernels.slot_advance import slot_advance
from headway.kernels.step_unpack import step_unpack
from headway.kernels.suffix_draft import suffix_draft
from headway.kernels.suffix_keep import suffix_keep
from headway.kernels.synthetic_accept import synthetic_accept

S, R, L, V, C = 4, 3, 32, 50, 6


def _i(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _f(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _counts() -> torch.Tensor:
    return torch.empty(S, V, dtype=torch.int16, device="meta")


CASES: list[tuple[Op, Callable[[], tuple[Any, ...]]]] = [
    (apply_edits, lambda: (_i(500), _i(100), 5)),
    (step_unpack, lambda: (_i(99), _i(S, L), _i(S), _i(S), _i(S, 4), *[_i(9)] * 3, _i(R + 1), *[_i(R)] * 3, 8, 7)),
    (count_tokens, lambda: (_counts(), _i(2), _i(S, L), _i(S), _i(S), L)),
    (
        slot_advance,
        lambda: (
            *(_i(99), _i(R), _i(R), _i(S, L), _i(S), _i(S), _i(S), _counts(), _i(S), _i(S), _i(S)),
            *(_i(S, 2), _i(S, C), _i(3, R, 4)),
        ),
    ),
    (chain_unpack, lambda: (_i(S, 5), _i(R), _i(R), _i(S, L), *[_i(S)] * 3, _i(S, 4), *[_i(R)] * 4, 8, 1, -1)),
    (synthetic_accept, lambda: (_i(R), _i(R), _i(S, 5), _i(S), _i(S, 2), 1, 1, 5, V)),
    (ngram_draft, lambda: (_i(S, 5), _i(R), _i(S, L), _i(S), 2, 4)),
    (suffix_draft, lambda: (_i(S, 5), _i(R), _i(S), _i(S, L), _i(S), _i(40), _i(9).long(), 3, 1.0, 0.1)),
    (suffix_keep, lambda: (_i(40), _i(9).long(), _i(R), _i(R), _i(S), _i(S), _i(S, L), _i(S), _i(S))),
    (logit_bias, lambda: (_f(R, V), _i(R), _i(S), _i(S, 9), _f(S, 9))),
    (allowed_tokens, lambda: (_f(R, V), _i(R), _i(S), _i(S, 2))),
    (min_tokens, lambda: (_f(R, V), _i(R), _i(S), _i(S), _i(S, 2), _i(S, C))),
    (bad_words, lambda: (_f(R, V), _i(R), _i(S, L), _i(S), _i(S), _i(S), _i(S, 9), _i(S, 20))),
    *[
        (
            sample,
            lambda flags=flags: (
                *(_f(R, V), _i(R), _f(S), _i(S), _f(S), _f(S), _i(S, 2), _i(S)),
                *(_counts(), _i(S), _f(S), _f(S), _f(S), flags),
            ),
        )
        for flags in (0, 1, 3, 5, 7, 39)
    ],
    (
        grammar_mask,
        lambda: (
            *(_f(R, V), _i(R), _i(S), _i(S, 3), _i(S), _i(S, 300), _i(9, V), _i(S, 2), _i(S, C), _i(S)),
            _i(S, kept_ints(V)),
        ),
    ),
    (
        grammar_advance,
        lambda: (
            *(_i(99), _i(R), _i(R), _i(S, L), _i(S), _i(S), _i(S), _counts(), _i(S), _i(S), _i(S)),
            *(_i(S, 2), _i(S, C), _i(S), _i(S, 3), _i(S), _i(S, 300), _i(9, V), _i(3, R, 4)),
        ),
    ),
    (gather_logprobs, lambda: (_f(R, V), _i(R), _i(R), _i(S), _i(S), _i(S, 7), 12)),
]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[op.name for op, _ in CASES])
def test_reference_runs_without_data(index: int) -> None:
    op, arguments = CASES[index]
    result, declared = op.reference(*arguments()), op(*arguments())
    pairs = [(result, declared)] if isinstance(result, torch.Tensor) else zip(result or (), declared or (), strict=True)
    for real, promised in pairs:
        assert real.shape == promised.shape and real.dtype == promised.dtype


def test_this_test_can_fail() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        _i(3).sum().item()
