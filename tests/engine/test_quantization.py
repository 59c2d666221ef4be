"""``quantization``: when weights stay in their GGUF blocks, what the log says, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.kernels.cpu import ops
from tests.models.test_quantized_weights import gguf
from tests.models.tiny import TINY, hf_model, save

needs_native = pytest.mark.skipif(not ops.available(), reason="no C compiler here")
Q4_K = 12
KEPT = "matrices kept in GGUF blocks: 15 Q4_K ("
EXACT = "matrices kept in GGUF blocks, multiplied with float32: 15 Q4_K ("
DEQUANTISED = "GGUF blocks are dequantised to "


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf(tmp_path_factory.mktemp("gguf"), {}, other=Q4_K)


def build(model: Path, **options: Any) -> EngineCore:
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 32, "max_num_seqs": 2, "kv_cache_memory_bytes": 2**20}
    return build_engine(EngineArgs(model=str(model), skip_tokenizer_init=True, **settings | options), progress=False)


@needs_native
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, KEPT),
        ({"dtype": "float32"}, EXACT),
        ({"dtype": "bfloat16"}, DEQUANTISED),
        ({"quantization": "none"}, DEQUANTISED),
        ({"quantization": "none", "dtype": "float32"}, DEQUANTISED),
        ({"quantization": "gguf"}, KEPT),
        ({"quantization": "gguf", "dtype": "float32"}, KEPT),
        ({"quantization": "gguf", "dtype": "bfloat16"}, KEPT),
    ],
    ids=str,
)
def test_when_blocks_are_kept(file: Path, options: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headway"):
        build(file, **options)
    assert said in caplog.text


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"device": "sim:0"}], ids=str)
def test_gguf_insists(file: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"quantization='gguf' is not possible: .*; use quantization='auto'"):
        build(file, quantization="gguf", **options)


def test_gguf_insists_on_a_gguf_file(tmp_path: Path) -> None:
    folder = save(hf_model(TINY["llama"]), tmp_path)
    with pytest.raises(ConfigError, match="is not a GGUF file with weights in blocks"):
        build(folder, quantization="gguf")


def test_without_kernels_blocks_are_dequantised(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headway.engine.gguf_blocks.native_kernels", lambda: False)
    with caplog.at_level(logging.INFO, "headway"):
        build(file)
    assert "the native CPU kernels are off or cannot be built here" in caplog.text
    with pytest.raises(ConfigError, match="native CPU kernels"):
        build(file, quantization="gguf")


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="quantization must be one of auto, gguf, none; got 'awq'"):
        EngineArgs(quantization="awq")
