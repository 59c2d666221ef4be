"""All 64 bits of a request's seed choose its tokens: cutting some off gives the oracle the same wrong tokens, so no comparison
between depths or devices can notice."""

from __future__ import annotations

import pytest

from tests.engine.harness import MakeEngine, request, run

BITS = (0, 1, 8, 15, 16, 24, 31, 32, 40, 47, 48, 56, 62, 63)


@pytest.mark.parametrize("base", [0, 0x5DEECE66D1234567])
def test_every_bit_of_a_seed_counts(make_engine: MakeEngine, base: int) -> None:
    seeds = [base, *(base ^ (1 << bit) for bit in BITS)]
    params = {"temperature": 2.0, "ignore_eos": True, "max_tokens": 16}
    requests = [request(str(i), [1, 2, 3], seed=seed, **params) for i, seed in enumerate(seeds)]
    answers = run(make_engine(max_num_seqs=8), requests)
    drawn = [tuple(answers[each.request_id].token_ids) for each in requests]
    for bit, tokens in zip(BITS, drawn[1:], strict=True):
        assert tokens != drawn[0], f"bit {bit} of the seed makes no difference"
    assert len(set(drawn)) == len(drawn)
