"""Kernels of states compile for every GPU that is supported, within its shared memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernels.cards import SHARED
from tests.kernels.compiler_process import run_module

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")


def built(tmp_path: Path, *cards: int) -> list[dict[str, int]]:
    lines = run_module("tests.kernels.compile_states", tmp_path, *map(str, cards)).splitlines()
    return [json.loads(line) for line in lines]


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    found = built(tmp_path, 90)
    assert len(found) == 31
    assert all(each["shared"] <= SHARED[90] * 1024 for each in found)


@pytest.mark.soak
def test_kernels_compile_for_every_card(tmp_path: Path) -> None:
    for each in built(tmp_path, *SHARED):
        assert each["shared"] <= SHARED[each["capability"]] * 1024, each
