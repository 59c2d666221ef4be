"""Every kernel that the plain path needs compiles for the GPUs that are supported, within its shared memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.cards import SHARED
from tests.kernels.compiler_process import run_module

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")

NEEDED = {
    "step_unpack_kernel", "embed_kernel", "rms_norm_kernel", "rope_kv_write_kernel", "gate_mul_kernel", "decode_kernel",
    "prefill_kernel", "skinny_linear_kernel", "race_kernel", "finish_kernel", "slot_advance_kernel", "apply_edits_kernel",
    "dense_kernel", "dense_rope_kernel", "disentangled_kernel", "segment_pool_kernel", "router_kernel", "choose_kernel",
    "few_in_kernel", "few_out_kernel", "sort_kernel", "grouped_kernel", "combine_kernel", "cross_rows_kernel",
    "cross_kv_write_kernel", "distance_kernel", "speech_rules_kernel", "time_warp_kernel",
}  # fmt: skip


def compiled(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What was compiled, each without a complaint and within its card's shared memory."""
    lines = run_module("tests.kernels.compile_cards", folder, *words).splitlines()
    built = [json.loads(line) for line in lines]
    assert not [each for each in built if each["complaint"]]
    for each in built:
        assert each["shared"] <= SHARED[each["capability"]] * 1024, each
    return built


@pytest.mark.slow
def test_every_kernel_compiles_for_cards_of_each_generation(tmp_path: Path) -> None:
    """In turns: each for two cards, each card for some. All for all is the soak's."""
    built = compiled(tmp_path)
    assert {each["capability"] for each in built} == SHARED.keys()
    for cards in (80, 86, 89), (90, 100, 120):
        names = {each["name"] for each in built if each["capability"] in cards}
        assert names >= NEEDED, f"no longer launched on the plain path: {NEEDED - names}"


@pytest.mark.soak
def test_kernels_compile_for_every_card(tmp_path: Path) -> None:
    built = compiled(tmp_path, "all")
    for capability in SHARED:
        names = {each["name"] for each in built if each["capability"] == capability}
        assert names >= NEEDED, f"no longer launched on the plain path: {NEEDED - names}"
