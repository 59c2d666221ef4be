"""How much of pictures a step encodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.config import Thresholds
from headway.engine.sight import encoder_rows


@pytest.mark.parametrize(("step_patches", "given", "rows"), [(64, None, 16), (3, None, 1), (64, 5, 5)])
def test_a_step_encodes_so_many_patches_or_a_row(step_patches: int, given: int | None, rows: int) -> None:
    spec: Any = SimpleNamespace(encoder=SimpleNamespace(width=8, patches=4, longest=30))
    sizes: Any = SimpleNamespace(thresholds=Thresholds(encoder_rows=given), max_num_batched_tokens=10)
    assert encoder_rows(spec, sizes, step_patches) == rows
    assert encoder_rows(SimpleNamespace(encoder=None), sizes, step_patches) == 0  # type: ignore[arg-type]
