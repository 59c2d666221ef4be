"""Where a step's integers lie: apart from each other, and where kernels that are specialised on it expect them."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from headway.core.cache import CacheKind, CacheLayout, CacheSpec, Part, keys_and_values
from headway.runner.admission import MAX_STOP_IDS
from headway.runner.batch_buffers import BatchBuffers
from headway.state.slots import SlotArena, core_tables


@pytest.mark.parametrize("windows", [(), (8,), (8, 16)])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (5, 3), (6, 6), (7, 2), (8, 4)])
@pytest.mark.parametrize("width", [1, 3])
def test_everything_begins_at_a_multiple_of_16_bytes(
    windows: tuple[int, ...], tokens: int, rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever numbers of tokens, rows and groups there are, and none shares memory with another."""
    parts = Part("conv", (3, 5)), Part("ssm", (2, 3), "float32", inputs=4)
    layers = [keys_and_values(1, 4, window=each) for each in (0, *windows)]
    states = [CacheSpec(CacheKind.STATE, parts) for _ in layers]
    layout = CacheLayout.of(layers, 64, states)
    monkeypatch.setattr("headway.runner.batch_buffers.step_unpack", lambda *args: None)
    arena = SlotArena(core_tables(64, 8, MAX_STOP_IDS, width - 1, len(layout.groups)), 4, torch.device("cpu"))
    buffers = BatchBuffers(arena, tokens, rows, 8, layout, width, replays=True)
    batch = buffers.unpack(
        torch.zeros(64, dtype=torch.int32), num_tokens=tokens, num_rows=rows, num_decode_rows=rows, max_query_len=tokens,
        max_seq_len_bound=64, width=width,
    )  # fmt: skip
    assert len(batch.groups) == 1 + len(windows) and len(batch.logit_indices) == rows * width
    named = [batch.input_ids, batch.positions, batch.seq_lens, batch.row_slots, batch.query_start, batch.stored_at]
    named += [batch.store_at, batch.arrivals, *(group.kv_slots for group in batch.groups)]
    found = [each for each in named if each is not None]
    assert len(found) == len(named)
    assert not [each.data_ptr() % 16 for each in (*found, batch.logit_indices) if each.data_ptr() % 16]
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in (*found, batch.logit_indices)]
    assert all(one[1] <= other[0] or other[1] <= one[0] for one, other in combinations(spans, 2))
