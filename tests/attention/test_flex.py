"""Rules that a model brings: against the kernels' rules where both can say the same, and for what only functions can say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.attention.flex import FlexAttention, FlexRule
from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.testing import PagedInputs, assert_close, make_paged_inputs, make_random
from headway.state.batch import GroupBatch, StepBatch

H = 6
ROWS = [(1, 70), (1, 0), (1, 9), (5, 5), (21, 71), (3, 0), (1, 40)]
SLOPES = make_random(H, dtype=torch.float32, device="cpu", seed=3).abs() / 4
SINKS = make_random(H, dtype=torch.float32, device="cpu", seed=4)


def inputs(rows: list[tuple[int, int]] = ROWS, **changes: Any) -> PagedInputs:
    settings: dict[str, Any] = {"heads": (H, 2), "size": 16, "block_size": 8, "dtype": torch.float32, "device": "cpu"}
    first = next((i for i, (queries, _) in enumerate(rows) if queries > 1), len(rows))
    return make_paged_inputs(rows, num_decode_rows=first, pad_rows=2, pad_tokens=3, bound=150, **settings | changes)


def batch_of(made: PagedInputs) -> StepBatch:
    ints = torch.zeros(len(made.q), dtype=torch.int32)
    group = GroupBatch(made.block_tables, ints, made.seq_lens)
    last = (made.query_start[1:] - 1).clamp(min=0)
    return StepBatch(
        ints, ints, made.query_start, made.seq_lens, made.row_slots, last, (group,), made.arrivals, made.num_decode_rows,
        made.max_query_len, made.max_seq_len_bound, made.decode_rows,
    )  # fmt: skip


def alibi(score: Any, slot: Any, head: Any, q: Any, kv: Any) -> torch.Tensor:
    return score + SLOPES[head] * (kv - q)


def chunks(slot: Any, head: Any, q: Any, kv: Any) -> torch.Tensor:
    return q // 13 == kv // 13


def windows(slot: Any, head: Any, q: Any, kv: Any) -> torch.Tensor:
    return kv > q - 11


ALIKE: dict[str, tuple[FlexRule, ScoreRule, ScoreRule]] = {
    "plain": (FlexRule(), ScoreRule(0.3), ScoreRule(0.3)),
    "alibi": (FlexRule(score_mod=alibi), ScoreRule(0.3), ScoreRule(0.3, slopes=SLOPES)),
    "chunks": (FlexRule(mask_mod=chunks), ScoreRule(0.3), ScoreRule(0.3, chunk=13)),
    "windows and sinks": (FlexRule(mask_mod=windows), ScoreRule(0.3, sinks=SINKS), ScoreRule(0.3, 11, sinks=SINKS)),
    "both say some": (
        FlexRule(score_mod=alibi), ScoreRule(0.3, 20, 1.5, sinks=SINKS), ScoreRule(0.3, 20, 1.5, sinks=SINKS, slopes=SLOPES),
    ),
    "all of the kernels'": (FlexRule(), ScoreRule(0.3, 0, 0.0, 16, SINKS, SLOPES), ScoreRule(0.3, 0, 0.0, 16, SINKS, SLOPES)),
}  # fmt: skip


@pytest.mark.parametrize("tiles", [(256, 2048), (4, 16)], ids=str)
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("counted", [False, True])
def test_it_says_what_the_kernels_say(
    name: str, counted: bool, tiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.attention.flex.QUERIES", tiles[0])
    monkeypatch.setattr("headway.attention.flex.KEYS", tiles[1])
    flex, own, kernels = ALIKE[name]
    made = inputs()
    expected = paged_attention.reference(*made.arguments(*kernels))
    batch = batch_of(made)
    if counted:
        batch.decode_rows = torch.tensor([made.num_decode_rows], dtype=torch.int32)
    assert_close(FlexAttention(own, flex, 0)(made.q, batch, (made.k_cache, made.v_cache)), expected)


def test_8_bit_keys() -> None:
    made = inputs(cached=torch.float8_e4m3fn)
    expected = paged_attention.reference(*made.arguments(0.3, slopes=SLOPES))
    flex = FlexAttention(ScoreRule(0.3), FlexRule(score_mod=alibi), 0)
    assert_close(flex(made.q, batch_of(made), (made.k_cache, made.v_cache)), expected)


def test_a_rule_by_slot_head_and_position() -> None:
    """A document begins anew at a place of each slot's own, and odd heads see every other key only."""
    made = inputs()
    borders = torch.arange(len(made.block_tables)) * 7

    def documents(slot: Any, head: Any, q: Any, kv: Any) -> torch.Tensor:
        return ((kv >= borders[slot]) | (q < borders[slot])) & ((head % 2 == 0) | (kv % 2 == 0))

    flex = FlexAttention(ScoreRule(0.25), FlexRule(mask_mod=documents), 0)
    out = flex(made.q, batch_of(made), (made.k_cache, made.v_cache))
    starts, lens, size = made.query_start.tolist(), made.seq_lens.tolist(), made.k_cache.shape[1]
    for row, slot in enumerate(made.row_slots.tolist()):
        for token in range(starts[row], starts[row + 1]):
            p, border = lens[row] - starts[row + 1] + token, 7 * slot
            for head in range(H) if lens[row] else ():
                keys = [k for k in range(p + 1) if (k >= border or p < border) and (head % 2 == 0 or k % 2 == 0)]
                places = [(int(made.block_tables[slot, k // size]), k % size) for k in keys]
                if not places:
                    assert not out[token, head].any()
                    continue
                k, v = (
                    torch.stack([cache[b, o, head // 3] for b, o in places]) for cache in (made.k_cache, made.v_cache)
                )
                assert_close(out[token, head], (k @ made.q[token, head] * 0.25).softmax(0) @ v)


def test_layers_with_one_rule_ask_it_once_a_step_for_decode_rows() -> None:
    asked: list[tuple[int, ...]] = []

    def counting(slot: Any, head: Any, q: Any, kv: Any) -> torch.Tensor:
        asked.append(tuple(q.shape))
        return kv <= q

    made = inputs([(1, 70), (1, 9)])
    batch, rule = batch_of(made), FlexRule(mask_mod=counting)
    layers = [FlexAttention(ScoreRule(0.3), rule, 0), FlexAttention(ScoreRule(0.3), rule, 0)]
    for layer in layers:
        layer(made.q, batch, (made.k_cache, made.v_cache))
    decode = sum(shape[0] == 2 for shape in asked)
    assert decode == 1, asked
    batch.masks.clear()
    layers[0](made.q, batch, (made.k_cache, made.v_cache))
    assert sum(shape[0] == 2 for shape in asked) == 2


def test_slices_and_narrowed_steps_ask_anew() -> None:
    """They have other rows than the step they are of; and layers with other numbers of heads know other heads."""
    borders = torch.arange(20) * 3

    def documents(slot: Any, head: Any, q: Any, kv: Any) -> torch.Tensor:
        return ((kv >= borders[slot]) | (q < borders[slot])) & ((head % 2 == 0) | (kv % 2 == 0))

    made = inputs([(1, 70), (1, 9), (5, 40)])
    batch, flex = batch_of(made), FlexAttention(ScoreRule(0.3), FlexRule(mask_mod=documents), 0)
    cache = made.k_cache, made.v_cache
    whole = flex(made.q, batch, cache)
    last = batch.logit_indices
    assert_close(flex(made.q[last], batch.of_last_tokens(), cache)[:3], whole[last][:3])
    assert_close(flex(made.q[1:4], batch.slice(1, 4), cache), whole[1:4])
    half = (each[:, :, : each.shape[2] // 2] for each in cache)
    k, v = half
    assert_close(flex(made.q[:, : H // 2], batch, (k, v)), whole[:, : H // 2])
