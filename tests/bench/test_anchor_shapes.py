"""Shapes of other kinds than generation alone: vectors, and engines with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.bench.anchors.context import MODELS, engine_of
from headway.cli.main import app
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
