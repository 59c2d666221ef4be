"""Parts of a step: rows' last tokens alone."""

from __future__ import annotations

import torch

from headway.state.batch import CrossBatch, GroupBatch, StepBatch


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step() -> StepBatch:
    """A row that decodes, a prompt of three tokens, a zombie of two, and two rows of padding, which are no token's."""
    lens = ints(5, 3, 0, 0, 0)
    tables = torch.zeros(4, 2, dtype=torch.int32)
    return StepBatch(
        input_ids=ints(10, 11, 12, 13, 14, 15, 0),
        positions=ints(4, 0, 1, 2, 7, 8, 0),
        query_start=ints(0, 1, 4, 6, 6, 6),
        seq_lens=lens,
        row_slots=ints(2, 0, 1, -1, -1),
        logit_indices=ints(0, 3, 5, 0, 0),
        groups=(
            GroupBatch(tables, ints(36, 16, 17, 18, -1, -1, -1), lens),
            GroupBatch(tables, ints(20, 0, 1, 2, -1, -1, -1), lens),
        ),
        arrivals=torch.zeros(5, 1, dtype=torch.int32),
        num_decode_rows=1,
        max_query_len=3,
        max_seq_len_bound=8,
        decode_rows=ints(1),
        selected=torch.arange(14, dtype=torch.int32).view(7, 2),
        prefix_bound=9,
        cross=CrossBatch(
            tables,
            ints(2, 0, 0, 0, 1, 1, -1),
            ints(6, 7, 7, 7, 0, 0, 0),
            torch.arange(8).int(),
            torch.zeros(7, 1).int(),
            7,
        ),
    )


def test_last_tokens_are_decode_rows_and_padding_writes_nothing() -> None:
    whole = step()
    last = whole.of_last_tokens()
    assert last.input_ids[:3].tolist() == [10, 13, 15] and last.positions[:3].tolist() == [4, 2, 8]
    assert last.query_start.tolist() == [0, 1, 2, 3, 4, 5] and last.logit_indices.tolist() == [0, 1, 2, 3, 4]
    assert (last.num_decode_rows, last.max_query_len, last.decode_rows, last.reads_this_step) == (5, 1, None, True)
    assert last.seq_lens.tolist() == whole.seq_lens.tolist() and last.prefix_bound == 0
    for mine, slots in zip(last.groups, ([36, 18, -1, -1, -1], [20, 2, -1, -1, -1]), strict=True):
        assert mine.kv_slots.tolist() == slots, "a row of padding is no other row's token"
    assert last.selected is not None and last.selected[:3].tolist() == [[0, 1], [6, 7], [10, 11]]
    assert last.cross is not None and last.cross.lens[:3].tolist() == [6, 7, 0] and len(last.cross.arrivals) == 5
    assert whole.groups[0].kv_slots.tolist()[:4] == [36, 16, 17, 18], "the step itself is left as it is"


def test_tokens_that_live() -> None:
    whole = step()
    assert (whole.live_tokens() >= 0).tolist() == [True] * 4 + [False] * 3
    assert (whole.live_tokens(last_only=True) >= 0).tolist() == [True, True, False, False, False]
    whole.groups = ()  # of texts that cache nothing the lengths tell
    assert (whole.live_tokens() >= 0).tolist() == [True] * 4 + [False] * 3
    assert (whole.live_tokens(last_only=True) >= 0).tolist() == [True, True, False, False, False]
