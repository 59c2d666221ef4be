"""open_checkpoint on folders in Hugging Face form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headway.core.errors import ModelError, WeightsError
from headway.weights import open_checkpoint


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
