"""BERT (Devlin et al. 2019) and what has its blocks: RoBERTa, XLM-RoBERTa, CamemBERT."""

from __future__ import annotations

from dataclasses import replace

from headway.models.encoder import EmbeddingSpec, EncoderBlockSpec, EncoderConfig, EncoderModel
from headway.models.encoder_config import DENSE_HEADS, read_outputs, read_sizes
from headway.models.fields import Fields
from headway.models.heads import HeadLayer
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec
from headway.models.rope_bert import JinaEmbeddingsV3Model

GAMMA_BETA = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""What tensors of norms were called once."""


def bert_like(
    fields: Fields,
    prefix: str,
    *,
    first_position: int,
    head: dict[str, tuple[HeadLayer, ...]],
    project: str = "",
) -> EncoderConfig:
    """A BERT.

    Args:
        prefix: of all names but the heads'.
        first_position: row of the table of positions that the first token has.
        head: layers behind the hidden states, by the architecture's task.
        project: name of the product behind embeddings of another width than hidden states, where there may be such.

    Raises:
        UnsupportedModelError: a field is missing, or its value is not implemented.
    """
    sizes = read_sizes(fields)
    if fields.get("position_embedding_type") not in (None, "absolute"):
        raise fields.refuse("position_embedding_type", "is not implemented; absolute is")
    norm = NormSpec(fields.number("layer_norm_eps", 1e-12, least=0), kind="layer", bias=True)
    names = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
    block = EncoderBlockSpec(
        mixer=AttentionSpec(
            num_heads=sizes.num_heads, num_kv_heads=sizes.num_heads, head_dim=sizes.head_dim, rope=None, causal=False,
            qkv_bias=True, out_bias=True, names=(names, "attention.output.dense"),
        ),
        ffn=MLPSpec(
            size=sizes.inner, activation=fields.choice("hidden_act", ACTIVATIONS), gated=False, bias=True,
            names=(("intermediate.dense",), "output.dense"),
        ),
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
    )  # fmt: skip
    types = fields.with_defaults(type_vocab_size=2).count("type_vocab_size")
    width = fields.with_defaults(embedding_size=sizes.hidden_size).count("embedding_size") if project else 0
    if width == sizes.hidden_size:
        width, project = 0, ""
    return EncoderConfig(
        architecture=fields["architectures"][0],
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        longest_context=sizes.max_position - first_position,
        embedding=EmbeddingSpec(
            word="embeddings.word_embeddings",
            position="embeddings.position_embeddings",
            token_type="embeddings.token_type_embeddings",
            norm="embeddings.LayerNorm",
            num_positions=sizes.max_position,
            first_position=first_position,
            num_token_types=types,
            width=width,
            project=project,
        ),
        blocks=(block,) * sizes.num_layers,
        layers="encoder.layer",
        norm=norm,
        outputs=read_outputs(fields, head),
        prefixes=(prefix,),
        unused=("pooler.", "cls.", "lm_head.", "classifier."),
        renamed=GAMMA_BETA,
    )


class BertModel(EncoderModel):
    """BERT; classifiers have a dense layer with tanh, once trained to predict sentences, before their own."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        fields = fields.with_defaults(hidden_act="gelu", max_position_embeddings=512)
        pooled = HeadLayer(name="pooler.dense", size=fields.count("hidden_size"), activation="tanh")
        eps = fields.number("layer_norm_eps", 1e-12, least=0)
        transform = HeadLayer(
            name="cls.predictions.transform.dense", size=fields.count("hidden_size"), activation="gelu",
            norm="cls.predictions.transform.LayerNorm", eps=eps,
        )  # fmt: skip
        decoder = HeadLayer(
            name="cls.predictions.decoder", size=fields.count("vocab_size"), tied=True, bias_name="cls.predictions.bias"
        )
        head = {"classify": (pooled, HeadLayer(name="classifier", size=0)), "sparse": (transform, decoder)}
        return bert_like(fields, "bert.", first_position=0, head={**DENSE_HEADS, **head})


class RobertaModel(EncoderModel):
    """RoBERTa (Liu et al. 2019): positions are counted behind the padding token's id; no types of tokens that matter."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        if fields.get("position_embedding_type") == "rotary":  # what Jina v3's makers call their files
            return JinaEmbeddingsV3Model.read(fields)
        fields = fields.with_defaults(hidden_act="gelu", max_position_embeddings=512, pad_token_id=1, type_vocab_size=1)
        hidden = fields.count("hidden_size")
        dense = HeadLayer(name="classifier.dense", size=hidden, activation="tanh")
        transform = HeadLayer(
            name="lm_head.dense", size=hidden, activation="gelu", norm="lm_head.layer_norm",
            eps=fields.number("layer_norm_eps", 1e-12, least=0),
        )  # fmt: skip
        decoder = HeadLayer(
            name="lm_head.decoder", size=fields.count("vocab_size"), tied=True, bias_name="lm_head.bias"
        )
        head = {"classify": (dense, HeadLayer(name="classifier.out_proj", size=0)), "sparse": (transform, decoder)}
        first = int(fields.number("pad_token_id", 1, least=0)) + 1
        return bert_like(fields, "roberta.", first_position=first, head={**DENSE_HEADS, **head})


class ElectraModel(EncoderModel):
    """Electra's discriminator (Clark et al. 2020): BERT's blocks, maybe behind narrower embeddings."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        fields = fields.with_defaults(hidden_act="gelu", max_position_embeddings=512, embedding_size=128)
        dense = HeadLayer(name="classifier.dense", size=fields.count("hidden_size"), activation="gelu")
        head = {"classify": (dense, HeadLayer(name="classifier.out_proj", size=0))}
        project = "embeddings_project"
        config = bert_like(fields, "electra.", first_position=0, head={**DENSE_HEADS, **head}, project=project)
        heads = ("discriminator_predictions.", "generator_predictions.", "generator_lm_head.")
        return replace(config, unused=(*config.unused, *heads))
