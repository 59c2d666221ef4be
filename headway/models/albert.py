"""ALBERT (Lan et al. 2019): layers share their weights, and embeddings are narrower than hidden states."""

from __future__ import annotations

from headway.models.encoder import EmbeddingSpec, EncoderBlockSpec, EncoderConfig, EncoderModel
from headway.models.encoder_config import DENSE_HEADS, read_outputs, read_sizes
from headway.models.fields import Fields
from headway.models.heads import HeadLayer
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec


class AlbertModel(EncoderModel):
    """ALBERT."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        fields = fields.with_defaults(
            hidden_act="gelu_new", max_position_embeddings=512, type_vocab_size=2, embedding_size=128,
            num_hidden_groups=1, inner_group_num=1,
        )  # fmt: skip
        sizes, groups = read_sizes(fields), fields.count("num_hidden_groups")
        if fields.count("inner_group_num") != 1:
            raise fields.refuse("inner_group_num", "is not implemented; 1 is")
        if fields.get("position_embedding_type") not in (None, "absolute"):
            raise fields.refuse("position_embedding_type", "is not implemented; absolute is")
        layer = "albert_layers.0"
        names = tuple(f"{layer}.attention.{name}" for name in ("query", "key", "value"))
        block = EncoderBlockSpec(
            mixer=AttentionSpec(
                num_heads=sizes.num_heads, num_kv_heads=sizes.num_heads, head_dim=sizes.head_dim, rope=None, causal=False,
                qkv_bias=True, out_bias=True, names=(names, f"{layer}.attention.dense"),
            ),
            ffn=MLPSpec(
                size=sizes.inner, activation=fields.choice("hidden_act", ACTIVATIONS), gated=False, bias=True,
                names=((f"{layer}.ffn",), f"{layer}.ffn_output"),
            ),
            norms=(f"{layer}.attention.LayerNorm", f"{layer}.full_layer_layer_norm"),
        )  # fmt: skip
        pooled = HeadLayer(name="pooler", size=sizes.hidden_size, activation="tanh")
        heads = {**DENSE_HEADS, "classify": (pooled, HeadLayer(name="classifier", size=0))}
        return EncoderConfig(
            architecture=fields["architectures"][0],
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            longest_context=sizes.max_position,
            embedding=EmbeddingSpec(
                word="embeddings.word_embeddings", position="embeddings.position_embeddings",
                token_type="embeddings.token_type_embeddings", norm="embeddings.LayerNorm",
                num_positions=sizes.max_position, num_token_types=fields.count("type_vocab_size"),
                width=fields.count("embedding_size"), project="encoder.embedding_hidden_mapping_in",
            ),
            blocks=(block,) * groups,
            layer_of=tuple(int(i / (sizes.num_layers / groups)) for i in range(sizes.num_layers)),
            layers="encoder.albert_layer_groups",
            norm=NormSpec(fields.number("layer_norm_eps", 1e-12, least=0), kind="layer", bias=True),
            outputs=read_outputs(fields, heads),
            prefixes=("albert.",),
            unused=("pooler.", "predictions.", "sop_classifier.", "classifier."),
        )  # fmt: skip
