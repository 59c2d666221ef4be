"""Gemma 3n with its towers: MobileNet-v5, which sees, and a conformer, which hears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.models.audio.spec import AudioNames, AudioSpec
from headway.models.audio_language import HearingModel
from headway.models.fields import Fields
from headway.models.gemma3n import Gemma3nForCausalLM
from headway.models.gemma4 import PerLayerConfig
from headway.models.gemma4_media import MEDIA_NAMES
from headway.models.interface import WeightMap
from headway.models.media_embedder import EmbedderSpec, MediaEmbedder
from headway.models.mobile_language import MobileSightModel
from headway.models.sighted import image_token, sighted_text
from headway.models.vision.mobile import CHANNELS, ROWS, MobileSpec
from headway.state.batch import StepBatch

_SEES = "mobilenetv5_300m_enc"
_NAMES = AudioNames(
    convolutions=("conv_0.", "conv_1."), blocks="conformer.", parts=("ffw_layer_start.", "ffw_layer_end."),
    attention="attention.attn.", post="attention.post",
    positions="attention.attn.relative_position_embedding.pos_proj.weight",
    norms=("attention.pre_attn_norm.", "attention.post_norm.", "norm."), linear="",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma3nMediaConfig(PerLayerConfig):
    """Gemma 3n with sight and hearing.

    Attributes:
        sight: the tower that sees; None: there is none.
        audio: the tower that hears.
        audio_token, image_token: ids that stand for a recording, and for a picture.
        words: the vocabularies of pictures and of recordings.
    """

    sight: MobileSpec | None
    audio: AudioSpec
    audio_token: int
    image_token: int
    words: tuple[EmbedderSpec, EmbedderSpec]


class Gemma3nForConditionalGeneration(HearingModel, MobileSightModel, Gemma3nForCausalLM):
    """Gemma 3n: pictures of one size, and recordings, each of as many tokens as the longest takes; ids of media are embedded
    apart from those of text."""

    def __init__(
        self, config: Gemma3nMediaConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        embedders = [MediaEmbedder(spec, dtype=dtype, device=device) for spec in config.words]
        sizes: dict[str, Any] = {"dtype": dtype, "device": device, "max_model_len": max_model_len}
        seen = (config.sight, config.image_token, embedders[0])
        super().__init__(config, config.audio, config.audio_token, embedders[1], sight=seen, **sizes)
        self.embedders = embedders
        self.words = torch.nn.ModuleList(embedders)

    def _embedded(self, batch: StepBatch) -> torch.Tensor:
        x = super()._embedded(batch)
        for each in self.embedders:
            x = each.place(x, batch.input_ids)
        return x

    def weights(self) -> WeightMap:
        """See ``DecoderModel``."""
        found = super().weights()
        own = {name: target for each in self.embedders for name, target in each.destinations().items()}
        return replace(found, targets={**found.targets, **own}, beginnings=MEDIA_NAMES)

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""
        super().finalize()
        for each in self.embedders:
            each.finalize()

    @staticmethod
    def read(fields: Fields) -> Gemma3nMediaConfig:
        text = sighted_text(fields, "Gemma3nForCausalLM", tied=True, capped=True)
        assert isinstance(text, PerLayerConfig)
        most = fields.with_defaults(audio_soft_tokens_per_image=188).count("audio_soft_tokens_per_image")
        width, vocab = text.hidden_size, text.vocab_size
        seen = _embedder(fields, "vision", width, hidden_size=2048, vocab_offset=262144)
        heard = _embedder(fields, "audio", width, hidden_size=1536, vocab_offset=262272)
        padding = vocab - 1 - heard.first
        if not 0 <= padding < heard.count:
            raise fields.refuse("audio_config", f"has no word for the text model's last id, {vocab - 1}, which pads")
        audio = replace(read_audio(fields, width), rows=most, padding=padding)
        return Gemma3nMediaConfig.of(
            text, architecture=fields["architectures"][0], sight=_sight(fields), image_token=image_token(fields, 262145),
            audio=audio, audio_token=fields.with_defaults(audio_token_id=262273).count("audio_token_id"), words=(seen, heard),
        )  # fmt: skip


def _part(fields: Fields, medium: str) -> Fields:
    return Fields(fields.get(f"{medium}_config") or {})


def _embedder(fields: Fields, medium: str, width: int, **defaults: int) -> EmbedderSpec:
    own = _part(fields, medium).with_defaults(vocab_size=128, rms_norm_eps=1e-6, **defaults)
    return EmbedderSpec(
        prefix=f"embed_{medium}.", first=own.count("vocab_offset"), count=own.count("vocab_size"),
        inner=own.count("hidden_size"), width=width, eps=own.number("rms_norm_eps", least=0),
    )  # fmt: skip


def _sight(fields: Fields) -> MobileSpec | None:
    """The tower of ``vision_config``; None where its architecture is null, and then pictures are refused."""
    own = _part(fields, "vision").with_defaults(hidden_size=CHANNELS, image_size=768)
    kind, more = own.get("architecture", _SEES), own.get("model_args") or {}
    if kind is None:
        return None
    if kind != _SEES:
        raise own.refuse("architecture", f"is not implemented; {_SEES!r} is, or null for a model without sight")
    if not isinstance(more, Mapping) or set(more) - {"channel_multiplier"}:
        raise own.refuse("model_args", "is not implemented; 'channel_multiplier' is")
    rows = fields.with_defaults(vision_soft_tokens_per_image=ROWS**2).count("vision_soft_tokens_per_image")
    if rows != ROWS**2:
        raise fields.refuse("vision_soft_tokens_per_image", f"is not implemented; {ROWS**2} is")
    side = own.count("image_size")
    if own.count("hidden_size") != CHANNELS or side % 256:
        raise own.refuse("hidden_size", f"must be {CHANNELS}, and image_size a multiple of 256")
    return MobileSpec.scaled(Fields(more).number("channel_multiplier", 1.0, least=0.01), side)


def read_audio(fields: Fields, width: int) -> AudioSpec:
    """The tower of ``audio_config``, which gives rows of ``width`` numbers.

    Raises:
        UnsupportedModelError: a value that is not implemented, or inconsistent; names the field.
    """
    own = _part(fields, "audio").with_defaults(
        input_feat_size=128, hidden_size=1536, rms_norm_eps=1e-6, gradient_clipping=1e10, conf_attention_chunk_size=12,
        conf_attention_context_left=13, conf_attention_context_right=0, conf_attention_logit_cap=50.0,
        conf_num_attention_heads=8, conf_num_hidden_layers=12, conf_conv_kernel_size=5, conf_reduction_factor=4,
        conf_residual_weight=0.5, sscp_conv_channel_size=[128, 32], sscp_conv_group_norm_eps=1e-3,
        sscp_conv_kernel_size=[[3, 3], [3, 3]], sscp_conv_stride_size=[[2, 2], [2, 2]],
    )  # fmt: skip
    for name, wanted in (("sscp_conv_kernel_size", [[3, 3]] * 2), ("sscp_conv_stride_size", [[2, 2]] * 2)):
        if [list(each) if isinstance(each, list | tuple) else each for each in own[name] or ()] != wanted:
            raise own.refuse(name, f"is not implemented; {wanted} is")
    hidden, heads, channels = (
        own.count("hidden_size"),
        own.count("conf_num_attention_heads"),
        own["sscp_conv_channel_size"],
    )
    if hidden % heads or hidden % 2:
        raise own.refuse("conf_num_attention_heads", f"does not divide hidden_size = {hidden}, which must be even")
    if not isinstance(channels, list | tuple) or len(channels) != 2:
        raise own.refuse("sscp_conv_channel_size", "must be two numbers")
    past, future = own.count("conf_attention_context_left"), own.whole("conf_attention_context_right")
    return AudioSpec(
        names=_NAMES,
        mel_bins=own.count("input_feat_size"),
        channels=(channels[0], channels[1]),
        hidden_size=hidden,
        num_heads=heads,
        num_layers=own.count("conf_num_hidden_layers"),
        activation="silu",
        past=past,
        future=future,
        span=past,
        placed=past + future,
        key_scale=1.0,
        soft_cap=own.number("conf_attention_logit_cap"),
        hidden_score=torch.finfo(torch.float32).min,
        kernel=own.count("conf_conv_kernel_size"),
        residual_weight=own.number("conf_residual_weight"),
        limit=own.number("gradient_clipping", least=0),
        clipped=False,
        eps=own.number("rms_norm_eps", least=0),
        first_eps=own.number("sscp_conv_group_norm_eps", least=0),
        cumulative=True,
        out=0,
        reduces=own.count("conf_reduction_factor"),
        width=width,
    )
