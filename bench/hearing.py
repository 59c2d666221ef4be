"""Whisper-large-v3-turbo with random weights on a card: audio seconds a second, time to the first token, pace beside arrivals.

    python -m bench.hearing [--windows 256] [--tokens 64] [--folder DIR]

Weights are dummies of the public shapes, so each window writes exactly ``--tokens`` tokens. Prints a line of JSON.
``--transformers 16`` measures transformers on the same windows afterwards, in batches of 16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import media_peer
from headway.cli.bench.anchors.context import free_memory
from headway.core.config import EngineArgs
from headway.core.encode import EncoderItem
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore

MELS, FRAMES, OUTPUTS, SECONDS = 128, 3000, 1500, 30
TURBO = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "is_encoder_decoder": True,
    "vocab_size": 51866, "num_mel_bins": MELS, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_layers": 4, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
    "max_source_positions": OUTPUTS, "max_target_positions": 448, "activation_function": "gelu",
    "scale_embedding": False, "eos_token_id": 50257, "decoder_start_token_id": 50258, "dtype": "float16",
}  # fmt: skip
PROMPT = [50258, 50259, 50360, 50364]


def spectrogram(seed: int) -> npt.NDArray[np.float32]:
    """[mels, frames] of noise."""
    return np.random.default_rng(seed).standard_normal((MELS, FRAMES), np.float32)


def window(seed: int) -> EncoderItem:
    """A spectrogram of noise."""
    data = spectrogram(seed)
    return EncoderItem(kind="audio", key=b"%16d" % seed, rows=OUTPUTS, sizes=(MELS, FRAMES), data=data.tobytes())


def request(name: str, item: EncoderItem, tokens: int) -> AddRequest:
    """A transcript of exactly so many tokens."""
    return AddRequest(
        request_id=name,
        prompt_token_ids=PROMPT,
        params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
        seed=0,
        eos_token_ids=[],
        media=[item],
    )


def drained(core: EngineCore) -> list[tuple[float, list[str]]]:
    """Step until idle: when each step's updates came, and whose they are."""
    found = []
    while core.has_work():
        updates = core.step()
        if updates:
            found.append((time.perf_counter(), list(updates.request_ids)))
    return found


def throughput(core: EngineCore, items: list[EncoderItem], tokens: int) -> dict[str, float]:
    """All windows at once."""
    start = time.perf_counter()
    for i, item in enumerate(items):
        core.add(request(f"t{i}", item, tokens))
    drained(core)
    seconds = time.perf_counter() - start
    return {
        "audio_seconds_per_second": len(items) * SECONDS / seconds,
        "tokens_per_second": len(items) * tokens / seconds,
    }


def first_token(core: EngineCore, items: list[EncoderItem]) -> dict[str, float]:
    """One window at a time."""
    times = []
    for i, item in enumerate(items):
        start = time.perf_counter()
        core.add(request(f"f{i}", item, 1))
        drained(core)
        times.append((time.perf_counter() - start) * 1e3)
    return {"first_token_ms_p50": float(np.median(times)), "first_token_ms_p99": float(np.quantile(times, 0.99))}


def pace(core: EngineCore, items: list[EncoderItem], rows: int) -> dict[str, float]:
    """Gaps between the tokens of ``rows`` transcripts, alone and beside arriving windows."""
    told: dict[str, float] = {}
    for name, arrivals in (("alone", 0), ("beside_arrivals", 24)):
        for i in range(rows):
            core.add(request(f"{name}{i}", items[i], 300))
        came: list[float] = []
        sent = 0
        while core.has_work():
            updates = core.step()
            if f"{name}0" in updates.request_ids:
                came.append(time.perf_counter())
                if len(came) > 40 and len(came) % 8 == 0 and sent < arrivals:
                    core.add(request(f"{name}-late{sent}", items[rows + sent], 8))
                    sent += 1
        gaps = np.diff(came[30:]) * 1e3
        told |= {f"gap_ms_p50_{name}": float(np.median(gaps)), f"gap_ms_p99_{name}": float(np.quantile(gaps, 0.99))}
    return told


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--folder", default=None, help="a checkpoint in place of dummy weights")
    parser.add_argument("--transformers", type=int, default=0, metavar="BATCH", help="measure it, too, in such batches")
    asked = parser.parse_args()
    if asked.transformers and asked.folder:
        parser.error("--transformers measures dummy weights; leave --folder out")
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(TURBO))
        args = EngineArgs(
            model=asked.folder or made, load_format="auto" if asked.folder else "dummy", dtype="bfloat16",
            skip_tokenizer_init=True, count_host_waits=True, enable_prefix_caching=False,
        )  # fmt: skip
        core = build_engine(args, progress=False)
    items = [window(i) for i in range(max(asked.windows, asked.rows + 24))]
    throughput(core, items[:8], 8)  # what only the first steps do
    found: dict[str, Any] = throughput(core, items[: asked.windows], asked.tokens)
    found |= first_token(core, items[:40]) | pace(core, items, asked.rows)
    stats = core.stats()
    found |= {"host_waits": stats.host_waits, "graph_steps": stats.num_graph_steps, "steps": stats.num_steps}
    core.shutdown()
    if asked.transformers:
        del core
        free_memory()
        peer = media_peer.hearing(TURBO, spectrogram, PROMPT, asked.windows, asked.transformers, asked.tokens)
        rate = peer["requests_per_second"]
        found["transformers"] = peer | {
            "audio_seconds_per_second": rate * SECONDS,
            "tokens_per_second": rate * asked.tokens,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
