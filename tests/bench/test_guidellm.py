"""A public load generator against our server: what it sends is answered, and it counts what was asked for.

``make loadgen`` makes its environment and runs this; HEADWAY_GUIDELLM names its executable.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.api.tokenizer import load_tokenizer
from headway.cli.bench.anchors import server
from headway.cli.bench.anchors.context import TINY, Bench
from headway.cli.bench.anchors.table import Table
from headway.cli.bench.anchors.vocabulary import make_tokenizer
from tests.engine.fake_core import ROOT
from tests.engine.tiny_llama import CONFIG

GUIDELLM = os.environ.get("HEADWAY_GUIDELLM", "")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NUM_REQUESTS, NUM_INPUT, NUM_OUTPUT = 30, 24, 16


def tiny(folder: Path) -> tuple[Path, str, Path, dict[str, Any]]:
    """Random weights: model, tokenizer for the server, the same for GuideLLM, engine arguments."""
    tokenizer, model = folder / "tokenizer", folder / "model"
    make_tokenizer(tokenizer, 300)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    return model, str(tokenizer), tokenizer, {"load_format": "dummy", "kv_cache_memory_bytes": 2**24}


def smollm2(folder: Path) -> tuple[Path, str, Path, dict[str, Any]]:
    """The built-in model, whose tokenizer GuideLLM cannot read from its GGUF file."""
    folder.joinpath("tokenizer").mkdir()
    load_tokenizer("smollm2").backend.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    return Path("smollm2"), "smollm2", folder / "tokenizer", {"max_model_len": 256}


@pytest.mark.soak
@pytest.mark.skipif(not GUIDELLM, reason="HEADWAY_GUIDELLM names no executable; make loadgen sets it")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("profile", ["kind=concurrent,streams=8", "kind=constant,rate=20"])
@pytest.mark.parametrize("served", [tiny, smollm2])
def test_guidellm(
    served: Callable[[Path], tuple[Path, str, Path, dict[str, Any]]],
    path: str,
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, own, tokenizer, more = served(tmp_path)
    figures = tmp_path / "figures.json"
    engine = {"device": "cpu", "max_num_seqs": 8, **more}
    monkeypatch.setenv("PYTHONPATH", ROOT)
    bench = Bench(Table("tiny"), TINY, model, own, tmp_path, 1, engine, True)
    with server.running(bench) as (port, _, _):
        subprocess.run(
            [
                GUIDELLM, "run", "--disable-console", "--backend",
                f"kind=openai_http,target=http://127.0.0.1:{port},request_format={path}", "--profile", profile,
                "--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--tokenizer",
                f"kind=hf_auto,model={tokenizer}", "--data",
                f"kind=synthetic_text,prompt_tokens={NUM_INPUT},output_tokens={NUM_OUTPUT}", "--output",
                f"kind=json,path={figures}",
            ],
            check=True, timeout=300, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    [found] = json.loads(figures.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    tokens = found["metrics"]["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (NUM_OUTPUT, NUM_OUTPUT)
