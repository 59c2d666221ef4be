"""BART (Lewis et al. 2019) and mBART (Liu et al. 2020): encoders and decoders of text, norms behind the sums or before them."""

from __future__ import annotations

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.decoder import DecoderNames
from headway.models.encoder import EncoderBlockSpec
from headway.models.encoder_decoder import EncoderDecoderConfig, EncoderDecoderModel, Positions, StackSpec
from headway.models.fields import Fields
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.cross import CrossSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec
from headway.models.text_front import TextFront

FIRST_POSITION = 2
"""Rows of the tables of positions that stand for no position."""
_PRODUCTS = ("q_proj", "k_proj", "v_proj")


class BartForConditionalGeneration(EncoderDecoderModel):
    """Tensor names: model.encoder.layers.N.*, model.decoder.layers.N.*, model.shared."""

    before = False

    @classmethod
    def read(cls, fields: Fields) -> EncoderDecoderConfig:
        fields.flag("is_encoder_decoder")
        fields = fields.with_defaults(activation_function="gelu", tie_word_embeddings=True, scale_embedding=False)
        if not fields.flag("tie_word_embeddings"):
            raise fields.refuse("tie_word_embeddings", "is not implemented; the output layer is the embedding")
        before = cls.before
        for name in ("normalize_before", "add_final_layer_norm"):
            if bool(fields.get(name, before)) != before:
                raise fields.refuse(name, f"is not implemented for {fields['architectures'][0]}")
        hidden, context = fields.count("d_model"), fields.count("max_position_embeddings")
        multiplier = hidden**0.5 if fields.flag("scale_embedding") else 1.0
        norm, last = NormSpec(1e-5, "layer", bias=True), "layer_norm" if before else ""
        positions = {
            side: Positions(name=f"model.{side}.embed_positions", rows=context + FIRST_POSITION, first=FIRST_POSITION)
            for side in ("encoder", "decoder")
        }
        return EncoderDecoderConfig(
            architecture=fields["architectures"][0],
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            longest_context=context,
            blocks=_decoder_layer(fields, hidden, context, before=before) * fields.count("decoder_layers"),
            norm=norm,
            tie_word_embeddings=True,
            embedding_multiplier=multiplier,
            eos_token_ids=fields.token_ids("eos_token_id"),
            names=DecoderNames(
                embedding="model.shared",
                layers="model.decoder.layers",
                norm=f"model.decoder.{last}" if last else "",
                head="lm_head",
                blocks_per_layer=2,
            ),
            positions=positions["decoder"],
            embedding_norm="model.decoder.layernorm_embedding",
            logit_bias="final_logits_bias",
            shared=("model.encoder.embed_tokens", "model.decoder.embed_tokens"),
            front=TextFront(
                longest=context,
                multiplier=multiplier,
                positions=positions["encoder"],
                norm=norm,
                norm_name="model.encoder.layernorm_embedding",
            ),
            stack=StackSpec(
                hidden_size=hidden,
                longest=context,
                blocks=(_encoder_block(fields, hidden, before=before),) * fields.count("encoder_layers"),
                layers="model.encoder.layers",
                norm=norm,
                last_norm=f"model.encoder.{last}" if last else "",
            ),
        )


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """With norms before the parts, and one behind all blocks."""

    before = True


def _heads(fields: Fields, name: str, hidden: int) -> int:
    count = fields.count(name)
    if hidden % count:
        raise fields.refuse(name, f"does not divide d_model={hidden}")
    return count


def _mlp(fields: Fields, size: str) -> MLPSpec:
    activation = fields.choice("activation_function", ACTIVATIONS)
    return MLPSpec(size=fields.count(size), activation=activation, gated=False, bias=True, names=(("fc1",), "fc2"))


def _encoder_block(fields: Fields, hidden: int, *, before: bool) -> EncoderBlockSpec:
    heads = _heads(fields, "encoder_attention_heads", hidden)
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, rope=None, causal=False, qkv_bias=True,
        out_bias=True, names=(tuple(f"self_attn.{name}" for name in _PRODUCTS), "self_attn.out_proj"),
    )  # fmt: skip
    norms = ("self_attn_layer_norm", "final_layer_norm")
    return EncoderBlockSpec(mixer=attention, ffn=_mlp(fields, "encoder_ffn_dim"), norms=norms, before=before)


def _decoder_layer(fields: Fields, hidden: int, longest: int, *, before: bool) -> tuple[BlockSpec, BlockSpec]:
    heads = _heads(fields, "decoder_attention_heads", hidden)
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, rope=None, qkv_bias=True, out_bias=True,
        names=(_PRODUCTS, "out_proj"),
    )  # fmt: skip
    cross = CrossSpec(num_heads=heads, head_dim=hidden // heads, encoder_size=hidden, encoder_tokens=longest, bias=True)
    mixing, reading, passing = "self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"
    if before:
        first = BlockNames(before_mixer=mixing, mixer="self_attn", before_ffn="", ffn="")
        second = BlockNames(before_mixer=reading, mixer="encoder_attn", before_ffn=passing, ffn="")
    else:
        first = BlockNames(before_mixer="", mixer="self_attn", after_mixer=mixing, before_ffn="", ffn="")
        second = BlockNames(
            before_mixer="", mixer="encoder_attn", after_mixer=reading, before_ffn="", ffn="", after_ffn=passing
        )
    return (
        BlockSpec(mixer=attention, ffn=None, names=first, post=not before),
        BlockSpec(mixer=cross, ffn=_mlp(fields, "decoder_ffn_dim"), names=second, post=not before),
    )
