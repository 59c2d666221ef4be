"""``headway tune`` without a card: what it asks for, what it writes, what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from headway.cli import tune
from headway.core.errors import ConfigError, UnsupportedModelError
from headway.kernels.linear_forms import tune as kinds
from headway.kernels.linear_forms.card import H200
from headway.kernels.linear_forms.search import Found
from headway.kernels.linear_forms.shapes import JUNCTIONS, DecoderShape
from headway.kernels.linear_forms.table import current_device, tuned_path
from headway.kernels.linear_forms.winners import OPS
from tests.kernels.measured_alone import FakeBench


def test_tuning_wants_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="num_attention_heads"):
        tune.tune(str(tmp_path))
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 96,
    }
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="measures on a GPU"):
        tune.tune(str(tmp_path))


def test_tuning_writes_what_the_next_start_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the timing, with a formula in place of a card: layers of norms behind products, and others run whole."""

    class Whole:
        def __init__(self, *_: object, until: float, **__: object) -> None:
            self.until = until

        def run(self, shape: DecoderShape, rows: list[int]) -> Found:
            found = Found(failed=["8 rows o: two runs differ"], complete=self.until > time.monotonic())
            found.heads = {each: {"plain": (3.0, ("plain", None))} for each in rows}
            found.layers = {(each, "plain"): (3.0, dict.fromkeys(JUNCTIONS, ("plain", None))) for each in rows}
            return found

    class Compiler:
        def close(self) -> None:
            pass

    current_device()  # what tables are read for is known before a card is pretended
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("headway.kernels.hopper.runs_gluon", lambda _: True)
    for where in ("linear_forms.card", "linear_forms.tune"):
        monkeypatch.setattr(f"headway.kernels.{where}.card_of", lambda _: H200)
    monkeypatch.setattr("headway.kernels.compiler_process.CompilerProcess", Compiler)
    monkeypatch.setattr(kinds, "OnCard", lambda *_: FakeBench(lambda product, rows, form: 3.0 if form[1] else 9.0))
    monkeypatch.setattr(kinds, "Search", Whole)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = {
        "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    for name, keys in (
        (
            "Glm4ForCausalLM",
            {"norm_linear", "skinny_linear", "bare_linear", "gate_up", "bare_gate_up", "linear_parts", "mid_linear"},
        ),
        ("LlamaForCausalLM", {*OPS["few"].values(), *OPS["meet"].values(), "skinny_linear"}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **sizes}), encoding="utf-8")
        tuned_path(H200).unlink(missing_ok=True)
        tune.tune(str(tmp_path), rows=[1, 8, 64], seconds=60.0, most=2)
        written = json.loads(tuned_path(H200).read_text(encoding="utf-8"))["entries"]
        assert {op for op, *_ in written} == keys, name
        said = capsys.readouterr().out
        assert "written to" in said and ("failed, not used: 8 rows o: two runs differ" in said) == (
            name == "LlamaForCausalLM"
        )
    for name in ("Glm4ForCausalLM", "LlamaForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **sizes}), encoding="utf-8")
        tuned_path(H200).unlink()
        tune.tune(str(tmp_path), rows=[1, 8], seconds=-1.0, most=2)
        assert (
            "not measured, no time was left: gate_up [384, 128]; starts choose by the rule" in capsys.readouterr().out
        )
        assert json.loads(tuned_path(H200).read_text(encoding="utf-8"))["entries"] == [], (
            "what was not tried has not lost"
        )


def test_nothing_is_tuned_that_has_no_forms(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64,
              "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 64,
              "type_vocab_size": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match="more than one kernel to choose from"):
        tune.tune(str(tmp_path))
