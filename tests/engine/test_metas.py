"""What an operation says of its results beforehand, for tensors without data, is what its results are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.kernels.registry import Op
from tests.engine.harness import run
from tests.sim.kinds import KINDS, SMALL

MOST = 8
"""Requests of a kind: enough for prompts that come in chunks, and for every way of sampling that has an operation here."""
RUN = {
    "latents": {"mla_decode", "mla_gather", "mla_write"},
    "indexer": {"index_scores"},
    "mixture": {"embed", "expert_mlp", "rms_norm", "rope_kv_write", "route_experts", "sample"},
    "state beside keys": {"causal_conv", "silu_mul", "ssd_scan"},
    "delta rule": {"delta_decode", "gated_delta", "gated_rms_norm"},
    "sight": {"dense_attention"},
}
"""Operations that give results and must be among those that a kind runs."""


def shapes(found: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Of one tensor or several."""
    return [(each.shape, each.dtype) for each in (found if isinstance(found, tuple | list) else (found,))]


@pytest.mark.parametrize("kind", RUN)
def test_results_are_as_large_as_they_are_said_to_be(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def checked(self: Op, *args: Any) -> Any:
        found = self._overload(*args)
        if found is not None:
            bare = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in args]
            assert shapes(self._overload(*bare)) == shapes(found), self.name
            seen.add(self.name)
        return found

    for name, value in SMALL.items():
        monkeypatch.setattr(name, value)
    core = KINDS[kind].plain(max_num_batched_tokens=28)
    monkeypatch.setattr(Op, "__call__", checked)
    answers = run(core, KINDS[kind].requests(core.info)[:MOST])
    core.shutdown()
    assert len(answers) == MOST and not any(each.error for each in answers.values())
    assert seen >= RUN[kind], RUN[kind] - seen
