"""MPNet (Song et al. 2020): BERT's blocks, with a bias of attention's scores by distance that all layers share."""

from __future__ import annotations

from headway.models.encoder import EmbeddingSpec, EncoderBlockSpec, EncoderConfig, EncoderModel
from headway.models.encoder_config import DENSE_HEADS, read_outputs, read_sizes
from headway.models.fields import Fields
from headway.models.heads import HeadLayer
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec
from headway.models.position_bias import PositionBiasSpec


class MPNetModel(EncoderModel):
    """MPNet."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        fields = fields.with_defaults(hidden_act="gelu", max_position_embeddings=512, relative_attention_num_buckets=32)
        if fields.count("relative_attention_num_buckets") != 32:
            raise fields.refuse("relative_attention_num_buckets", "is not implemented; 32 is")
        sizes = read_sizes(fields)
        eps, hidden = fields.number("layer_norm_eps", 1e-12, least=0), sizes.hidden_size
        names = tuple(f"attention.attn.{name}" for name in "qkv")
        block = EncoderBlockSpec(
            mixer=AttentionSpec(
                num_heads=sizes.num_heads, num_kv_heads=sizes.num_heads, head_dim=sizes.head_dim, rope=None, causal=False,
                qkv_bias=True, out_bias=True, names=(names, "attention.attn.o"),
            ),
            ffn=MLPSpec(
                size=sizes.inner, activation=fields.choice("hidden_act", ACTIVATIONS), gated=False, bias=True,
                names=(("intermediate.dense",), "output.dense"),
            ),
            norms=("attention.LayerNorm", "output.LayerNorm"),
        )  # fmt: skip
        classify = (
            HeadLayer(name="classifier.dense", size=hidden, activation="tanh"),
            HeadLayer(name="classifier.out_proj", size=0),
        )
        words = (
            HeadLayer(name="lm_head.dense", size=hidden, activation="gelu", norm="lm_head.layer_norm", eps=eps),
            HeadLayer(name="lm_head.decoder", size=sizes.vocab_size, tied=True, bias_name="lm_head.bias"),
        )
        first = 2  # whatever pad_token_id says
        return EncoderConfig(
            architecture=fields["architectures"][0],
            vocab_size=sizes.vocab_size,
            hidden_size=hidden,
            longest_context=sizes.max_position - first,
            embedding=EmbeddingSpec(
                word="embeddings.word_embeddings", position="embeddings.position_embeddings", norm="embeddings.LayerNorm",
                num_positions=sizes.max_position, first_position=first,
            ),
            blocks=(block,) * sizes.num_layers,
            layers="encoder.layer",
            norm=NormSpec(eps, kind="layer", bias=True),
            outputs=read_outputs(fields, {**DENSE_HEADS, "classify": classify, "sparse": words}),
            bias=PositionBiasSpec(
                kind="buckets", num_heads=sizes.num_heads, name="encoder.relative_attention_bias",
                num_buckets=fields.count("relative_attention_num_buckets"),
            ),
            prefixes=("mpnet.",),
            unused=("pooler.", "lm_head.", "classifier."),
        )  # fmt: skip
