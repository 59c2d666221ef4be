"""``headway bench anchors`` of a mixture: the experts that a step reads, and the floor that follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli.bench.anchors import experts, floors
from headway.cli.bench.anchors.floors import bandwidth
from headway.cli.bench.anchors.table import known_figures
from headway.models.layers import moe
from tests.bench.test_anchors import by_name, full_bench, measure
from tests.engine.tiny_llama import CONFIG


def test_experts_that_are_read_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "mixture"
    folder.mkdir()
    own = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300, **own}))
    result, report = measure(folder, tmp_path, "--only", "experts*", "--only", "floor*")
    assert result.exit_code == 0, result.output
    rows = by_name(report)
    assert rows["mixture.experts_read_bs1"]["ours"] == 2
    assert 2 <= rows["mixture.experts_read_bs2"]["ours"] <= 4
    assert rows["mixture.floor_ms_by_experts_bs2"]["status"] == "not served"


def test_functions_that_record_are_put_back_whatever_happens() -> None:
    before = {name: vars(moe)[name] for name in vars(moe) if name.endswith("route_experts")}
    assert len(before) == 2
    with pytest.raises(KeyError), experts._recorded():
        assert not any(vars(moe)[name] is own for name, own in before.items())
        raise KeyError
    assert all(vars(moe)[name] is own for name, own in before.items())


def test_floors_of_mixtures_count_distinct_experts(tmp_path: Path) -> None:
    bench, speed = full_bench("qwen3_30b_a3b", tmp_path), bandwidth("NVIDIA H200")
    assert speed is not None
    for rows in (1, 64, 256):
        floor = known_figures("qwen3_30b_a3b", "NVIDIA H200")[f"itl_ms_short_bs{rows}"]["floor"]
        assert floors.step_bytes(bench, rows, 128 + 160) / speed * 1e3 == pytest.approx(floor, rel=0.08)
    assert floors.step_bytes(full_bench("gpt_oss_20b", tmp_path), 1, 288) / speed * 1e3 == pytest.approx(0.83, rel=0.08)
