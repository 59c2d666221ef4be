"""Tiny decoders with sight of transformers, with random weights, saved as checkpoints; and how transformers runs them."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from headway.core.config import EngineArgs
from headway.core.encode import EncoderItem
from headway.core.media import SoundInfo, VisionInfo
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.models.registry import model_class, read_config
from headway.multimodal.audio.spectra import MelSettings
from headway.multimodal.items import find_runs, make_item
from headway.multimodal.sounds import make_sound
from tests.multimodal import tiny_configs
from tests.multimodal.hf_patches import flat, in_parts
from tests.multimodal.tiny_configs import CONFIGS
from tests.multimodal.tiny_texts import save_texts

TOKEN, VIDEO, AUDIO, VOCAB = tiny_configs.TOKEN, tiny_configs.VIDEO, tiny_configs.AUDIO, tiny_configs.VOCAB
SCALE = np.array([0.0153, 0.0171, 0.0162], np.float32)
SHIFT = np.array([-1.9, -2.0, -1.7], np.float32)
SOUND = SoundInfo(token=AUDIO, mel_bins=16, reach=4, longest=160, units=160)
MEL = MelSettings(bins=16)
SOUND_3N = SoundInfo(token=AUDIO, mel_bins=18, reach=5, longest=12, units=48, reduces=4, pads=True)
MEL_3N = MelSettings(
    bins=18, window=512, lowest=125.0, highest=7600.0, emphasis=0.97, doubled=True, floor=1e-5, clamps=True, multiple=128,
    centred=False,
)  # fmt: skip
FAMILIES = tuple(name for name in CONFIGS if not name.startswith("gemma3n"))
"""Those that see without timm."""


@dataclass(frozen=True)
class Sighted:
    """A model of transformers, and its checkpoint."""

    name: str
    model: Any
    folder: str


@functools.cache
def sighted(name: str) -> Sighted:
    """The tiny model of a family."""
    return changed(name, {})


def changed(name: str, change: dict[str, Any]) -> Sighted:
    """The same with other values: of its parts "vision_config", "text_config", "audio_config", and of itself."""
    import transformers

    family, config = CONFIGS[name]
    config = {
        each: {**config.get(each, {}), **value} if each.endswith("_config") else value
        for each, value in {**{own: {} if own.endswith("_config") else config[own] for own in config}, **change}.items()
    }
    made = getattr(transformers, f"{family}Config")(**config)
    torch.manual_seed(sum(map(ord, name)))
    with contextlib.nullcontext() if name == "gemma3n sees" else without_timm():
        model = getattr(transformers, f"{family}ForConditionalGeneration")(made).eval()
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            if tensor.dim() == 1 and ("norm" in parameter or "ln" in parameter):
                tensor.add_(torch.randn_like(tensor) * 0.1)
            else:
                tensor.normal_(0.0, 0.2)
        if name.startswith(("qwen", "gemma4", "gemma3n")):  # those generated would be without features to transformers
            model.lm_head.weight[[TOKEN, VIDEO, AUDIO]] = 0.0
        for buffer, tensor in model.named_buffers():
            tensor.copy_(_drawn_range(buffer, torch.randn(tensor.shape), tensor))
    folder = Path(tempfile.mkdtemp(prefix=f"sighted-{name.replace(' ', '-')}-"))
    model.save_pretrained(folder)
    if name.startswith("gemma3n"):
        set_sight(folder, {"image_size": 256} if name == "gemma3n sees" else {"architecture": None})
    save_texts(name, folder, TOKEN, VIDEO)
    return Sighted(name, model, str(folder))


def set_sight(folder: Path, change: dict[str, Any]) -> None:
    """Change the ``vision_config`` of a checkpoint."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"] |= change
    file.write_text(json.dumps(config))


@contextlib.contextmanager
def without_timm() -> Iterator[None]:
    """Gemma 3n's tower of pictures is left out: it is timm's, and no test shows it any."""
    from transformers.models.gemma3n import modeling_gemma3n

    real = modeling_gemma3n.AutoModel.from_config

    def made(config: Any) -> Any:
        return torch.nn.Module() if config.model_type == "gemma3n_vision" else real(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma3n.AutoModel, "from_config", made)
        yield


def ears(info: VisionInfo) -> tuple[SoundInfo, MelSettings]:
    """How a tiny model hears: Gemma 4, or Gemma 3n, whose patches are a sixteenth of a picture, or none."""
    return (SOUND_3N, MEL_3N) if info.patch in (1, 16) else (SOUND, MEL)


def _drawn_range(name: str, drawn: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Values of the tensors that are neither weights nor norms: ranges that cut something off, and what standardises."""
    if name.endswith(("_min", "_max")):
        return (1.0 + 0.2 * drawn.tanh()) * (-1 if name.endswith("_min") else 1)
    return 1.0 + 0.2 * drawn if name.endswith(("layer_scalar", "std_scale", "std_bias")) else otherwise


@functools.cache
def plain(name: str) -> str:
    """A checkpoint of the family with other random weights, made without transformers: to test the house against itself."""
    family, values = CONFIGS[name]
    config = {"architectures": [f"{family}ForConditionalGeneration"], "eos_token_id": 2, **values}
    if name == "gemma3n":
        config["vision_config"] = {**config["vision_config"], "architecture": None}
    read = read_config(config)
    model = model_class(read.architecture)(read, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    generator, tensors = torch.Generator().manual_seed(sum(map(ord, name))), {}
    for each, target in model.weights().targets.items():
        drawn = torch.randn(target.shape, generator=generator)
        is_norm = len(target.shape) == 1 and each.endswith("weight")
        tensors[each] = _drawn_range(each, drawn, 1.0 + 0.1 * drawn if is_norm else 0.2 * drawn)
    folder = Path(tempfile.mkdtemp(prefix=f"plain-{name}-"))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def picture(name: str, seed: int, *, larger: bool = False) -> npt.NDArray[np.uint8]:
    """uint8 [tiles, height, width, 3], of a size that the family takes."""
    sizes = {
        "llava": (1, 28, 28), "gemma3": (1, 56, 56), "paligemma": (1, 28, 28), "smolvlm": (2, 56, 56),
        "internvl": (2, 28, 28), "gemma4": (1, 24 + 12 * larger, 48 - 12 * larger),
        "gemma3n sees": (1, 256, 256),
    }  # fmt: skip
    tiles, height, width = sizes.get(name, (1, 24 + 16 * larger, 40 - 8 * larger))
    return np.random.default_rng(seed).integers(0, 256, (tiles, height, width, 3), np.uint8)


@dataclass(frozen=True)
class Film:
    """A video: uint8 [frames, height, width, 3], whose parts are so many positions of time apart."""

    pixels: npt.NDArray[np.uint8]
    apart: float

    def lates(self, info: VisionInfo) -> list[int]:
        """See ``EncoderItem.late``."""
        parts = range(len(self.pixels) // info.frames)
        return [-1 if info.stamps or not k else int(k * self.apart) for k in parts]


def film(name: str, seed: int, parts: int, apart: float = 1.0) -> Film:
    """A video, of which all but Qwen2.5 know no other distance than 1."""
    if name == "gemma4":
        return Film(np.random.default_rng(seed).integers(0, 256, (parts, 12, 24, 3), np.uint8), 1.0)
    pixels = np.random.default_rng(seed).integers(0, 256, (2 * parts, 16, 24, 3), np.uint8)
    return Film(pixels, apart if name == "qwen2.5" else 1.0)


@dataclass(frozen=True)
class Sound:
    """A recording, float32 [n] at 16 kHz."""

    samples: npt.NDArray[np.float32]


def sound(seed: int, frames: int) -> Sound:
    """Noise of so many spectra, and some samples more."""
    generator = np.random.default_rng(seed)
    count = MEL.hop * (frames + 1) - int(generator.integers(0, MEL.hop))
    return Sound(generator.normal(0, 0.3, count).astype(np.float32))


def arguments(folder: str, **others: Any) -> EngineArgs:
    """An engine on a CPU in float32."""
    options: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 96,
        "block_size": 8, "kv_cache_memory_bytes": 2**21, "skip_tokenizer_init": True, "max_logprobs": VOCAB,
    }  # fmt: skip
    return EngineArgs(model=folder, **(options | others))


def prompt_of(info: VisionInfo, parts: list[Any]) -> tuple[list[int], list[EncoderItem]]:
    """Token ids, with placeholders where pictures are, and the pictures' items."""
    ids: list[int] = []
    items: list[EncoderItem] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        if isinstance(part, Film):
            for k, late in enumerate(part.lates(info)):
                own = part.pixels[k * info.frames : (k + 1) * info.frames]
                item = make_item(info, own, SCALE, SHIFT, kind="video", frames=info.frames, late=late)
                items.append(item)
                ids += [40 + k, 101, *[VIDEO] * item.rows, 102] if info.stamps else [VIDEO] * item.rows
            continue
        is_sound = isinstance(part, Sound)
        item = make_sound(*ears(info), part.samples) if is_sound else make_item(info, part, SCALE, SHIFT)
        items.append(item)
        ids += [AUDIO if is_sound else TOKEN] * item.rows
    return ids, items


def request(
    info: VisionInfo,
    request_id: str,
    parts: list[Any],
    *,
    salt: str | None = None,
    **params: Any,
) -> AddRequest:
    """A greedy request as the door would make it."""
    ids, items = prompt_of(info, parts)
    params.setdefault("max_tokens", 8)
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=ids,
        params=SamplingParams(detokenize=False, temperature=0.0, **params),
        seed=0,
        eos_token_ids=[],
        cache_salt=salt,
        media=items,
        runs=find_runs(info, ids, items, ears(info)[0]),
    )


def hf_inputs(one: Sighted, info: VisionInfo, parts: list[Any]) -> tuple[list[int], dict[str, Any]]:
    """The same for transformers: ids, and what goes with them."""
    ids, _ = prompt_of(info, parts)
    images = [part for part in parts if isinstance(part, np.ndarray)]
    films = [part for part in parts if isinstance(part, Film)]
    given: dict[str, Any] = {}
    if images:
        pixels = [torch.from_numpy((each * SCALE + SHIFT).astype(np.float32)).permute(0, 3, 1, 2) for each in images]
        if one.name.startswith("qwen"):
            found, grids = in_parts([each.expand(2, -1, -1, -1) for each in pixels], info)
            given = {"pixel_values": found, "image_grid_thw": grids}
        elif one.name == "gemma4":
            given = flat(pixels, info.patch, info.group)
        elif one.name == "smolvlm":
            given = {"pixel_values": torch.cat(pixels)[None]}
        elif one.name == "mistral3":
            tallest, widest = (max(each.shape[i] for each in pixels) for i in (2, 3))
            padded = [
                torch.nn.functional.pad(each, (0, widest - each.shape[3], 0, tallest - each.shape[2]))
                for each in pixels
            ]
            given = {
                "pixel_values": torch.cat(padded),
                "image_sizes": torch.tensor([each.shape[2:] for each in pixels]),
            }
        else:
            given = {"pixel_values": torch.cat(pixels)}
    if films:
        frames = [
            torch.from_numpy((each.pixels * SCALE + SHIFT).astype(np.float32)).permute(0, 3, 1, 2) for each in films
        ]
    if films and one.name == "gemma4":
        flattened = flat([each[None] for video in frames for each in video], info.patch, info.group)
        given |= {"pixel_values_videos": flattened["pixel_values"]}
        given |= {"video_position_ids": flattened["image_position_ids"]}
        given |= {"num_frames_per_video": torch.tensor([len(video) for video in frames])}
    elif films:
        found, grids = in_parts(frames, info)
        given |= {"pixel_values_videos": found, "video_grid_thw": grids}
        if info.tempo:
            given["second_per_grid_ts"] = torch.tensor([each.apart / info.tempo for each in films])
    sounds = [part.samples for part in parts if isinstance(part, Sound)]
    return ids, given | (hf_sounds(sounds, one.name) if sounds else {})


def hf_sounds(sounds: list[npt.NDArray[np.float32]], name: str = "gemma4") -> dict[str, Any]:
    """Recordings as transformers prepares them, padded to the longest."""
    from transformers import Gemma3nAudioFeatureExtractor, Gemma4AudioFeatureExtractor

    is_3n = name.startswith("gemma3n")
    make, bins = (Gemma3nAudioFeatureExtractor, 18) if is_3n else (Gemma4AudioFeatureExtractor, 16)
    found = make(feature_size=bins)(sounds, return_tensors="np")
    given = {each: torch.from_numpy(np.stack(found[each])) for each in ("input_features", "input_features_mask")}
    assert not is_3n or given["input_features_mask"].all(), (
        "silence behind a recording would be heard in transformers alone"
    )
    return given


@torch.no_grad()
def hf_logits(one: Sighted, ids: list[int], prompt_len: int, given: dict[str, Any]) -> torch.Tensor:
    """[len(ids), V] float32 of a full forward pass; the first ``prompt_len`` are the prompt."""
    tokens = torch.tensor([ids])
    is_picture = (tokens == TOKEN).int()
    kinds: dict[str, Any] = {}
    if one.name == "gemma3":
        kinds = {"token_type_ids": is_picture}
    elif one.name == "paligemma":
        kinds = {"token_type_ids": (torch.arange(len(ids)) >= prompt_len).int()[None]}
    elif one.name == "gemma4":
        kinds = {"mm_token_type_ids": is_picture + 2 * (tokens == VIDEO).int() + 3 * (tokens == AUDIO).int()}
    elif one.name.startswith("qwen"):
        kinds = {"mm_token_type_ids": is_picture + 2 * (tokens == VIDEO).int()}
        one.model.model.rope_deltas = None
    found: torch.Tensor = one.model(input_ids=tokens, use_cache=False, **kinds, **given).logits[0].float()
    return found


def _hashable(part: Any) -> Any:
    if isinstance(part, Film):
        return part.pixels.tobytes(), part.apart
    part = part.samples if isinstance(part, Sound) else part
    return part if isinstance(part, int) else part.tobytes()


@functools.cache
def _answers() -> dict[Any, list[int]]:
    return {}


def hf_greedy(one: Sighted, info: VisionInfo, parts: list[Any], count: int) -> list[int]:
    """Greedy tokens, by full forward passes."""
    known = _answers().setdefault((one.name, *(_hashable(part) for part in parts)), [])
    if len(known) < count:
        ids, given = hf_inputs(one, info, parts)
        known += hf_answer(one, ids, len(ids), known, given, count - len(known))
    return known[:count]


def hf_answer(
    one: Sighted, ids: list[int], prompt_len: int, made: list[int], given: dict[str, Any], count: int
) -> list[int]:
    """``count`` greedy tokens behind ``made``, of a prompt as the engine saw it."""
    found: list[int] = []
    while len(found) < count:
        found.append(int(hf_logits(one, ids + made + found, prompt_len, given)[-1].argmax()))
    return found
