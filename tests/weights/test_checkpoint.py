"""open_checkpoint on folders in Hugging Face form."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headway.core.errors import ModelError, UnsupportedModelError, WeightsError
from headway.weights import open_checkpoint
from headway.weights.progress import progress_bar


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"model.norm.weight": torch.arange(4.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def test_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.path == folder
    assert checkpoint.config == {"architectures": ["LlamaForCausalLM"]}
    assert checkpoint.generation_config == {}
    assert not checkpoint.is_dummy
    assert checkpoint.num_bytes == 16
    ((name, tensor),) = checkpoint.tensors()
    assert checkpoint.tensor_names() == {name}
    assert tensor.tolist() == [0, 1, 2, 3]
    assert len(list(checkpoint.tensors())) == 1  # may be read again


def test_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_k": 20}')
    assert open_checkpoint(str(folder)).generation_config == {"top_k": 20}


def test_dummy_needs_only_the_configuration(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    assert (checkpoint.is_dummy, checkpoint.num_bytes) == (True, 0)
    with pytest.raises(WeightsError, match="dummy"):
        checkpoint.tensors()


@pytest.mark.parametrize(
    ("text", "message"), [(None, "no config.json"), ("{", "not readable JSON"), ("[]", "JSON object")]
)
def test_broken_configuration(folder: Path, text: str | None, message: str) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(str(folder))


def test_finding_files_needs_no_torch() -> None:
    code = "import sys, headway.weights.source, headway.weights.gguf_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_sentence_models_tensors_have_the_names_of_their_folders(folder: Path) -> None:
    """The transformer may lie in a folder of its own, and layers behind it do; heads for tokens lie beside it."""
    own = folder / "0_Transformer"
    own.mkdir()
    for name in ("model.safetensors", "config.json"):
        (folder / name).rename(own / name)
    modules = [
        {"idx": 0, "type": "x.Transformer", "path": "0_Transformer"},
        {"idx": 1, "type": "x.Dense", "path": "2_Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 4, "out_features": 3}))
    dense = torch.arange(12.0).view(3, 4)
    save_file({"linear.weight": dense}, folder / "2_Dense" / "model.safetensors")
    save_file({"weight": torch.ones(5, 4)}, folder / "colbert_linear.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config == {"architectures": ["LlamaForCausalLM"]} and checkpoint.path == folder
    for tensors in (dict[str, Any](checkpoint.tensors()), dict[str, Any](checkpoint.stored((8,)))):
        assert [*tensors] == ["model.norm.weight", "2_Dense.linear.weight", "colbert_linear.weight"]
        assert torch.equal(tensors["2_Dense.linear.weight"], dense)
    assert checkpoint.sentence is not None and checkpoint.token_heads.vectors == 5
    dummy = open_checkpoint(str(folder), load_format="dummy")
    assert dummy.is_dummy and dummy.config == checkpoint.config and not dummy.token_heads.files


def test_tables_of_integers_are_read_where_that_is_asked(folder: Path) -> None:
    save_file({"d2t": torch.arange(3)}, folder / "model.safetensors")
    assert dict(open_checkpoint(str(folder), integers=True).tensors())["d2t"].tolist() == [0, 1, 2]
    with pytest.raises(UnsupportedModelError, match="d2t has dtype"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(("unit", "shown"), [("B", "1.00k"), ("it", "1000")])
def test_bars_are_drawn_on_terminals_alone(unit: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        terminal = True

        def isatty(self) -> bool:
            return self.terminal

    threads = set(threading.enumerate())
    for terminal, show in ((True, True), (True, False), (False, True)):
        screen = Screen()
        screen.terminal = terminal
        monkeypatch.setattr(sys, "stderr", screen)
        with progress_bar(2000, "loading", show=show, unit=unit) as advance:
            advance(400)
            advance(600)
            assert set(threading.enumerate()) == threads
        said = screen.getvalue().lower()
        assert ("loading" in said and shown in said) == (terminal and show)
