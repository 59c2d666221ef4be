"""Gemma 3n's hearing against transformers: spectra, towers, the engine and its doors; its sight is in ``test_mobile``."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from transformers import Gemma3nAudioConfig, Gemma3nAudioEncoder, Gemma3nAudioFeatureExtractor

from headway import LLM, AsyncLLM
from headway.core.config import Thresholds
from headway.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from headway.core.media import SoundInfo
from headway.engine.boot import build_engine
from headway.models.audio.spec import AudioSpec
from headway.models.audio.tower import AudioBuffers, AudioTower
from headway.models.fields import Fields
from headway.models.gemma3n_media import read_audio
from headway.models.media_embedder import EmbedderSpec, MediaEmbedder
from headway.models.registry import read_config
from headway.multimodal.audio.layout import SoundLayout
from headway.multimodal.audio.spectra import MelSettings, spectra
from headway.multimodal.sounds import longest_seconds, make_sound
from headway.server.app import build_app
from headway.server.settings import ServerSettings
from tests.engine.harness import run
from tests.multimodal.test_doors import GREEDY, noise, options, png
from tests.multimodal.test_engine import info_of
from tests.multimodal.test_sound_doors import ask, file_of, heard, part, samples
from tests.multimodal.tiny_configs import CONFIGS
from tests.multimodal.tiny_sight import (
    AUDIO,
    MEL_3N,
    SOUND_3N,
    TOKEN,
    VOCAB,
    Sound,
    arguments,
    hf_answer,
    hf_greedy,
    hf_inputs,
    hf_logits,
    request,
    sighted,
)

NAME = "Gemma3nForConditionalGeneration"
WHOLE = MelSettings(
    window=512, lowest=125.0, highest=7600.0, emphasis=0.97, doubled=True, floor=1e-5, clamps=True, multiple=128, centred=False
)  # fmt: skip
ROWS = SOUND_3N.longest


@pytest.mark.parametrize("count", [513, 640, 641, 673, 800, 5000, 16000, 48123, 480_000])
def test_spectra_are_those_of_transformers(count: int) -> None:
    """Silence up to the next 128 samples is heard, as it is there."""
    drawn = np.random.default_rng(count).normal(0, 0.2, count).astype(np.float32)
    found = Gemma3nAudioFeatureExtractor()([drawn], return_tensors="np")
    assert found["input_features_mask"].all()
    own = spectra(drawn, WHOLE)
    assert len(own) == len(found["input_features"][0]) == WHOLE.frames(count)
    np.testing.assert_allclose(own, found["input_features"][0], atol=5e-4)  # a logarithm of little


@pytest.mark.parametrize("frames", [1, 2, 187, 2997])
def test_the_longest_recording_is_one_of_so_many_spectra(frames: int) -> None:
    most = WHOLE.most_samples(frames)
    assert WHOLE.frames(most) == frames and WHOLE.frames(most + 1) == frames + 1


def audio(**change: Any) -> dict[str, Any]:
    return {**CONFIGS["gemma3n"][1]["audio_config"], **change}


def loaded(spec: AudioSpec, model: torch.nn.Module) -> AudioTower:
    """A tower with the weights of transformers' model, without what embeds its rows."""
    embedder = MediaEmbedder(
        EmbedderSpec(prefix="x.", first=0, count=1, inner=spec.hidden_size, width=32, eps=1e-6),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tower = AudioTower(spec, embedder, dtype=torch.float32, device=torch.device("cpu"))
    given = {f"audio_tower.{name}": tensor for name, tensor in model.state_dict().items()}
    assert set(given) == set(tower.destinations())
    with torch.no_grad():
        for name, target in tower.destinations().items():
            target.tensor.copy_(given[name])
        tower.finalize()
    return tower


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"hidden_size": 36, "conf_num_attention_heads": 3, "conf_residual_weight": 0.3, "conf_reduction_factor": 1},
        {"conf_attention_context_right": 3, "gradient_clipping": 0.7, "conf_reduction_factor": 3},
        {"conf_attention_chunk_size": 3, "conf_attention_context_left": 8, "conf_conv_kernel_size": 1},
        {"conf_attention_context_left": 2, "rms_norm_eps": 0.1, "sscp_conv_group_norm_eps": 0.3, "conf_num_hidden_layers": 3},
        {"conf_attention_logit_cap": 0.8, "conf_attention_context_left": 1},
    ],
)  # fmt: skip
def test_towers_are_those_of_transformers(change: dict[str, Any]) -> None:
    """Of several shapes; of recordings of any length, padded to a captured size or not."""
    torch.manual_seed(7)
    model = Gemma3nAudioEncoder(Gemma3nAudioConfig(**audio(**change))).eval()
    for name, tensor in model.named_parameters():
        tensor.data = torch.randn_like(tensor) * 0.2 + (1.0 if "norm" in name and tensor.dim() == 1 else 0.0)
    spec = read_audio(Fields({"audio_config": audio(**change)}), 32)
    tower = loaded(spec, model)
    buffers = AudioBuffers.make(spec, 64, dtype=torch.float32, device=torch.device("cpu"))
    for frames in (1, 2, 5, 16, 63, 130):
        mel = torch.randn(frames, 18, generator=torch.Generator().manual_seed(frames))
        units = SoundLayout(frames, 18).units
        with torch.no_grad():
            expected = model(mel[None], torch.zeros(1, frames, dtype=torch.bool)).last_hidden_state[0]
            for size in (units, 64):
                tower.open(buffers, size, mel)
                for number in range(spec.num_layers):
                    tower.run_block(number, buffers, size)
                torch.testing.assert_close(buffers.x[: units : spec.reduces], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"conf_num_attention_heads": 7}, "conf_num_attention_heads"),
        ({"sscp_conv_channel_size": [16]}, "sscp_conv_channel_size"),
        ({"sscp_conv_kernel_size": [[3, 3], [5, 3]]}, "sscp_conv_kernel_size"),
        ({"sscp_conv_stride_size": [[2, 2], [1, 2]]}, "sscp_conv_stride_size"),
        ({"vocab_offset": 200}, "audio_config"),
    ],
)
def test_other_towers_are_refused(change: dict[str, Any], name: str) -> None:
    family, values = CONFIGS["gemma3n"]
    config = {"architectures": [f"{family}ForConditionalGeneration"], **values, "audio_config": audio(**change)}
    with pytest.raises(UnsupportedModelError, match=name):
        read_config(config)


def sound(seed: int, count: int = 5000) -> Sound:
    return Sound(np.random.default_rng(seed).normal(0, 0.3, count).astype(np.float32))


def prompts() -> list[list[Any]]:
    """A recording first, last, two side by side, twice the same; words of both media's vocabularies between; and text alone.
    Those of one prompt are equally long: transformers hears the silence that it pads shorter ones with."""
    one, other, long, full = sound(1), sound(2), sound(3, 20_000), sound(4, 30_500)
    return [
        [one, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        [5, one, 107, 7, 8, other],
        [5, 101, long, 102, 7, 8, 106, 4],
        [11, 12, 13, 14, 105, 16, 17, 18, 119, 20, 21, 22],
        [30, full, 31, 32],
    ]


def test_every_logit_is_that_of_transformers() -> None:
    one = sighted("gemma3n")
    core = build_engine(arguments(one.folder), progress=False)
    info = info_of(core)
    assert core.info.sound == SOUND_3N and not info.longest
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
    """More requests than slots, steps of few tokens that cut recordings, prefixes that hit; beside rows that decode a step does
    one block of the tower, or all."""
    one = sighted("gemma3n")
    core = build_engine(
        arguments(one.folder, run_ahead=depth, max_num_seqs=3, encoder_step_ratio=ratio, max_num_batched_tokens=10),
        progress=False,
        thresholds=Thresholds(encoder_cache_rows=24),
    )
    info = info_of(core)
    batch = [request(info, f"{i}", prompts()[(i + 2) % 5], max_tokens=6 + i) for i in range(8)]
    answers = run(core, batch)
    for i, each in enumerate(batch):
        assert answers[each.request_id].token_ids == hf_greedy(one, info, prompts()[(i + 2) % 5], 6 + i), i
    core.check_integrity()
    core.shutdown()


def test_preempted_recordings_are_heard_again() -> None:
    one = sighted("gemma3n")
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
        thresholds=Thresholds(encoder_cache_rows=24),
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
    one = sighted("gemma3n")
    core = build_engine(arguments(one.folder), progress=False)
    info, tail = info_of(core), list(range(5, 25))
    first, second = [3, sound(1), *tail], [3, sound(2), *tail]
    for number, (parts, salt, hit) in enumerate(
        [(first, None, False), (second, None, False), (first, None, True), (second, "salt", False)]
    ):
        asked = request(info, f"{number}", parts, salt=salt)
        answer = run(core, [asked])[f"{number}"]
        assert answer.token_ids == hf_greedy(one, info, parts, 8), number
        assert (answer.num_cached_tokens >= 16) == hit, number
    core.shutdown()


def test_each_recording_takes_the_rows_of_the_longest() -> None:
    """However short: the rest is padding. One of more spectra than these rows have is refused."""
    most = MEL_3N.most_samples(SOUND_3N.most_units * 4)
    for count, units in ((513, 1), (5000, 8), (most, 48)):
        item = make_sound(SOUND_3N, MEL_3N, np.zeros(count, np.float32))
        assert (item.rows, item.units) == (ROWS, units)
    with pytest.raises(InvalidRequestError, match=r"at most 2\.0 s"):
        make_sound(SOUND_3N, MEL_3N, np.zeros(most + 1, np.float32))
    with pytest.raises(InvalidRequestError, match="384 samples"):
        make_sound(SOUND_3N, MEL_3N, np.zeros(384, np.float32))
    public = SoundInfo(token=5, mel_bins=128, reach=13, longest=188, units=750, reduces=4, pads=True)
    assert 30.0 <= longest_seconds(public, WHOLE) < 30.1


# -- doors ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(sighted("gemma3n").folder, **options(max_model_len=250)) as found:
        yield found


def expected(llm: LLM, ids: list[int], sounds: list[Any]) -> list[int]:
    info = llm.model_info.vision
    assert info is not None
    _, given = hf_inputs(sighted("gemma3n"), info, [heard(each) for each in sounds])
    return hf_answer(sighted("gemma3n"), ids, len(ids), [], given, 6)


def test_text_and_talk_with_recordings(llm: LLM) -> None:
    """Samples, files and ids give the same prompt and answer; a recording has blank lines around it, as in transformers."""
    one, two = samples(1, 5000), samples(2, 5000)
    text = "a <|audio|> b <|audio|>?"
    prompt: Any = {"prompt": text, "multi_modal_data": {"audio": [(one, 16000), (two, 16000)]}}
    files: Any = {"prompt": text, "multi_modal_data": {"audio": [file_of(one), file_of(two)]}}
    first, second = llm.generate([prompt, files], GREEDY)
    ids, line = first.prompt_token_ids, 98
    assert ids[2 : 8 + ROWS] == [line, line, 106, *[AUDIO] * ROWS, 107, line, line]
    [third] = llm.generate({"prompt_token_ids": ids, "multi_modal_data": prompt["multi_modal_data"]}, GREEDY)
    assert second.prompt_token_ids == third.prompt_token_ids == ids
    assert [each.outputs[0].token_ids for each in (first, second, third)] == [expected(llm, ids, [one, two])] * 3
    data = base64.b64encode(file_of(two)).decode()
    content: Any = [
        {"type": "audio", "audio": (one, 16000)},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "<|audio|>?"},
    ]
    [talk] = llm.chat([{"role": "user", "content": content}], GREEDY)
    assert talk.prompt_token_ids.count(AUDIO) == 2 * ROWS
    assert talk.outputs[0].token_ids == expected(llm, talk.prompt_token_ids, [one, two])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "<|image|>", "multi_modal_data": {"image": noise(1)}}, "'image' is not served; 'audio' is"),
        ({"prompt": "<|image|>"}, "1 placeholders"),
        (
            {"prompt": "<|image|><|audio|>", "multi_modal_data": {"audio": (np.zeros(900), 16000)}},
            "1 image placeholders",
        ),
        ({"prompt_token_ids": [5, TOKEN, 6]}, "1 placeholders"),
        ({"prompt": "none", "multi_modal_data": {"audio": (np.zeros(900), 16000)}}, "0 recording placeholders"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": (np.zeros(384), 16000)}}, "384 samples"),
        ({"prompt": "<|audio|>", "multi_modal_data": {"audio": (np.zeros(40_000), 16000)}}, "at most 2 s"),
        ({"prompt_token_ids": [5, AUDIO, AUDIO], "multi_modal_data": {"audio": (np.zeros(900), 16000)}}, "2 recording"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, GREEDY)


def test_over_http() -> None:
    """A recording is answered in chat and responses, a picture refused; the page is told of recordings alone."""
    llm = AsyncLLM(sighted("gemma3n").folder, multiprocess=False, **options(max_model_len=250))
    with TestClient(build_app(llm, ServerSettings(allowed_hosts=["*"]))) as client:
        one = part(file_of(samples(1, 5000)))
        answer = ask(client, one)
        assert answer.status_code == 200, answer.text
        body = {"input": [{"role": "user", "content": [one, {"type": "input_text", "text": "what?"}]}]}
        newer = client.post("/v1/responses", json={**body, "temperature": 0, "max_output_tokens": 5})
        assert newer.status_code == 200, newer.text
        assert newer.json()["output"][0]["content"][0]["text"] == answer.json()["choices"][0]["message"]["content"]
        url = "data:image/png;base64," + base64.b64encode(png(noise(1))).decode()
        refused = ask(client, {"type": "image_url", "image_url": {"url": url}})
        assert refused.status_code == 400 and "sees no images" in refused.json()["error"]["message"]
        media = client.get("/live/figures").json()["media"]
        assert (media["pictures"], media["recordings"]) == (0, 8) and 1.9 < media["seconds"] < 2.1


def test_processor_files_are_read(tmp_path: Any) -> None:
    import json

    from headway.api.pictures.sound_settings import read_sound_settings

    info = SoundInfo(token=5, mel_bins=128, reach=13, longest=188, units=750, reduces=4, pads=True)
    assert read_sound_settings(None, info, NAME) == (WHOLE, info)
    Gemma3nAudioFeatureExtractor(preemphasis=0.5).save_pretrained(tmp_path)
    assert read_sound_settings(tmp_path, info, NAME)[0].emphasis == 0.5
    (tmp_path / "processor_config.json").write_text(json.dumps({"audio_seq_length": 100}))
    with pytest.raises(ConfigError, match="audio_seq_length"):
        read_sound_settings(tmp_path, info, NAME)
