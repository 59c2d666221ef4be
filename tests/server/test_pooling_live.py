"""The built-in embedder behind a real server and the examples of docs/pooling.md, as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient, close_session

from tests.engine.fake_core import ROOT
from tests.server.live import Live

TEXT = (Path(ROOT) / "docs" / "pooling.md").read_text(encoding="utf-8")
COMMANDS = [
    command
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for command in re.split(r"\n(?=curl)", block.replace("\\\n", " ").strip())
    if command.startswith("curl")
]


@pytest.fixture(scope="module")
def minilm() -> Iterator[Live]:
    with Live(["-m", "headway", "serve", "minilm", "--port", "0", "--dtype", "float32", "--device", "cpu"]) as server:
        yield server.wait_ready()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", COMMANDS)
def test_curl(command: str, minilm: Live) -> None:
    words = shlex.split(command.replace("http://127.0.0.1:8000", minilm.url))
    done = subprocess.run([*words, "--fail-with-body"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    if "rerank" in command:
        assert answer["results"][0]["index"] == 1


def test_hugging_faces_client_gets_vectors(minilm: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """It posts to the address as it is given."""
    # Or it would refuse to ask even this machine.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http._GLOBAL_CLIENT", None)
    found = InferenceClient(minilm.url).feature_extraction(
        "A cat sits outside. " * 200, normalize=True, truncate=True, truncation_direction="right"
    )
    assert found.shape == (1, 384) and np.linalg.norm(found) == pytest.approx(1)
    near, far = InferenceClient(minilm.url + "/similarity").sentence_similarity("A cat", ["A feline", "Stocks fell"])
    assert near > far
    close_session()


@pytest.fixture
def client(minilm: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=minilm.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_openais_client_gets_vectors(client: openai.OpenAI) -> None:
    """It asks for base64 unless told otherwise, and decodes it."""
    texts = ["A cat sits outside.", "A feline rests in the garden.", "Stocks fell on Monday."]
    packed = client.embeddings.create(model="minilm", input=texts)
    plain = client.embeddings.create(model="minilm", input=texts, encoding_format="float")
    found = np.array([each.embedding for each in packed.data])
    assert found.shape == (3, 384) and np.linalg.norm(found, axis=1) == pytest.approx(1)
    assert np.array([each.embedding for each in plain.data]) == pytest.approx(found, abs=1e-6)
    assert found[0] @ found[1] > 0.4 > 0.2 > found[0] @ found[2]
    cut = client.embeddings.create(model="minilm", input="A cat", dimensions=64)
    assert np.linalg.norm(cut.data[0].embedding) == pytest.approx(1) and len(cut.data[0].embedding) == 64
    with pytest.raises(openai.BadRequestError, match="at most 384"):
        client.embeddings.create(model="minilm", input="A cat", dimensions=385)
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        client.embeddings.create(model="minilm", input="cat " * 600)
    with pytest.raises(openai.BadRequestError, match="generates nothing"):
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hello"}])


def test_the_search_of_the_page(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert done.returncode == 0 and "train to Oslo" in done.stdout.splitlines()[0], done.stdout + done.stderr
