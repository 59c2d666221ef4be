"""Decoders with sight: Gemma 3, PaliGemma, Llava, Idefics3 and SmolVLM, Qwen2-VL to Qwen3-VL, Mistral3, InternVL.

Each is a decoder of the registry, read from ``text_config``, and a tower with its projector (``models.vision.families``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.models.decoder import DecoderConfig
from headway.models.fields import Fields
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.norm import NormSpec
from headway.models.vision import families
from headway.models.vision.spec import ProjectorSpec
from headway.models.vision_language import SightConfig, SightedConfig, VisionLanguageModel

_LLAVA = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("vision_tower.vision_model.", "vision_tower."),
)
_QWEN = (("model.visual.", "visual."), ("model.language_model.", "model."), ("language_model.model.", "model."))
_IDEFICS = (
    ("model.text_model.", "model."),
    ("model.vision_model.", "vision_model."),
    ("model.connector.", "connector."),
)
_TEXT_CLASSES: Mapping[str, str] = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type of a text_config -> the decoder it is."""


def sighted_text(
    fields: Fields, decoder: str, *, tied: bool, drop: tuple[str, ...] = (), capped: bool = False
) -> DecoderConfig:
    """The decoder in ``text_config``, or among the fields themselves, as older exporters wrote them.

    Args:
        decoder: its architecture; "": the one that model_type says.
        tied: whether its head is its embedding where no field says so.
        drop: fields that are read elsewhere.
        capped: its logits may have a soft cap; elsewhere transformers leaves it out and others do not.
    """
    from headway.models.registry import model_class

    nested = fields.get("text_config")
    values = dict(fields if nested is None else nested)
    values.pop("vision_config", None)
    for name in ("tie_word_embeddings", "eos_token_id"):
        if nested is not None and fields.get(name) is not None:
            values[name] = fields[name]
    values.setdefault("tie_word_embeddings", tied)
    if not decoder:
        kind = values.get("model_type", "llama")
        if not isinstance(kind, str) or kind not in _TEXT_CLASSES:
            known = ", ".join(_TEXT_CLASSES)
            raise UnsupportedModelError(
                f"config.json: text_config.model_type = {kind!r} is not implemented here; {known} are"
            )
        decoder = _TEXT_CLASSES[kind]
    own = Fields({name: value for name, value in values.items() if name not in drop} | {"architectures": [decoder]})
    if values.get("vocab_size") is None and fields.get("vocab_size") is not None:
        own = own.replaced(vocab_size=fields["vocab_size"])
    found = model_class(decoder).read(own)
    own.refuse_unread()
    assert isinstance(found, DecoderConfig)
    if found.logit_soft_cap and not capped:
        cap = f"{found.logit_soft_cap:g}: implementations of such a model with sight disagree; null is implemented"
        raise UnsupportedModelError(f"config.json: text_config.final_logit_softcapping = {cap}")
    if nested is None:
        for name in own:
            fields.get(name)
    return found


def _sighted(fields: Fields, text: DecoderConfig, sight: SightConfig) -> SightedConfig:
    values = {each.name: getattr(text, each.name) for each in dataclasses.fields(DecoderConfig)}
    values["architecture"] = fields["architectures"][0]
    return SightedConfig(**values, sight=sight)


def vision_fields(fields: Fields) -> Fields:
    """The fields of the tower. Raises UnsupportedModelError: there are none."""
    found = fields.get("vision_config")
    if not isinstance(found, Mapping):
        raise fields.refuse("vision_config", "is not there")
    return Fields(found)


def image_token(fields: Fields, default: int) -> int:
    """The id that stands for a picture's rows."""
    for name in ("image_token_id", "image_token_index"):
        if fields.get(name) is not None:
            return fields.count(name)
    return default


def _video_token(fields: Fields) -> int:
    return fields.with_defaults(video_token_id=151656).count("video_token_id")


def _pixels(vision: Fields, default: int) -> int:
    return families.side(vision.with_defaults(image_size=default), "image_size")


class Gemma3ForConditionalGeneration(VisionLanguageModel):
    """Gemma 3: SigLIP, means of squares of patches; tokens of a picture see each other."""

    @staticmethod
    def read(fields: Fields) -> SightedConfig:
        nested = fields.get("text_config") or {}
        defaults = {
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        }  # fmt: skip
        text = sighted_text(fields.replaced(text_config={**defaults, **nested}), "Gemma3ForCausalLM", tied=True)
        vision = vision_fields(fields)
        norm = NormSpec(vision.number("layer_norm_eps", 1e-6, least=0), plus_one=True)
        projector = ProjectorSpec(
            merges="mean", norm="mm_soft_emb_norm", norm_spec=norm, norm_behind=True,
            products=("mm_input_projection_weight",), widths=(text.hidden_size,), bias=False, transposed=True,
        )  # fmt: skip
        tower = families.siglip_tower(vision, projector)
        rows = int(fields.with_defaults(mm_tokens_per_image=256).count("mm_tokens_per_image") ** 0.5)
        if tower.positions % rows:
            raise fields.refuse("mm_tokens_per_image", f"does not divide the picture's {tower.positions}^2 patches")
        tower = replace(tower, group=tower.positions // rows)
        sight = SightConfig(
            vision=tower,
            token=image_token(fields, 262144),
            sees="spans",
            one_size=_pixels(vision, 224),
            beginnings=_LLAVA,
        )
        return _sighted(fields, text, sight)


class PaliGemmaForConditionalGeneration(VisionLanguageModel):
    """PaliGemma 1 and 2: SigLIP, one product; all tokens of the prompt see each other."""

    @staticmethod
    def read(fields: Fields) -> SightedConfig:
        text = sighted_text(fields, "", tied=True, drop=("use_bidirectional_attention",), capped=True)
        both_ways = (fields.get("text_config") or {}).get("use_bidirectional_attention")
        vision = vision_fields(fields)
        projector = ProjectorSpec(products=("linear",), widths=(text.hidden_size,))
        tower = families.siglip_tower(vision, projector)
        sight = SightConfig(
            vision=tower, token=image_token(fields, 256000), sees="" if both_ways is False else "prompt",
            one_size=_pixels(vision, 224), beginnings=_LLAVA,
        )  # fmt: skip
        return _sighted(fields, text, sight)


class LlavaForConditionalGeneration(VisionLanguageModel):
    """Llava 1.5: CLIP or SigLIP up to its last layer but one, two products."""

    @staticmethod
    def read(fields: Fields) -> SightedConfig:
        text, vision = sighted_text(fields, "", tied=False), vision_fields(fields)
        act = fields.with_defaults(projector_hidden_act="gelu").choice("projector_hidden_act", ACTIVATIONS)
        bias = bool(fields.get("multimodal_projector_bias", True))
        width = text.hidden_size
        projector = ProjectorSpec(products=("linear_1", "linear_2"), widths=(width, width), activation=act, bias=bias)
        layer, strategy = families.feature_layer(fields, -2), fields.get("vision_feature_select_strategy", "default")
        kind = vision.get("model_type", "clip_vision_model")
        if kind == "siglip_vision_model" and strategy == "full":
            tower = families.upto(families.siglip_tower(vision, projector), layer)
        elif kind == "clip_vision_model" and strategy == "default":
            tower = families.clip_tower(vision, projector, layer)
        else:
            raise fields.refuse(
                "vision_feature_select_strategy", f"with vision_config.model_type = {kind!r} is not implemented"
            )
        sight = SightConfig(
            vision=tower, token=image_token(fields, 32000), one_size=_pixels(vision, 224), beginnings=_LLAVA
        )
        return _sighted(fields, text, sight)


class Idefics3ForConditionalGeneration(VisionLanguageModel):
    """Idefics3 and SmolVLM: pictures in tiles, squares of patches side by side, one product."""

    @staticmethod
    def read(fields: Fields) -> SightedConfig:
        text, vision = sighted_text(fields, "", tied=False), vision_fields(fields)
        vision = vision.with_defaults(
            hidden_size=1152, num_attention_heads=16, patch_size=32, hidden_act="gelu_pytorch_tanh"
        )
        group = fields.with_defaults(scale_factor=2).count("scale_factor")
        projector = ProjectorSpec(products=("proj",), widths=(text.hidden_size,), bias=False)
        tower = families.siglip_tower(
            vision, projector, prefix="vision_model.", projector_prefix="connector.modality_projection.", group=group
        )
        sight = SightConfig(
            vision=tower, token=image_token(fields, 128257), one_size=_pixels(vision, 224), beginnings=_IDEFICS
        )
        return _sighted(fields, text, sight)


def _rope_sections(values: Mapping[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The sections of a rope object, and the object without what has to do with them."""
    rope = dict(values)
    sections = tuple(rope.pop("mrope_section", ()))
    interleaved = rope.pop("mrope_interleaved", None)
    if interleaved not in (None, True):
        raise UnsupportedModelError(f"config.json: mrope_interleaved = {interleaved!r} is not implemented")
    for name in ("type", "rope_type"):
        if rope.get(name) == "mrope":
            rope[name] = "default"
    if len(sections) != 3 or not all(isinstance(each, int) and each >= 0 for each in sections):
        raise UnsupportedModelError(f"config.json: mrope_section must be three integers, got {sections!r:.60}")
    return sections, rope


def _qwen_text(fields: Fields, decoder: str, default: tuple[int, ...]) -> tuple[DecoderConfig, tuple[int, ...]]:
    """The decoder and its sections."""
    nested = fields.get("text_config")
    values = dict(fields if nested is None else Fields(nested))
    for name in ("use_mrope", "rope_interleaved"):
        values.pop(name, None)
    name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    found = {"mrope_section": default, **(values.get(name) or {})}
    sections, rope = _rope_sections(found)
    values.pop("rope_parameters", None), values.pop("rope_scaling", None)
    values["rope_parameters"] = {"rope_type": "default", **rope}
    for each in ("rope_scaling", "rope_parameters", "use_mrope"):
        fields.get(each)
    inner = fields.replaced(text_config=values) if nested is not None else fields.replaced(**values)
    if nested is None:
        inner = fields.replaced(text_config={k: v for k, v in values.items() if k != "vision_config"})
        for each in values:
            fields.get(each)
    text = sighted_text(inner, decoder, tied=False)
    mixer = text.blocks[0].attention
    if sum(sections) != mixer.head_dim // 2:
        raise UnsupportedModelError(
            f"config.json: mrope_section {list(sections)} does not add up to half a head, {mixer.head_dim // 2}"
        )
    return text, sections


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """SmolVLM: Idefics3 under another name."""


class Qwen2_5_VLForConditionalGeneration(VisionLanguageModel):  # noqa: N801 (as config.json has it)
    """Qwen2.5-VL: windows in the tower, positions by time, row and column."""

    @staticmethod
    def read(fields: Fields) -> SightedConfig:
        text, sections = _qwen_text(fields, "Qwen2ForCausalLM", (16, 24, 24))
        vision = vision_fields(fields)
        tower = families.qwen25_tower(vision, text.hidden_size)
        sight = SightConfig(
            vision=tower, token=image_token(fields, 151655), sections=sections, beginnings=_QWEN,
            video_token=_video_token(fields), tempo=vision.number("tokens_per_second", 4, least=0.01),
        )  # fmt: skip
        return _sighted(fields, text, sight)


class Qwen2VLForConditionalGeneration(VisionLanguageModel):
    """Qwen2-VL."""

    @staticmethod
    def read(fields: Fields) -> SightedConfig:
        text, sections = _qwen_text(fields, "Qwen2ForCausalLM", (16, 24, 24))
        tower = families.qwen2_tower(vision_fields(fields), text.hidden_size)
        sight = SightConfig(
            vision=tower, token=image_token(fields, 151655), sections=sections, beginnings=_QWEN,
            video_token=_video_token(fields),
        )  # fmt: skip
        return _sighted(fields, text, sight)


class Qwen3VLForConditionalGeneration(VisionLanguageModel):
    """Qwen3-VL: outputs of the tower's blocks are added behind the decoder's first layers."""

    @staticmethod
    def read(fields: Fields) -> SightedConfig:
        text, sections = _qwen_text(fields, "Qwen3ForCausalLM", (24, 20, 20))
        tower = families.qwen3_tower(vision_fields(fields), text.hidden_size)
        if len(tower.deepstack) > len(text.blocks):
            raise UnsupportedModelError("config.json: deepstack_visual_indexes names more layers than the decoder has")
        sight = SightConfig(
            vision=tower, token=image_token(fields, 151655), sections=sections, interleaved=True, beginnings=_QWEN,
            video_token=_video_token(fields), stamps=True,
        )  # fmt: skip
        return _sighted(fields, text, sight)


class Mistral3ForConditionalGeneration(VisionLanguageModel):
    """Mistral 3: Pixtral's tower, squares of patches merged by a product."""

    @staticmethod
    def read(fields: Fields) -> SightedConfig:
        text, vision = sighted_text(fields, "", tied=True), vision_fields(fields)
        act = fields.with_defaults(projector_hidden_act="gelu").choice("projector_hidden_act", ACTIVATIONS)
        group = fields.with_defaults(spatial_merge_size=2).count("spatial_merge_size")
        width = text.hidden_size
        projector = ProjectorSpec(
            norm="norm", norm_spec=NormSpec(text.norm.eps), first="patch_merger.merging_layer",
            products=("linear_1", "linear_2"), widths=(width, width), activation=act,
            bias=fields.flag("multimodal_projector_bias"),
        )  # fmt: skip
        tower = families.pixtral_tower(vision, projector, families.feature_layer(fields, -1), group)
        sight = SightConfig(vision=tower, token=image_token(fields, 10), beginnings=_LLAVA)
        return _sighted(fields, text, sight)


class InternVLForConditionalGeneration(VisionLanguageModel):
    """InternVL 3: tiles, squares of patches side by side, a norm and two products."""

    @staticmethod
    def read(fields: Fields) -> SightedConfig:
        text, vision = sighted_text(fields, "", tied=True), vision_fields(fields)
        act = fields.with_defaults(projector_hidden_act="gelu").choice("projector_hidden_act", ACTIVATIONS)
        group = round(1 / fields.number("downsample_ratio", 0.5, least=0.01))
        if fields.get("vision_feature_select_strategy", "default") != "default":
            raise fields.refuse("vision_feature_select_strategy", "is not implemented; 'default' is")
        width = text.hidden_size
        projector = ProjectorSpec(
            norm="layer_norm", norm_spec=NormSpec(1e-5, "layer", bias=True), norm_behind=True,
            products=("linear_1", "linear_2"), widths=(width, width), activation=act,
        )  # fmt: skip
        tower = families.intern_tower(vision, projector, families.feature_layer(fields, -1), group)
        sight = SightConfig(
            vision=tower, token=image_token(fields, 151667), one_size=_pixels(vision, 448), beginnings=_LLAVA
        )
        return _sighted(fields, text, sight)
