"""Recordings in prompts against transformers: spectra, towers, and the whole engine, as ``test_engine`` has pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma4AudioConfig, Gemma4AudioFeatureExtractor, Gemma4AudioModel

from headway.core.config import Thresholds
from headway.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from headway.core.media import SoundInfo, VisionInfo
from headway.engine.boot import build_engine
from headway.models.audio.spec import AudioSpec
from headway.models.audio.tower import AudioBuffers, AudioTower, captured_rows
from headway.models.fields import Fields
from headway.models.gemma4_media import read_audio
from headway.multimodal.audio.layout import SoundLayout
from headway.multimodal.audio.spectra import MelSettings, spectra
from headway.multimodal.items import find_runs
from headway.multimodal.sounds import make_sound
from tests.engine.harness import run
from tests.multimodal.test_engine import info_of
from tests.multimodal.tiny_sight import (
    AUDIO,
    MEL,
    SOUND,
    TOKEN,
    VOCAB,
    arguments,
    hf_greedy,
    hf_inputs,
    hf_logits,
    picture,
    request,
    sighted,
    sound,
)

LENGTHS = [161, 320, 321, 800, 5000, 16000, 48123, 480_000]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, MelSettings()),
        (
            {"feature_size": 40, "frame_length_ms": 32, "min_frequency": 125, "max_frequency": 7600, "fft_overdrive": True},
            MelSettings(bins=40, window=512, lowest=125, highest=7600, doubled=True),
        ),
        ({"preemphasis": 0.97, "input_scale_factor": 3.0}, MelSettings(emphasis=0.97, scale=3.0)),
        (
            {"preemphasis": 0.9, "preemphasis_htk_flavor": False, "mel_floor": 1e-5, "hop_length_ms": 7},
            MelSettings(emphasis=0.9, keeps_first=False, floor=1e-5, hop=112),
        ),
        (
            {"feature_size": 3, "per_bin_mean": [1.0, 2.0, -3.0], "per_bin_stddev": [0.5, 2.0, 3.0]},
            MelSettings(bins=3, mean=(1.0, 2.0, -3.0), deviation=(0.5, 2.0, 3.0)),
        ),
    ],
)  # fmt: skip
def test_spectra_are_those_of_transformers(theirs: dict[str, Any], ours: MelSettings) -> None:
    """As many as are of the recording and not of what pads it."""
    extractor = Gemma4AudioFeatureExtractor(**theirs)
    for count in LENGTHS:
        samples = np.random.default_rng(count).normal(0, 0.2, count).astype(np.float32)
        found = extractor([samples], return_tensors="np")
        heard = found["input_features_mask"][0].astype(bool)
        own = spectra(samples, ours)
        assert len(own) == heard.sum() == ours.frames(count)
        np.testing.assert_allclose(own, found["input_features"][0][heard], atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"use_clipped_linears": False, "hidden_size": 36, "num_attention_heads": 3, "residual_weight": 0.3},
        {"attention_context_right": 3, "hidden_act": "gelu", "gradient_clipping": 0.7},
        {"attention_chunk_size": 3, "attention_context_left": 8, "conv_kernel_size": 1, "attention_logit_cap": 0.8},
        {"attention_chunk_size": 9, "attention_context_left": 2, "rms_norm_eps": 0.1, "num_hidden_layers": 3},
    ],
)  # fmt: skip
def test_towers_are_those_of_transformers(change: dict[str, Any]) -> None:
    """Of several shapes; of recordings of any length, padded to a captured size or not."""
    values = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [16, 8],
        "attention_chunk_size": 4, "attention_context_left": 5, "output_proj_dims": 20, **change,
    }  # fmt: skip
    torch.manual_seed(7)
    model = Gemma4AudioModel(Gemma4AudioConfig(**values)).eval()
    for name, tensor in model.named_parameters():
        tensor.data = torch.randn_like(tensor) * 0.2 + (1.0 if "norm" in name and tensor.dim() == 1 else 0.0)
    for name, tensor in model.named_buffers():
        if name.endswith(("_min", "_max")):
            tensor.fill_(-1.1 if name.endswith("_min") else 0.9)
    spec = read_audio(Fields({"audio_config": values}), 32)
    assert spec is not None
    tower = loaded(spec, model)
    buffers = AudioBuffers.make(spec, 64, dtype=torch.float32, device=torch.device("cpu"))
    for frames in (1, 2, 5, 16, 63, 130):
        mel = torch.randn(frames, 16, generator=torch.Generator().manual_seed(frames))
        rows = SoundLayout(frames, 16).units
        with torch.no_grad():
            expected = model(mel[None], torch.ones(1, frames, dtype=torch.bool)).last_hidden_state[0]
            for units in (rows, 64):
                tower.open(buffers, units, mel)
                for number in range(spec.num_layers):
                    tower.run_block(number, buffers, units)
                torch.testing.assert_close(tower.out.forward(buffers.x[:rows]), expected, atol=2e-4, rtol=2e-4)


def loaded(spec: AudioSpec, model: torch.nn.Module) -> AudioTower:
    """A tower with the weights of transformers' model; its projector is left as it is."""
    tower = AudioTower(spec, dtype=torch.float32, device=torch.device("cpu"))
    given = {f"audio_tower.{name}": tensor for name, tensor in model.state_dict().items()}
    wanted = {name: target for name, target in tower.destinations().items() if name.startswith("audio_tower.")}
    assert set(given) == set(wanted)
    with torch.no_grad():
        for name, target in wanted.items():
            target.tensor.copy_(given[name])
        tower.finalize()
    return tower


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"attention_context_left": 1}, "attention_context_left"),
        ({"subsampling_conv_channels": [16]}, "subsampling_conv_channels"),
        ({"hidden_act": "mish"}, "hidden_act"),
    ],
)
def test_other_towers_are_refused(change: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        read_audio(Fields({"audio_config": change}), 32)


def test_captured_sizes_hold_every_recording() -> None:
    assert captured_rows(750) == [32, 64, 128, 256, 512, 750] and captured_rows(20) == [20]


def prompts() -> list[list[Any]]:
    """A recording first, last, several, twice the same, with pictures between them and right behind them; pictures and text
    alone."""
    short, long, other, one = sound(1, 9), sound(2, 61), sound(3, 40), picture("gemma4", 1)
    return [
        [short, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        [5, one, long, 7, 8, other, one, 9],
        [5, one, 7, 8, picture("gemma4", 2, larger=True), 4],
        [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
        [30, long, 31, short, 32, long, 33, long],
    ]


def test_every_logit_is_that_of_transformers() -> None:
    one = sighted("gemma4")
    core = build_engine(arguments(one.folder), progress=False)
    info = info_of(core)
    assert core.info.sound == SOUND
    for number, parts in enumerate(prompts()):
        asked = request(info, f"r{number}", parts, max_tokens=4, logprobs=VOCAB - 1, prompt_logprobs=VOCAB - 1)
        answer = run(core, [asked])[f"r{number}"]
        assert answer.error is None
        ids, given = hf_inputs(one, info, parts)
        expected = hf_logits(one, ids + answer.token_ids[:-1], len(ids), given).log_softmax(-1)
        told = [*answer.prompt_logprobs, *answer.logprobs]
        assert len(told) == len(expected)
        for (tokens, values, _), row in zip(told, expected, strict=True):
            np.testing.assert_allclose(values, row[torch.tensor(tokens)], atol=1e-3)
    core.shutdown()


@pytest.mark.parametrize(("depth", "ratio"), [(0, 1e-9), (1, 1e-9), (2, 1e-9), (4, 1e-9), (2, float("inf"))])
def test_tokens_are_those_of_transformers(depth: int, ratio: float) -> None:
    """More requests than slots, steps of few tokens, prefixes that hit; beside rows that decode a step does one block of the
    tower, or all."""
    one = sighted("gemma4")
    core = build_engine(
        arguments(one.folder, run_ahead=depth, max_num_seqs=3, encoder_step_ratio=ratio, max_num_batched_tokens=24),
        progress=False,
        thresholds=Thresholds(encoder_cache_rows=40),
    )
    info = info_of(core)
    batch = [request(info, f"{i}", prompts()[(i + 2) % 5], max_tokens=6 + i) for i in range(8)]
    answers = run(core, batch)
    for i, each in enumerate(batch):
        assert answers[each.request_id].token_ids == hf_greedy(one, info, prompts()[(i + 2) % 5], 6 + i), i
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize("depth", [0, 2])
def test_long_recordings_are_read_in_chunks(depth: int) -> None:
    """Their tokens see none behind them, so that they need not lie in one step, as those of a picture must."""
    one = sighted("gemma4")
    core = build_engine(
        arguments(one.folder, run_ahead=depth, max_num_batched_tokens=24, max_num_seqs=2), progress=False
    )
    info, parts = info_of(core), [5, sound(4, 150), 7, picture("gemma4", 1), 8]
    assert info.longest_whole < 38
    answer = run(core, [request(info, "r", parts, max_tokens=6)])["r"]
    assert answer.error is None and answer.token_ids == hf_greedy(one, info, parts, 6)
    core.shutdown()


def test_preempted_recordings_are_heard_again() -> None:
    """Blocks run out while requests decode; whoever comes back finds its recording, or has it encoded once more."""
    one = sighted("gemma4")
    core = build_engine(
        arguments(
            one.folder,
            run_ahead=4,
            max_model_len=96,
            kv_cache_memory_bytes=18 * 2048,
            enable_prefix_caching=False,
            encoder_step_ratio=1e-9,
        ),
        progress=False,
        thresholds=Thresholds(encoder_cache_rows=20),
    )
    info = info_of(core)
    batch = [request(info, f"{i}", prompts()[i % 4], max_tokens=40) for i in range(5)]
    answers = run(core, batch)
    assert core.stats().num_preemptions
    for i, each in enumerate(batch):
        assert answers[each.request_id].token_ids == hf_greedy(one, info, prompts()[i % 4], 40), i
    core.check_integrity()
    core.shutdown()


def test_another_recording_is_another_prefix() -> None:
    """Equal tokens behind another recording hit nothing of it; behind the same one they do, and with another salt not."""
    one = sighted("gemma4")
    core = build_engine(arguments(one.folder), progress=False)
    info, tail = info_of(core), list(range(5, 25))
    first, second = [3, sound(1, 9), *tail], [3, sound(2, 9), *tail]
    for number, (parts, salt, hit) in enumerate(
        [
            (first, None, False),
            (second, None, False),
            (first, None, True),
            (second, "salt", False),
            (first[:-3], None, True),
        ]
    ):
        asked = request(info, f"{number}", parts, salt=salt)
        answer = run(core, [asked])[f"{number}"]
        assert answer.token_ids == hf_greedy(one, info, parts, 8), number
        assert (answer.num_cached_tokens >= 16) == hit, number
    core.shutdown()


def test_names_follow_content_and_settings() -> None:
    samples = sound(1, 9).samples
    other_end = np.concatenate([samples[:-300], samples[-300:] * 0.5])
    items = [
        make_sound(SOUND, MEL, other_end),
        make_sound(SOUND, MEL, samples), make_sound(SOUND, MEL, samples * 0.5), make_sound(SOUND, MEL, samples[:1400]),
        make_sound(SOUND, MelSettings(bins=16, floor=0.1), samples),
    ]  # fmt: skip
    assert len({item.key for item in items}) == 5
    assert make_sound(SOUND, MEL, samples.copy()) == items[1]


@pytest.mark.parametrize(("frames", "rows"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (640, 160)])
def test_lengths_at_their_edges(frames: int, rows: int) -> None:
    """Rows are a fourth of the spectra, rounded up; a recording may have 160 here, and a sample more is a row too many."""
    count = MEL.hop * (frames + 1)
    assert make_sound(SOUND, MEL, np.zeros(count, np.float32)).rows == rows
    assert make_sound(SOUND, MEL, np.zeros(count - MEL.hop + 1, np.float32)).rows == rows
    if rows == 160:
        with pytest.raises(InvalidRequestError, match=r"at most 6\.4 s"):
            make_sound(SOUND, MEL, np.zeros(count + 1, np.float32))
    if frames == 1:
        with pytest.raises(InvalidRequestError, match="160 samples"):
            make_sound(SOUND, MEL, np.zeros(160, np.float32))


def test_runs_tell_pictures_and_recordings_apart() -> None:
    """Side by side without a token between them, in any order; those of the wrong kind are refused."""
    info = VisionInfo(patch=4, group=3, token=TOKEN, sees="spans", longest=9)
    heard = make_sound(SoundInfo(token=AUDIO, mel_bins=16, reach=4, longest=9), MEL, sound(1, 9).samples)
    seen = request(info, "r", [picture("gemma4", 1)]).media[0]
    both = [seen, heard]
    ids = [TOKEN] * seen.rows + [AUDIO] * heard.rows
    first, second = find_runs(info, ids, both, SOUND)
    assert (first.start, first.end, first.columns) == (0, seen.rows, 1)
    assert (second.start, second.end, second.columns) == (seen.rows, len(ids), 0)
    for wrong in (ids[::-1], [TOKEN] * len(ids), [AUDIO] * len(ids)):
        with pytest.raises(InvalidRequestError, match="mixed up"):
            find_runs(info, wrong, both, SOUND)
    with pytest.raises(InvalidRequestError, match="placeholders of media"):
        find_runs(info, [*ids, 5, AUDIO], both, SOUND)
    with pytest.raises(InvalidRequestError, match="placeholders of media"):
        find_runs(info, ids, both)  # a model that hears nothing has no such placeholder


def test_a_deaf_checkpoint_hears_nothing() -> None:
    """Larger models have no audio tower: their configuration says so, and what older exporters wrote of one is left out."""
    assert read_audio(Fields({"audio_config": None}), 32) is None
    with pytest.raises(UnsupportedModelError, match="audio_config"):
        read_audio(Fields({"audio_config": 3}), 32)


def test_settings_that_are_not_honoured_are_refused(tmp_path: Any) -> None:
    import json

    from headway.api.pictures.sound_settings import read_sound_settings

    def read(**values: Any) -> tuple[MelSettings, SoundInfo]:
        (tmp_path / "processor_config.json").write_text(
            json.dumps({"feature_extractor": values, "audio_seq_length": values.pop("most", 750)})
        )
        return read_sound_settings(tmp_path, SOUND)

    saved = Gemma4AudioFeatureExtractor(feature_size=16, min_frequency=20.0, preemphasis=0.5).to_dict()
    settings, info = read(**{name: value for name, value in saved.items() if name != "mel_floor"})
    assert settings == MelSettings(bins=16, lowest=20.0, emphasis=0.5) and info == SOUND
    assert read(most=30)[1].longest == 30
    for values in (
        {"sampling_rate": 8000}, {"feature_size": 80}, {"dither": 0.1}, {"frame_length": 512}, {"hop_length": 1},
        {"hop_length_ms": 0}, {"per_bin_mean": [1.0]}, {"mel_floor": 0}, {"max_frequency": 9000.0}, {"most": 0},
        {"preemphasis": "much"}, {"min_frequency": 8000.0},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            read(**values)
