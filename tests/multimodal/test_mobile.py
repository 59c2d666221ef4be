"""Gemma 3n's sight: MobileNet-v5 against timm, where timm is, and through the engine and its doors in any case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway import LLM
from headway.core.config import Thresholds
from headway.core.errors import InvalidRequestError, UnsupportedModelError
from headway.engine.boot import build_engine
from headway.models.interface import EncoderInput
from headway.models.registry import model_class, read_config
from headway.models.vision.mobile import CHANNELS, MobileSpec, MobileTower
from headway.multimodal.items import make_item
from tests.engine.harness import run
from tests.multimodal.test_doors import GREEDY, noise, options, png
from tests.multimodal.test_engine import info_of
from tests.multimodal.test_gemma3n import sound
from tests.multimodal.tiny_configs import CONFIGS
from tests.multimodal.tiny_sight import (
    AUDIO,
    SCALE,
    SHIFT,
    TOKEN,
    VIDEO,
    VOCAB,
    arguments,
    hf_greedy,
    hf_inputs,
    hf_logits,
    picture,
    plain,
    request,
    set_sight,
    sighted,
)
from tests.multimodal.tiny_texts import save_texts

NAME, CPU = "gemma3n sees", torch.device("cpu")
ROOM: dict[str, Any] = {"max_model_len": 640, "kv_cache_memory_bytes": 2**22}


def test_the_whole_encoder_is_timms() -> None:
    """Its tensors, by number and size, and some of their names."""
    tower = MobileTower(MobileSpec.scaled(1.0), dtype=torch.float32, device=torch.device("meta"))
    found = {name.removeprefix("vision_tower.timm_model."): each.shape for name, each in tower.destinations().items()}
    assert len(found) == 548 and sum(torch.Size(shape).numel() for shape in found.values()) == 294_126_912
    for name, shape in {
        "conv_stem.conv.bias": (64,),
        "blocks.0.2.conv_exp.weight": (512, 128, 3, 3),
        "blocks.1.0.dw_mid.conv.weight": (768, 1, 5, 5),
        "blocks.2.9.attn.key.down_conv.weight": (640, 1, 3, 3),
        "blocks.3.37.attn.query.proj.weight": (1536, 1280, 1, 1),
        "blocks.3.38.layer_scale.gamma": (1280,),
        "msfa.ffn.pw_exp.conv.weight": (3840, 1920, 1, 1),
    }.items():
        assert found[name] == shape
    assert tower.shapes[-1] == (CHANNELS, 16) and len(tower.costs) == len(tower.shapes) - 1 == 86


def drawn(tower: MobileTower) -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(3), {}
    for name, target in tower.destinations().items():
        values = torch.randn(target.shape, generator=generator) * 0.2
        is_norm = len(target.shape) == 1 and not name.endswith(("gamma", "bias"))
        found[name] = values + is_norm
        target.tensor.copy_(found[name])
    return found


@pytest.mark.parametrize("side", [256, 512])
@torch.no_grad()
def test_rows_are_those_of_timm(side: int) -> None:
    """Maps of the last stages are pooled, or as large as what comes out."""
    timm = pytest.importorskip("timm", reason="timm is not installed: the encoder is its")
    tower = MobileTower(MobileSpec.scaled(0.125, side), dtype=torch.float32, device=CPU)
    weights = drawn(tower)
    model = timm.create_model("mobilenetv5_300m_enc", pretrained=False, num_classes=0, channel_multiplier=0.125).eval()
    model.load_state_dict({name.removeprefix(tower.spec.prefix): each for name, each in weights.items()})
    pixels = torch.randn(3, side, side, generator=torch.Generator().manual_seed(side))
    buffers = tower.pass_buffers(CPU)
    tower.open(buffers, pixels)
    for number in range(len(tower.costs)):
        tower.run_block(number, buffers)
    expected = model(pixels[None])[0].flatten(1).T * CHANNELS**0.5
    torch.testing.assert_close(tower.close(buffers), expected, atol=2e-3, rtol=1e-4)


@torch.no_grad()
def test_a_pass_hands_on_its_maps() -> None:
    """Each step reads what the one before gave; the fusion reads the last map of the third stage, too."""
    tower = MobileTower(MobileSpec.scaled(0.125, 256), dtype=torch.float32, device=CPU)
    drawn(tower)
    pixels = torch.randn(3, 256, 256, generator=torch.Generator().manual_seed(1))
    x, kept = tower.stem(pixels), pixels
    for name, block in tower.blocks:
        kept = x if name == "blocks.3.0." else kept
        x = block(x)
    expected = tower.fusion(kept, x).flatten(1).T * CHANNELS**0.5
    buffers = tower.pass_buffers(CPU)
    for _ in range(2):  # the second finds what the first has left
        tower.open(buffers, pixels)
        for number in range(len(tower.costs)):
            tower.run_block(number, buffers)
        torch.testing.assert_close(tower.close(buffers), expected)


def test_squares_become_the_picture() -> None:
    """Of three colours with scales of their own; rows and columns are not exchanged."""
    config = read_config({"architectures": ["Gemma3nForConditionalGeneration"], **CONFIGS[NAME][1]})
    model: Any = model_class(config.architecture)(config, dtype=torch.float32, device=CPU, max_model_len=64)
    shown = picture(NAME, 1)
    item = make_item(model.spec.vision, shown, SCALE, SHIFT)
    data = torch.frombuffer(bytearray(item.data), dtype=torch.int32)
    assert item.rows == 256 and len(data) <= model.spec.encoder.words
    buffers = model.pass_buffers()
    model.open_pass(EncoderInput(item.rows, item.sizes, data, data), buffers, model.exact_shape(item.sizes))
    expected = torch.from_numpy(shown[0] * SCALE + SHIFT).permute(2, 0, 1)
    torch.testing.assert_close(buffers.x[: 3 * 256**2].view(3, 256, 256), expected)


def prompts() -> list[list[Any]]:
    one, other = picture(NAME, 1), picture(NAME, 2)
    return [[5, one, 102, 7, 8], [3, sound(1), 107, one, 9, 4], [11, 12, 13, 14, 15, 16], [30, other, 31, one, 32]]


@pytest.mark.soak
def test_answers_are_those_of_transformers() -> None:
    """Every logit, and tokens at several depths beside rows that decode, where the tower runs step by step."""
    pytest.importorskip("timm", reason="timm is not installed: the encoder is its")
    one = sighted(NAME)
    core = build_engine(arguments(one.folder, **ROOM), progress=False)
    info = info_of(core)
    for number, parts in enumerate(prompts()):
        asked = request(info, f"r{number}", parts, max_tokens=2, logprobs=VOCAB - 1, prompt_logprobs=VOCAB - 1)
        answer = run(core, [asked])[f"r{number}"]
        assert answer.error is None
        ids, given = hf_inputs(one, info, parts)
        expected = hf_logits(one, ids + answer.token_ids[:-1], len(ids), given).log_softmax(-1)
        for (tokens, values, _), row in zip([*answer.prompt_logprobs, *answer.logprobs], expected, strict=True):
            np.testing.assert_allclose(values, row[torch.tensor(tokens)], atol=1e-3)
    core.shutdown()
    for depth in (0, 1, 2, 4):
        core = build_engine(
            arguments(one.folder, run_ahead=depth, max_num_seqs=2, encoder_step_ratio=1e-9, **ROOM),
            progress=False,
            thresholds=Thresholds(encoder_cache_rows=300),
        )
        answers = run(core, [request(info, f"{i}", parts, max_tokens=3 + i) for i, parts in enumerate(prompts())])
        for i, parts in enumerate(prompts()):
            assert answers[f"{i}"].token_ids == hf_greedy(one, info, parts, 3 + i), (depth, i)
        core.check_integrity()
        core.shutdown()


def folder() -> str:
    """A checkpoint with random weights, which needs no timm, with texts."""
    found = Path(plain(NAME))
    save_texts(NAME, found, TOKEN, VIDEO)
    return str(found)


def test_stages_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="pictures among them, which later stages do not have"):
        LLM(folder(), **options(**ROOM), pipeline_parallel_size=2)


def test_pictures_through_llm() -> None:
    """A picture, its file and ids give the same prompt and answer, in long steps and short ones; another picture gives another
    prefix; a video is not served."""
    prompt: Any = {"prompt": "a <|image|>?", "multi_modal_data": {"image": noise(1)}}
    file: Any = {"prompt": "a <|image|>?", "multi_modal_data": {"image": png(noise(1))}}
    with LLM(folder(), **options(**ROOM, max_num_batched_tokens=64, encoder_step_ratio=1e-9)) as llm:
        [first] = llm.generate(prompt, GREEDY)
        ids, line = first.prompt_token_ids, 98
        assert ids[2:-1] == [line, line, 101, *[TOKEN] * 256, 102, line, line]
        [second, third] = llm.generate(
            [file, {"prompt_token_ids": ids, "multi_modal_data": prompt["multi_modal_data"]}], GREEDY
        )
        [other] = llm.generate({"prompt": "a <|image|>?", "multi_modal_data": {"image": noise(2)}}, GREEDY)
        assert second.num_cached_tokens > 200 and other.num_cached_tokens < 16
        for each in (second, third):
            assert each.prompt_token_ids == ids and each.outputs[0].token_ids == first.outputs[0].token_ids
        with pytest.raises(InvalidRequestError, match="'video' is not served; 'image' and 'audio' are"):
            llm.generate({"prompt": "x", "multi_modal_data": {"video": np.zeros((2, 24, 24, 3), np.uint8)}}, GREEDY)
    with LLM(folder(), **options(**ROOM, max_num_batched_tokens=400)) as llm:
        [whole] = llm.generate(prompt, GREEDY)
        assert whole.outputs[0].token_ids == first.outputs[0].token_ids
        assert AUDIO not in whole.prompt_token_ids


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"architecture": "resnet50"}, "architecture"),
        ({"model_args": {"depth": 3}}, "model_args"),
        ({"hidden_size": 1024}, "hidden_size"),
        ({"image_size": 300}, "image_size"),
        ({"model_args": {"channel_multiplier": "much"}}, "channel_multiplier"),
    ],
)
def test_other_encoders_are_refused(change: dict[str, Any], name: str) -> None:
    family, values = CONFIGS[NAME]
    sight = {**values["vision_config"], **change}
    with pytest.raises(UnsupportedModelError, match=name):
        read_config({"architectures": [f"{family}ForConditionalGeneration"], **values, "vision_config": sight})


def test_sight_may_be_left_out(tmp_path: Path) -> None:
    """With an architecture of null; its words stay."""
    family, values = CONFIGS[NAME]
    config = {"architectures": [f"{family}ForConditionalGeneration"], **values}
    (tmp_path / "config.json").write_text("{}")
    sight = {**values["vision_config"], "architecture": None}
    read: Any = read_config({**config, "vision_config": sight})
    assert read.sight is None and read.words[0].count == 4
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    set_sight(tmp_path, {"architecture": None})
    assert '"architecture": null' in (tmp_path / "config.json").read_text()
