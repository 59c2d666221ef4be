"""Which of the target's groups of layers a drafter shares blocks with."""

from __future__ import annotations

import pytest

from headway.core.cache import CacheKind, CacheLayout, CacheSpec, Part, keys_and_values
from headway.core.errors import ConfigError
from headway.speculative.chain import shared_group

FULL, WINDOW = keys_and_values(2, 8), keys_and_values(2, 8, window=16)
STATE = CacheSpec(CacheKind.STATE, (Part("ssm", (4, 4)),))
ALL = CacheLayout.of([FULL], 512)


def test_a_group_that_keeps_every_token() -> None:
    target = CacheLayout.of([WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL], 4096)
    assert len(target.groups) > 1 and target.groups[shared_group(target, ALL)].kind is CacheKind.FULL
    assert shared_group(ALL, ALL) == 0


@pytest.mark.parametrize(
    ("target", "own"),
    [
        (CacheLayout.of([WINDOW], 4096), ALL),
        (ALL, CacheLayout.of([WINDOW], 4096)),
        (ALL, CacheLayout.of([STATE], 512)),
        (ALL, CacheLayout.of([STATE, FULL], 512)),
        (ALL, CacheLayout.of([None], 512)),
    ],
)
def test_others_are_refused(target: CacheLayout, own: CacheLayout) -> None:
    with pytest.raises(ConfigError, match="speculative_config"):
        shared_group(target, own)
