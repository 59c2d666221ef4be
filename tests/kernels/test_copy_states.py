"""``copy_states``: every form copies the listed rows, whole, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.core.chunks import LOADS_AT
from headway.kernels.copy_states import copy_states

PAIRS = [(3, 0), (5, 1), (9, 2), (4, -1)]  # two name slots that there are not


@pytest.mark.parametrize("form", ["reference", "cpu", "kernel"])
@pytest.mark.parametrize("count", [0, 4])
def test_listed_rows_are_copied_whole(form: str, count: int, device: str) -> None:
    run = {"reference": copy_states.reference, "cpu": copy_states.implementation("cpu")}.get(form)
    where = "cpu" if run else device
    storage = torch.arange(6 * 5000, dtype=torch.int32).view(6, 5000).to(where)
    packed = torch.zeros(40, dtype=torch.int32)
    packed[LOADS_AT], packed[LOADS_AT + 1] = 20, count
    packed[20:28] = torch.tensor(PAIRS).flatten()
    wanted = storage.clone()
    if count:
        wanted[0], wanted[1] = storage[3], storage[5]
    (run or copy_states.implementation("cuda"))(storage, packed.to(where), LOADS_AT, 5)
    assert torch.equal(storage, wanted)


def test_reference_reads_nothing_on_the_host() -> None:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": "meta"}
    copy_states.reference(torch.empty(3, 8, **ints), torch.empty(40, **ints), LOADS_AT, 2)
