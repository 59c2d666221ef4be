"""Tiny decoders with sight of transformers, with random weights, saved as checkpoints; and how transformers runs them."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
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
from tests.multimodal.hf_patches import flat, in_parts
from tests.multimodal.tiny_texts import save_texts

TOKEN, VIDEO, AUDIO, VOCAB = 100, 103, 104, 120
SCALE = np.array([0.0153, 0.0171, 0.0162], np.float32)
SHIFT = np.array([-1.9, -2.0, -1.7], np.float32)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NO_HEAD_DIM = {name: value for name, value in _TEXT.items() if name != "head_dim"}
_VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
_AUDIO: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [16, 8],
    "attention_chunk_size": 4, "attention_context_left": 5, "output_proj_dims": 20, "conv_kernel_size": 3,
}  # fmt: skip
SOUND = SoundInfo(token=AUDIO, mel_bins=16, reach=4, longest=160)
MEL = MelSettings(bins=16)
_QWEN: dict[str, Any] = {"depth": 3, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2}
_QWEN_IDS = {"image_token_id": TOKEN, "video_token_id": VIDEO, "vision_start_token_id": 101, "vision_end_token_id": 102}


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "Llava",
        {
            "vision_config": {**_VISION, "model_type": "clip_vision_model", "num_hidden_layers": 3},
            "text_config": {**_TEXT, "model_type": "llama"},
            "image_token_index": TOKEN,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "vision_config": {**_VISION, "image_size": 56},
            "text_config": {
                **_TEXT,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 8,
            },
            "mm_tokens_per_image": 16,
            "boi_token_index": 101,
            "eoi_token_index": 102,
            "image_token_index": TOKEN,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "vision_config": {
                "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 3,
                "position_embedding_size": 64, "use_clipped_linears": True, "standardize": True,
            },
            "text_config": {
                **_TEXT, "num_hidden_layers": 4, "sliding_window": 8, "global_head_dim": 8, "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 4,
                "vocab_size_per_layer_input": VOCAB, "use_bidirectional_attention": "vision",
            },
            "boi_token_id": 101, "eoi_token_id": 102, "image_token_id": TOKEN, "video_token_id": VIDEO,
            "audio_token_id": AUDIO, "boa_token_id": 106, "eoa_token_index": 107, "vision_soft_tokens_per_image": 9,
            "audio_config": _AUDIO,
        },
    ),
    "paligemma": (
        "PaliGemma",
        {
            "vision_config": {**_VISION, "model_type": "siglip_vision_model", "projection_dim": 32},
            "text_config": {**_TEXT, "model_type": "gemma"},
            "image_token_index": TOKEN,
            "projection_dim": 32,
            "vocab_size": VOCAB,
        },
    ),
    "smolvlm": (
        "SmolVLM",
        {
            "vision_config": {**_VISION, "image_size": 56},
            "text_config": {**_TEXT, "model_type": "llama"},
            "scale_factor": 2,
            "image_token_id": TOKEN,
        },
    ),
    "qwen2.5": (
        "Qwen2_5_VL",
        {
            "vision_config": {
                **_QWEN, "hidden_size": 24, "intermediate_size": 40, "window_size": 32, "fullatt_block_indexes": [1],
                "out_hidden_size": 32,
            },
            "text_config": {**_NO_HEAD_DIM, **_mrope(1, 1, 2)},
            **_QWEN_IDS,
        },
    ),
    "qwen3": (
        "Qwen3VL",
        {
            "vision_config": {
                **_QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 32,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
            },
            "text_config": {**_TEXT, **_mrope(2, 1, 1)},
            **_QWEN_IDS,
        },
    ),
    "qwen2": (
        "Qwen2VL",
        {
            "vision_config": {**_QWEN, "embed_dim": 24, "mlp_ratio": 2, "hidden_size": 32},
            "text_config": {**_NO_HEAD_DIM, **_mrope(1, 1, 2)},
            **_QWEN_IDS,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "vision_config": {**_VISION, "model_type": "pixtral", "image_size": 56, "patch_size": 4},
            "text_config": {**_TEXT, "model_type": "mistral"},
            "image_token_index": TOKEN,
            "spatial_merge_size": 2,
        },
    ),
    "internvl": (
        "InternVL",
        {
            "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [7, 7]},
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "image_token_id": TOKEN,
            "downsample_ratio": 0.5,
        },
    ),
}  # fmt: skip
FAMILIES = tuple(_CONFIGS)


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

    family, config = _CONFIGS[name]
    config = {
        each: {**config.get(each, {}), **value} if each.endswith("_config") else value
        for each, value in {**{own: {} if own.endswith("_config") else config[own] for own in config}, **change}.items()
    }
    made = getattr(transformers, f"{family}Config")(**config)
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForConditionalGeneration")(made).eval()
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            if tensor.dim() == 1 and ("norm" in parameter or "ln" in parameter):
                tensor.add_(torch.randn_like(tensor) * 0.1)
            else:
                tensor.normal_(0.0, 0.2)
        if name.startswith(("qwen", "gemma4")):  # one that is generated would be one without features to transformers
            model.lm_head.weight[[TOKEN, VIDEO, AUDIO]] = 0.0
        for buffer, tensor in model.named_buffers():
            tensor.copy_(_drawn_range(buffer, torch.randn(tensor.shape), tensor))
    folder = Path(tempfile.mkdtemp(prefix=f"sighted-{name}-"))
    model.save_pretrained(folder)
    save_texts(name, folder, TOKEN, VIDEO)
    return Sighted(name, model, str(folder))


def _drawn_range(name: str, drawn: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Values of the tensors that are neither weights nor norms: ranges that cut something off, and what standardises."""
    if name.endswith(("_min", "_max")):
        return (1.0 + 0.2 * drawn.tanh()) * (-1 if name.endswith("_min") else 1)
    return 1.0 + 0.2 * drawn if name.endswith(("layer_scalar", "std_scale", "std_bias")) else otherwise


@functools.cache
def plain(name: str) -> str:
    """A checkpoint of the family with other random weights, made without transformers: to test the house against itself."""
    family, values = _CONFIGS[name]
    config = {"architectures": [f"{family}ForConditionalGeneration"], "eos_token_id": 2, **values}
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
        item = make_sound(SOUND, MEL, part.samples) if is_sound else make_item(info, part, SCALE, SHIFT)
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
        runs=find_runs(info, ids, items, SOUND),
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
    return ids, given | (hf_sounds(sounds) if sounds else {})


def hf_sounds(sounds: list[npt.NDArray[np.float32]]) -> dict[str, Any]:
    """Recordings as transformers prepares them, padded to the longest."""
    from transformers import Gemma4AudioFeatureExtractor

    found = Gemma4AudioFeatureExtractor(feature_size=MEL.bins)(sounds, return_tensors="np")
    return {name: torch.from_numpy(found[name]) for name in ("input_features", "input_features_mask")}


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
