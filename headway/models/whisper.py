"""Whisper (Radford et al. 2022): log-mel spectrograms of 30 s to text, in many languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.decoder import DecoderNames
from headway.models.encoder import EncoderBlockSpec
from headway.models.encoder_decoder import EncoderDecoderConfig, EncoderDecoderModel, Front, Positions, StackSpec
from headway.models.fields import Fields
from headway.models.interface import EncoderInput, EncoderSpec, Target
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.cross import CrossSpec
from headway.models.layers.mixer import parameter
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec

FRAMES_PER_OUTPUT = 2
"""The second convolution has a stride of two."""
EPS = 1e-5
_PRODUCTS = (("q_proj", "k_proj", "v_proj"), "out_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpectrogramFront:
    """Two convolutions, and positions.

    Attributes:
        mel_bins: rows of a spectrogram.
        outputs: of a window of ``FRAMES_PER_OUTPUT`` times as many frames; all windows have these.
        hidden_size: E.
    """

    mel_bins: int
    outputs: int
    hidden_size: int
    shares_embedding: ClassVar[bool] = False

    @property
    def takes(self) -> EncoderSpec:
        """Spectrograms of whole windows, float32 [mel_bins, frames]."""
        frames = FRAMES_PER_OUTPUT * self.outputs
        words = FRAMES_PER_OUTPUT * self.mel_bins
        return EncoderSpec(kind="audio", longest=self.outputs, words_per_row=words, sizes=(self.mel_bins, frames))

    def make(self, model: EncoderDecoderModel, *, dtype: torch.dtype, device: torch.device) -> Front:
        """See ``FrontSpec``."""
        return Convolutions(self, dtype=dtype, device=device)


class Convolutions(nn.Module):
    """gelu(conv(gelu(conv(spectrogram)))) + positions."""

    def __init__(self, spec: SpectrogramFront, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        size = spec.hidden_size
        self.first = parameter(size, spec.mel_bins, 3, dtype=dtype, device=device)
        self.first_bias = parameter(size, dtype=dtype, device=device)
        self.second = parameter(size, size, 3, dtype=dtype, device=device)
        self.second_bias = parameter(size, dtype=dtype, device=device)
        self.positions = parameter(spec.outputs, size, dtype=dtype, device=device)

    def forward(self, inputs: Sequence[EncoderInput], starts: torch.Tensor) -> torch.Tensor:
        """[N, E]; see ``Front``."""
        frames = FRAMES_PER_OUTPUT * self.spec.outputs
        shape = (self.spec.mel_bins, frames)
        mel = torch.stack([each.data.view(torch.float32).view(shape) for each in inputs]).to(self.dtype)
        x = F.gelu(F.conv1d(mel, self.first, self.first_bias, padding=1))
        x = F.gelu(F.conv1d(x, self.second, self.second_bias, stride=FRAMES_PER_OUTPUT, padding=1))
        return (x.transpose(1, 2) + self.positions).flatten(0, 1)

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        tensors = {
            "conv1.weight": self.first,
            "conv1.bias": self.first_bias,
            "conv2.weight": self.second,
            "conv2.bias": self.second_bias,
            "embed_positions.weight": self.positions,
        }
        return {f"model.encoder.{name}": Target(tensor) for name, tensor in tensors.items()}


class WhisperForConditionalGeneration(EncoderDecoderModel):
    """Tensor names: model.encoder.layers.N.*, model.decoder.layers.N.*; keys have no bias, the output layer is the
    embedding."""

    @classmethod
    def read(cls, fields: Fields) -> EncoderDecoderConfig:
        fields.flag("is_encoder_decoder")
        hidden, outputs = fields.count("d_model"), fields.count("max_source_positions")
        context = fields.count("max_target_positions")
        fields = fields.with_defaults(activation_function="gelu", tie_word_embeddings=True)
        fields.get("scale_embedding")  # Whisper never scales: neither its makers' code nor transformers' reads it
        if not fields.flag("tie_word_embeddings"):
            raise fields.refuse("tie_word_embeddings", "is not implemented; Whisper's output layer is its embedding")
        activation = fields.choice("activation_function", ACTIVATIONS)
        heads = fields.count("decoder_attention_heads")
        encoder_heads = fields.count("encoder_attention_heads")
        for name, count in (("decoder_attention_heads", heads), ("encoder_attention_heads", encoder_heads)):
            if hidden % count:
                raise fields.refuse(name, f"does not divide d_model={hidden}")
        attention = AttentionSpec(
            num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, rope=None, qkv_bias=True, out_bias=True,
            unbiased=("k_proj",), names=_PRODUCTS,
        )  # fmt: skip
        cross = CrossSpec(
            num_heads=heads, head_dim=hidden // heads, encoder_size=hidden, encoder_tokens=outputs, bias=True,
            unbiased=("k_proj",),
        )  # fmt: skip
        inner = fields.count("decoder_ffn_dim")
        mlp = MLPSpec(size=inner, activation=activation, gated=False, bias=True, names=(("fc1",), "fc2"))
        first = BlockNames(before_mixer="self_attn_layer_norm", mixer="self_attn", before_ffn="", ffn="")
        second = BlockNames(
            before_mixer="encoder_attn_layer_norm", mixer="encoder_attn", before_ffn="final_layer_norm", ffn=""
        )
        layer = (BlockSpec(mixer=attention, ffn=None, names=first), BlockSpec(mixer=cross, ffn=mlp, names=second))
        return EncoderDecoderConfig(
            architecture=fields["architectures"][0],
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            longest_context=context,
            blocks=layer * fields.count("decoder_layers"),
            norm=NormSpec(EPS, "layer", bias=True),
            tie_word_embeddings=True,
            eos_token_ids=fields.token_ids("eos_token_id"),
            names=DecoderNames(
                embedding="model.decoder.embed_tokens",
                layers="model.decoder.layers",
                norm="model.decoder.layer_norm",
                head="proj_out",
                blocks_per_layer=2,
            ),
            positions=Positions(name="model.decoder.embed_positions", rows=context),
            front=SpectrogramFront(mel_bins=fields.count("num_mel_bins"), outputs=outputs, hidden_size=hidden),
            stack=_stack(fields, hidden, outputs, encoder_heads, activation),
        )


def _stack(fields: Fields, hidden: int, outputs: int, heads: int, activation: str) -> StackSpec:
    products, out = _PRODUCTS
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, rope=None, causal=False, qkv_bias=True,
        out_bias=True, unbiased=("self_attn.k_proj",),
        names=(tuple(f"self_attn.{name}" for name in products), f"self_attn.{out}"),
    )  # fmt: skip
    inner = fields.count("encoder_ffn_dim")
    mlp = MLPSpec(size=inner, activation=activation, gated=False, bias=True, names=(("fc1",), "fc2"))
    norms = ("self_attn_layer_norm", "final_layer_norm")
    block = EncoderBlockSpec(mixer=attention, ffn=mlp, norms=norms, before=True)
    return StackSpec(
        hidden_size=hidden,
        longest=outputs,
        blocks=(block,) * fields.count("encoder_layers"),
        layers="model.encoder.layers",
        norm=NormSpec(EPS, "layer", bias=True),
        last_norm="model.encoder.layer_norm",
    )
