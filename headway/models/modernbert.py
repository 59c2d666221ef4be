"""ModernBERT (Warner et al. 2024): norms before the parts, rotary positions, most layers see their neighbourhood alone."""

from __future__ import annotations

from dataclasses import replace

from headway.models.config import FULL, SLIDING, layer_kinds, read_ropes
from headway.models.encoder import EmbeddingSpec, EncoderBlockSpec, EncoderConfig, EncoderModel
from headway.models.encoder_config import read_outputs, read_sizes
from headway.models.fields import Fields
from headway.models.heads import HeadLayer
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec


class ModernBertModel(EncoderModel):
    """ModernBERT."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        fields = fields.with_defaults(
            hidden_activation="gelu", max_position_embeddings=8192, local_attention=128, global_attn_every_n_layers=3,
            global_rope_theta=160000.0, local_rope_theta=10000.0, classifier_pooling="cls", classifier_activation="gelu",
        )  # fmt: skip
        sizes, norm_bias = read_sizes(fields), fields.flag("norm_bias")
        eps, hidden, biased = fields.number("norm_eps", 1e-5, least=0), sizes.hidden_size, fields.flag("attention_bias")
        ropes = read_ropes(
            fields, full_theta=fields.number("global_rope_theta"), sliding_theta=fields.number("local_rope_theta")
        )
        period = fields.count("global_attn_every_n_layers")
        given = fields.get("layer_types")
        kinds = layer_kinds(fields, 1) if given else [SLIDING if i % period else FULL for i in range(sizes.num_layers)]
        window = fields.count("local_attention") // 2 + 1
        mixer = AttentionSpec(
            num_heads=sizes.num_heads, num_kv_heads=sizes.num_heads, head_dim=sizes.head_dim, rope=ropes[FULL],
            causal=False, qkv_bias=biased, out_bias=biased, names=(("attn.Wqkv",), "attn.Wo"),
        )  # fmt: skip
        block = EncoderBlockSpec(
            mixer=mixer,
            ffn=MLPSpec(
                size=sizes.inner, activation=fields.choice("hidden_activation", ACTIVATIONS),
                bias=fields.flag("mlp_bias"), names=(("mlp.Wi",), "mlp.Wo"),
            ),
            norms=("attn_norm", "mlp_norm"),
            before=True,
        )  # fmt: skip
        near = replace(block, mixer=replace(mixer, window=window, rope=ropes[SLIDING]))
        blocks = [near if kind == SLIDING else block for kind in kinds]
        blocks[0] = replace(blocks[0], norms=("", "mlp_norm"))  # the embedding has been normalised
        dense = HeadLayer(
            name="head.dense", size=hidden, activation=fields.choice("classifier_activation", ACTIVATIONS),
            bias=fields.flag("classifier_bias"), norm="head.norm", norm_bias=norm_bias, eps=eps,
        )  # fmt: skip
        labels = (dense, HeadLayer(name="classifier", size=0))
        words = (dense, HeadLayer(name="decoder", size=sizes.vocab_size, tied=True))
        pooling = fields.choice("classifier_pooling", {"cls": "cls", "mean": "mean"})
        heads = {"embed": (), "classify": labels, "token_classify": labels, "sparse": words}
        return EncoderConfig(
            architecture=fields["architectures"][0],
            vocab_size=sizes.vocab_size,
            hidden_size=hidden,
            longest_context=sizes.max_position,
            embedding=EmbeddingSpec(word="embeddings.tok_embeddings", norm="embeddings.norm"),
            blocks=tuple(blocks),
            layers="layers",
            norm=NormSpec(eps, kind="layer", bias=norm_bias),
            last_norm="final_norm",
            outputs=read_outputs(fields, heads, method=pooling),
            prefixes=("model.",),
            unused=("head.", "decoder.", "classifier."),
        )
