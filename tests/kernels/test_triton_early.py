"""When kernels may start before the one ahead of them has ended."""

from __future__ import annotations

import pytest
import torch

from headway.core.switches import EARLY_LAUNCH
from headway.kernels.triton_early import launch_early

LATE, EARLY = {"EARLY": False}, {"EARLY": True, "launch_pdl": True}


@pytest.mark.parametrize(
    ("capability", "switch", "wanted"),
    [((8, 9), None, LATE), ((9, 0), None, EARLY), ((9, 0), "1", EARLY), ((9, 0), "0", LATE), ((12, 0), None, EARLY)],
)
def test_launches_are_early_where_the_card_can_and_nobody_says_no(
    capability: tuple[int, int], switch: str | None, wanted: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(EARLY_LAUNCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(EARLY_LAUNCH, switch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    decide = launch_early.__wrapped__  # it remembers its answers
    assert decide(torch.device("cuda", 1)) == wanted
    assert decide(torch.device("cpu")) == LATE
