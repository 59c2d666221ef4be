"""DistilBERT (Sanh et al. 2019): BERT's blocks under other names, no types of tokens."""

from __future__ import annotations

from headway.models.encoder import EmbeddingSpec, EncoderBlockSpec, EncoderConfig, EncoderModel
from headway.models.encoder_config import DENSE_HEADS, read_outputs, read_sizes
from headway.models.fields import Fields
from headway.models.heads import HeadLayer
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec

EPS = 1e-12


class DistilBertModel(EncoderModel):
    """DistilBERT."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        own = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
               "intermediate_size": "hidden_dim"}  # fmt: skip
        fields = fields.with_defaults(
            **{name: fields[theirs] for name, theirs in own.items() if theirs in fields},
            activation="gelu", max_position_embeddings=512,
        )  # fmt: skip
        sizes = read_sizes(fields)
        names = tuple(f"attention.{name}" for name in ("q_lin", "k_lin", "v_lin"))
        block = EncoderBlockSpec(
            mixer=AttentionSpec(
                num_heads=sizes.num_heads, num_kv_heads=sizes.num_heads, head_dim=sizes.head_dim, rope=None, causal=False,
                qkv_bias=True, out_bias=True, names=(names, "attention.out_lin"),
            ),
            ffn=MLPSpec(
                size=sizes.inner, activation=fields.choice("activation", ACTIVATIONS), gated=False, bias=True,
                names=(("ffn.lin1",), "ffn.lin2"),
            ),
            norms=("sa_layer_norm", "output_layer_norm"),
        )  # fmt: skip
        hidden = sizes.hidden_size
        classify = (
            HeadLayer(name="pre_classifier", size=hidden, activation="relu"),
            HeadLayer(name="classifier", size=0),
        )
        words = (
            HeadLayer(name="vocab_transform", size=hidden, activation="gelu", norm="vocab_layer_norm", eps=EPS),
            HeadLayer(name="vocab_projector", size=sizes.vocab_size, tied=True),
        )
        return EncoderConfig(
            architecture=fields["architectures"][0],
            vocab_size=sizes.vocab_size,
            hidden_size=hidden,
            longest_context=sizes.max_position,
            embedding=EmbeddingSpec(
                word="embeddings.word_embeddings", position="embeddings.position_embeddings", norm="embeddings.LayerNorm",
                num_positions=sizes.max_position,
            ),
            blocks=(block,) * sizes.num_layers,
            layers="transformer.layer",
            norm=NormSpec(EPS, kind="layer", bias=True),
            outputs=read_outputs(fields, {**DENSE_HEADS, "classify": classify, "sparse": words}),
            prefixes=("distilbert.",),
            unused=("vocab_", "classifier.", "pre_classifier."),
        )  # fmt: skip
