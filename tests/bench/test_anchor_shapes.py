"""Shapes of other kinds than generation alone: vectors, and engines with drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.bench.anchors import ablations
from headway.cli.bench.anchors.context import MODELS, TINY, Bench, engine_of, find_model, spec_of
from headway.cli.bench.anchors.table import Table
from headway.cli.main import app
from tests.attention.kinds import folder_of
from tests.bench.test_anchors import by_name, measure
from tests.engine.tiny_llama import CONFIG


def test_vectors_are_measured_by_length(tmp_path: Path) -> None:
    """An encoder with 40 positions, and a decoder whose engine is told to pool: a row for each length they can run."""
    encoder = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 300,
        "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 40, "type_vocab_size": 2,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
    }  # fmt: skip
    decoder = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 300, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
    }  # fmt: skip
    names = {"encoder": encoder, "decoder": decoder}
    for name, config in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "decoder" / "engine.json").write_text('{"runner": "pooling"}')
    options = [word for name in names for word in ("--model", str(tmp_path / name))]
    result = CliRunner().invoke(
        app, ["bench", "anchors", *options, "--tiny", "--out", str(tmp_path / "out"), "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    [path] = (tmp_path / "out").glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["status"]) for row in rows] == [
        ("encoder.req_s_len32", "measured"),
        ("encoder.req_s_len38", "measured"),
        ("decoder.req_s_len32", "measured"),
        ("decoder.req_s_len62", "measured"),
    ]
    assert all(row["ours"] > 0 for row in rows)


@pytest.mark.parametrize("accepted", [{"synthetic_acceptance_length": 2.5}, engine_of(MODELS / "qwen3_06b_rejected")])
def test_drafts_are_measured_as_milliseconds_a_token(tmp_path: Path, accepted: dict[str, Any]) -> None:
    """The second: what drafts cost of which none is accepted, while their number adapts."""
    folder = tmp_path / "drafting"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    speculative = {
        "method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
        **accepted.get("speculative_config", accepted),
    }  # fmt: skip
    (folder / "engine.json").write_text(json.dumps({"speculative_config": speculative}))
    result, report = measure(folder, tmp_path, "--only", "itl_ms_short_bs2")
    assert result.exit_code == 0, result.output
    assert by_name(report)["drafting.itl_ms_short_bs2"]["status"] == "measured"


def test_fast_prefill_on_and_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose upper layers cache nothing; others have no such row. What a variant runs is what it says."""
    narrowed: dict[str, int] = {}
    measured = ablations._variant

    def watched(bench: Bench, names: list[str], *given: Any) -> None:
        narrowed[names[0]] = spec_of(bench).narrow_layers
        measured(bench, names, *given)

    monkeypatch.setattr(ablations, "_variant", watched)
    only = [word for name in ("*default_ttft*", "*default_prefill*", "*fast_prefill_*") for word in ("--only", name)]
    folder = tmp_path / "shared"
    shutil.copytree(folder_of("gemma4"), folder)
    result, report = measure(folder, tmp_path, "--ablations", *only)
    assert result.exit_code == 0, result.output
    rows = by_name(report)
    for variant in ("default", "no_fast_prefill"):
        for figure, unit in (("ttft_ms", "ms"), ("prefill_tok_s", "tok/s")):
            row = rows[f"shared.ablation_{variant}_{figure}"]
            assert (row["status"], row["unit"]) == ("measured", unit), row
    assert narrowed == {"ablation_default_itl_ms_bs1": 3, "ablation_no_fast_prefill_itl_ms_bs1": 0}
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    bench = Bench(Table("plain"), TINY, plain, "t", tmp_path, 1, {}, True)
    assert not any("fast_prefill" in name for name in ablations.announce(bench))


def test_the_shape_with_shared_keys_is_gemma_4_e2b() -> None:
    """Twenty of 35 layers cache nothing: a prompt's tokens run through 15."""
    bench = Bench(Table("gemma4_e2b"), TINY, find_model("gemma4_e2b"), "t", Path(), 1, {}, False)
    spec = spec_of(bench)
    assert (spec.narrow_layers, len(spec.layer_kinds)) == (20, 35)
    assert spec.layer_weights == pytest.approx(1.863e9, rel=1e-3)


def test_a_shape_with_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    """Everything else is the model's own, which stays as it is; it may be asked for again."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    bench = Bench(Table("own"), TINY, own, "t", tmp_path, 1, {}, True)
    for _ in range(2):
        other = bench.with_vocabulary(512)
    assert (spec_of(bench).vocab_size, spec_of(other).vocab_size) == (300, 512)
    config = {**CONFIG, "vocab_size": 512, "eos_token_id": 0, "bos_token_id": 0}
    assert json.loads((other.folder / "config.json").read_text()) == config
    assert other.folder.parent == tmp_path != own == bench.folder and other.tokenizer == "t"
