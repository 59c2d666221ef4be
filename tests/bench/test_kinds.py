"""The bench of attention's other kinds: it runs, counts bytes and arithmetic right, and has others' kernels beside."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.ops import kinds
from bench.ops.kinds import Size


def test_every_operation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "QUICK", [Size(2, 3, 3)])
    path = tmp_path / "kinds.json"
    rows = kinds.main(["--quick", "--json", str(path)])
    assert json.loads(path.read_text())["figures"] == rows
    assert {row["op"] for row in rows} == {
        "mla_decode", "mla_prefill", "index_scores", "index_topk", "gated_delta", "ssd_scan"
    }  # fmt: skip
    assert all(row["us"] > 0 for row in rows)


def test_bytes_and_arithmetic() -> None:
    """Of two rows of one token that see 96: latents of 576 once; of prompts the triangle."""
    few, *_ = kinds.mla_decode_cases([Size(2, 1, 96)], "cpu")
    assert few.bytes == 4 * (2 * 96 * 576 + 2 * 16 * (512 + 512 + 192))
    assert few.flops == 2 * 2 * 96 * 16 * (576 + 512)
    prompt, *_ = kinds.mla_prefill_cases([Size(2, 4, 4)], "cpu")
    assert prompt.flops == 2 * 2 * (1 + 2 + 3 + 4) * 16 * (192 + 128)
    scores, best = kinds.index_cases([Size(1, 1, 10)], "cpu", heads=3, width=8, best=4)
    assert (scores.bytes, scores.flops) == (4 * 10 * 8 + 4 * 10, 2 * 10 * 3 * 8)
    assert (best.bytes, best.flops) == (4 * 10 + 4 * 4, 0)


def test_others_stand_beside_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for the same rows, pages and heads; here they are pretended."""
    asked: list[Any] = []
    flash, infer = ModuleType("flash_mla"), ModuleType("flashinfer.mla")
    flash.get_mla_metadata = lambda lens, heads, kv_heads: (lens, heads)  # type: ignore[attr-defined]
    flash.flash_mla_with_kvcache = lambda *given: asked.append(given)  # type: ignore[attr-defined]

    class Wrapper:
        def __init__(self, workspace: torch.Tensor) -> None: ...

        def plan(self, starts: torch.Tensor, pages: torch.Tensor, ids: torch.Tensor, *others: Any) -> None:
            asked.append((pages.tolist(), len(ids)))

        def run(self, *given: torch.Tensor) -> None:
            asked.append([tuple(each.shape) for each in given])

    infer.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    parent = ModuleType("flashinfer")
    for name, module in (("flash_mla", flash), ("flashinfer", parent), ("flashinfer.mla", infer)):
        monkeypatch.setitem(sys.modules, name, module)
    cases = list(kinds.mla_decode_cases([Size(2, 1, 96)], "cpu"))
    assert [case.name.rpartition(", ")[2] for case in cases[1:3]] == ["FlashMLA", "FlashInfer"]
    for case in cases[1:3]:
        case.calls[0]()
    assert asked[0] == ([0, 2, 4], 4)
    assert asked[2][0].shape == (2, 1, 16, 576) and asked[2][1].shape == (5, 64, 1, 576)
    assert asked[3] == [(2, 16, 512), (2, 16, 64), (5, 64, 512), (5, 64, 64)]
