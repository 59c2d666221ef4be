"""Kernels of latent attention compile for every GPU that is supported, within its shared memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.cards import SHARED
from tests.kernels.compiler_process import run_module

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")

KERNELS = {
    "head_linear_kernel", "mla_decode_kernel", "mla_gather_kernel", "mla_merge_kernel", "mla_prefill_kernel",
    "mla_write_kernel", "index_scores_kernel", "index_topk_kernel", "index_write_kernel",
}  # fmt: skip


def check(tmp_path: Path, *words: str) -> None:
    built: list[dict[str, Any]] = [
        json.loads(line) for line in run_module("tests.kernels.compile_latents", tmp_path, *words).splitlines()
    ]
    assert not [each for each in built if each["complaint"]]
    for each in built:
        assert each["shared"] <= SHARED[each["capability"]] * 1024, each
    for capability in {each["capability"] for each in built}:
        assert {each["name"] for each in built if each["capability"] == capability} == KERNELS


@pytest.mark.slow
def test_kernels_compile_for_hopper_and_for_little_memory(tmp_path: Path) -> None:
    check(tmp_path, "DeepSeek-V2-Lite", "86", "90", "sparing")


@pytest.mark.soak
def test_kernels_compile_for_every_card(tmp_path: Path) -> None:
    check(tmp_path, *map(str, SHARED))
