"""transformers beside the benches of pictures and recordings: the same inputs, exactly so many tokens."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch

from bench import hearing, media_peer, sight
from headway.engine.boot import build_engine
from tests.engine.tiny_encoder_decoders import MELS, OUTPUTS, whisper
from tests.multimodal.hf_patches import in_parts
from tests.multimodal.tiny_sight import arguments, sighted


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5"])
def test_pictures_are_those_that_headway_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = sighted(name)
    core = build_engine(arguments(one.folder), progress=False)
    info = core.info.vision
    core.shutdown()
    assert info is not None
    side = sight.side_of(info, 24)
    rows = sight.pictured(core, 3, 24, 1).media[0].rows
    prompt = sight.prompt_of(info, rows)
    given: list[dict[str, torch.Tensor]] = []
    taken = media_peer.seconds

    def seconds(model: Any, inputs: dict[str, torch.Tensor], tokens: int) -> float:
        given.append(inputs)
        return taken(model, inputs, tokens)

    monkeypatch.setattr(media_peer, "seconds", seconds)
    found = media_peer.sight(one.folder, lambda number: sight.noise(number, side), prompt, 3, 2, 4)
    assert found["requests_per_second"] > 0 and found["first_token_ms"] > 0 and found["batch"] == 2
    assert [len(each["input_ids"]) for each in given[:3]] == [2, 2, 1], (
        "a warm-up, and three requests in batches of two"
    )
    pictures = [
        torch.from_numpy(sight.noise(n, side).astype(np.float32) / 127.5 - 1).permute(2, 0, 1) for n in range(2)
    ]
    expected = torch.stack(pictures)
    if name == "qwen2.5":
        expected, grids = in_parts([each[None].expand(2, -1, -1, -1) for each in pictures], info)
        assert torch.equal(given[1]["image_grid_thw"], grids)
    torch.testing.assert_close(given[1]["pixel_values"], expected)


def test_a_bench_measures_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of bench.sight, on a tiny model with hardly any requests."""
    folder = sighted("gemma3").folder
    given = "--side 56 --requests 3 --decoding 2 --tokens 60 --max-model-len 128 --transformers 2"
    monkeypatch.setattr(sys, "argv", ["sight", folder, *given.split()])
    sight.main()
    found = json.loads(capsys.readouterr().out)
    assert found["requests_per_second"] > 0
    assert set(found["transformers"]) == {"requests_per_second", "first_token_ms", "batch"}


def test_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = whisper().config.to_dict()
    seen: list[tuple[int, ...]] = []

    def spectrogram(seed: int) -> Any:
        drawn = np.random.default_rng(seed).standard_normal((MELS, 2 * OUTPUTS), np.float32)
        seen.append(drawn.shape)
        return drawn

    found = media_peer.hearing(config, spectrogram, [1, 2, 3], 3, 2, 4)
    assert found["requests_per_second"] > 0 and len(seen) == 2 + 3 + media_peer.ALONE
    assert np.array_equal(
        np.frombuffer(hearing.window(5).data, np.float32).reshape(hearing.MELS, -1), hearing.spectrogram(5)
    )
