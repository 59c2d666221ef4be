"""Gemma 4 with its towers: one that sees, and in the smaller models one that hears."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.models.audio.spec import AudioSpec
from headway.models.audio_language import HearingModel
from headway.models.blocks import BlockSpec
from headway.models.config import map_blocks
from headway.models.fields import Fields
from headway.models.gemma4 import Gemma4ForCausalLM, PerLayerConfig
from headway.models.layers.activation import ACTIVATIONS
from headway.models.sighted import image_token, sighted_text, vision_fields
from headway.models.vision import families
from headway.models.vision_language import SightConfig, VisionLanguageModel
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool

MEDIA_NAMES = (
    ("model.language_model.", "model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.embed_vision.", "embed_vision."),
    ("model.audio_tower.", "audio_tower."),
    ("model.embed_audio.", "embed_audio."),
)
"""Beginnings of names that exporters write -> those here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma4MediaConfig(PerLayerConfig):
    """Gemma 4 with sight, and with hearing where there is an audio tower.

    Attributes:
        media: ids that stand for pictures and sounds.
        padding: the id that is read in their place, by the inputs of layers, too.
        audio: the tower that hears; None: there is none.
        audio_token: the id that stands for a recording.
    """

    sight: SightConfig
    audio: AudioSpec | None
    audio_token: int
    media: tuple[int, ...]
    padding: int


class Gemma4ForConditionalGeneration(HearingModel, VisionLanguageModel, Gemma4ForCausalLM):
    """Gemma 4: pictures of any shape, videos as frames with their times, and recordings; in sliding layers of larger models
    tokens of a picture see each other."""

    knows_stages = ("_inputs",)

    def __init__(
        self, config: Gemma4MediaConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        sizes: dict[str, Any] = {"dtype": dtype, "device": device, "max_model_len": max_model_len}
        super().__init__(config, config.audio, config.audio_token, **sizes)
        self._media, self._padding = config.media, config.padding

    def _inputs(self, batch: StepBatch, caches: CachePool) -> tuple[torch.Tensor, StepBatch]:
        ids = batch.input_ids
        for token in self._media:
            ids = torch.where(ids == token, self._padding, ids)
        return super()._inputs(replace(batch, input_ids=ids), caches)

    @staticmethod
    def read(fields: Fields) -> Gemma4MediaConfig:
        text = sighted_text(fields, "Gemma4ForCausalLM", tied=True, drop=("use_bidirectional_attention",), capped=True)
        assert isinstance(text, PerLayerConfig)
        nested = Fields(fields.get("text_config") or {})
        both_ways = nested.get("use_bidirectional_attention")
        if both_ways not in (None, "vision"):
            raise nested.refuse("use_bidirectional_attention", "is not implemented; 'vision' is")

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(block, mixer=replace(block.attention, ahead=block.attention.window > 0))

        text = map_blocks(text, change)
        tower = families.gemma4_tower(vision_fields(fields), text.hidden_size)
        token = image_token(fields, 258880)
        defaults = fields.with_defaults(video_token_id=258884, audio_token_id=258881)
        media = tuple(defaults[name] for name in ("video_token_id", "audio_token_id") if defaults[name] is not None)
        most = fields.with_defaults(vision_soft_tokens_per_image=1120).count("vision_soft_tokens_per_image")
        sight = SightConfig(
            vision=tower, token=token, sees="spans" if both_ways else "", most_rows=most, beginnings=MEDIA_NAMES,
            video_token=-1 if defaults["video_token_id"] is None else defaults.count("video_token_id"), stamps=True,
        )  # fmt: skip
        return Gemma4MediaConfig.of(
            text,
            architecture=fields["architectures"][0],
            sight=sight,
            media=(token, *media),
            padding=nested.whole("pad_token_id", 0),
            audio=None if defaults["audio_token_id"] is None else read_audio(fields, text.hidden_size),
            audio_token=-1 if defaults["audio_token_id"] is None else defaults.count("audio_token_id"),
        )


def read_audio(fields: Fields, width: int) -> AudioSpec | None:
    """The tower of ``audio_config``, which gives rows of ``width`` numbers; None: the model hears nothing.

    Raises:
        UnsupportedModelError: a value that is not implemented, or inconsistent; names the field.
    """
    found = fields.get("audio_config")
    if found is None:
        return None
    own = Fields(found).with_defaults(
        hidden_size=1024, num_hidden_layers=12, num_attention_heads=8, hidden_act="silu",
        subsampling_conv_channels=[128, 32], conv_kernel_size=5, residual_weight=0.5, attention_chunk_size=12,
        attention_context_left=13, attention_context_right=0, attention_logit_cap=50.0,
        attention_invalid_logits_value=-1e9, use_clipped_linears=True, rms_norm_eps=1e-6, gradient_clipping=1e10,
        output_proj_dims=1536,
    )  # fmt: skip
    hidden, heads = own.count("hidden_size"), own.count("num_attention_heads")
    if hidden % heads or hidden % 2:
        raise own.refuse("num_attention_heads", f"does not divide hidden_size = {hidden}, which must be even")
    channels = own["subsampling_conv_channels"]
    if not isinstance(channels, list | tuple) or len(channels) != 2 or channels[0] % 4:
        raise own.refuse("subsampling_conv_channels", "must be two numbers, the first a multiple of 4")
    past, right = own.count("attention_context_left") - 1, own.whole("attention_context_right")
    if past < 1:
        raise own.refuse("attention_context_left", "must be at least 2: a row sees itself")
    span = (own.count("attention_chunk_size") + past + right) // 2
    return AudioSpec(
        mel_bins=channels[0],  # the product behind the convolutions is as wide as if there were so many
        channels=(channels[0], channels[1]),
        hidden_size=hidden,
        num_heads=heads,
        num_layers=own.count("num_hidden_layers"),
        activation=own.choice("hidden_act", ACTIVATIONS),
        past=past,
        future=max(right - 1, 0),
        span=span,
        placed=min(past + max(right - 1, 0), span),
        key_scale=math.log(1 + math.e) / math.log(2),
        soft_cap=own.number("attention_logit_cap"),
        hidden_score=own.number("attention_invalid_logits_value"),
        kernel=own.count("conv_kernel_size"),
        residual_weight=own.number("residual_weight"),
        limit=own.number("gradient_clipping", least=0),
        clipped=own.flag("use_clipped_linears"),
        eps=own.number("rms_norm_eps", least=0),
        first_eps=own.number("rms_norm_eps", least=0),
        out=own.count("output_proj_dims"),
        width=width,
    )
