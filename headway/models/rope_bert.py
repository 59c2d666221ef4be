"""BERT's blocks with rotary positions: NomicBERT (Nussbaum et al. 2024), Jina v3, GTE; and with a bias by distance: Jina v2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.models.encoder import EmbeddingSpec, EncoderBlockSpec, EncoderConfig, EncoderModel
from headway.models.encoder_config import DENSE_HEADS, HeadLayers, kind_of, read_outputs, read_sizes
from headway.models.fields import Fields
from headway.models.heads import HeadLayer
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.adapters import AdapterSpec
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec
from headway.models.position_bias import PositionBiasSpec
from headway.models.rope import read_rope


def _rope_bert(
    fields: Fields,
    *,
    mixer: str,
    mlp: MLPSpec,
    bias: bool,
    prefixes: tuple[str, ...],
    heads: Mapping[str, HeadLayers],
    method: str = "cls",
) -> EncoderConfig:
    """What these models have in common, under the names that nomic-ai gave their parts and transformers writes.

    Args:
        mixer: name of attention in a block.
        mlp: without its size and activation.
        bias: attention's products have one.
        heads: beside those of one layer.
    """
    sizes = read_sizes(fields)
    if fields.get("head_dim") not in (None, sizes.head_dim):
        raise fields.refuse(
            "head_dim", f"is not implemented unless it is {sizes.head_dim}, a head's part of hidden_size"
        )
    block = EncoderBlockSpec(
        mixer=AttentionSpec(
            num_heads=sizes.num_heads, num_kv_heads=sizes.num_heads, head_dim=sizes.head_dim,
            rope=read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position),
            causal=False, qkv_bias=bias, out_bias=bias, names=((f"{mixer}.Wqkv",), f"{mixer}.out_proj"),
        ),
        ffn=replace(mlp, size=sizes.inner, activation=fields.choice("hidden_act", ACTIVATIONS)),
        norms=("norm1", "norm2"),
    )  # fmt: skip
    types = fields.whole("type_vocab_size", 0)
    return EncoderConfig(
        architecture=fields["architectures"][0],
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        longest_context=sizes.max_position,
        embedding=EmbeddingSpec(
            word="embeddings.word_embeddings", token_type="embeddings.token_type_embeddings" if types else "",
            norm="emb_ln", num_token_types=types,
        ),
        blocks=(block,) * sizes.num_layers,
        layers="encoder.layers",
        norm=NormSpec(fields.number("layer_norm_eps", 1e-12, least=0), kind="layer", bias=True),
        outputs=read_outputs(fields, {**DENSE_HEADS, **heads}, method=method),
        prefixes=prefixes,
        unused=("pooler.", "cls.", "lm_head.", "classifier."),
    )  # fmt: skip


def _pooled_head(fields: Fields) -> dict[str, HeadLayers]:
    """BERT's classifier."""
    pooled = HeadLayer(name="pooler.dense", size=fields.count("hidden_size"), activation="tanh")
    return {"classify": (pooled, HeadLayer(name="classifier", size=0))}


def _cls(fields: Fields) -> str:
    """Classifiers of these models read the first token; vectors of texts are means."""
    return "cls" if kind_of(fields["architectures"][0]) == "classify" else "mean"


def _refuse_others(fields: Fields, honoured: Mapping[str, object]) -> None:
    """Fields that must have the one value that is implemented."""
    for name, only in honoured.items():
        if fields.get(name) not in (only, None):
            raise fields.refuse(name, f"is not implemented; {only!r} is")


class NomicBertModel(EncoderModel):
    """NomicBERT; the makers' own files name sizes as GPT-2's do."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        only = {"rotary_emb_interleaved": False, "prenorm": False, "rotary_emb_scale_base": None,
                "rotary_scaling_factor": None, "use_rms_norm": False, "parallel_block": False,
                "rotary_emb_fraction": 1.0}  # fmt: skip
        _refuse_others(fields, only)
        own = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
               "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "rope_theta": "rotary_emb_base",
               "layer_norm_eps": "layer_norm_epsilon"}  # fmt: skip
        fields = fields.with_defaults(**{name: fields[theirs] for name, theirs in own.items() if theirs in fields})
        gates = fields.with_defaults(activation_function="swiglu").choice(
            "activation_function", {"swiglu": "silu", "geglu": "gelu"}
        )
        fields = fields.with_defaults(
            hidden_act=gates, max_position_embeddings=2048, type_vocab_size=2, rope_theta=1000.0
        )
        mlp = MLPSpec(
            size=0, bias=fields.flag("mlp_fc1_bias"), down_bias=fields.flag("mlp_fc2_bias"),
            names=(("mlp.fc12", "mlp.fc11"), "mlp.fc2"),
        )  # fmt: skip
        prefixes, bias = ("nomic_bert.", "bert."), fields.flag("qkv_proj_bias")
        heads = _pooled_head(fields)
        return _rope_bert(fields, mixer="attn", mlp=mlp, bias=bias, prefixes=prefixes, heads=heads, method=_cls(fields))


def _read_adapters(fields: Fields) -> AdapterSpec | None:
    """Jina v3's; None where the files have none."""
    names = fields.get("lora_adaptations")
    if not names:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise fields.refuse("lora_adaptations", "must be a list of different names")
    rank = fields.count("lora_rank")
    return AdapterSpec(names=tuple(names), rank=rank, scale=fields.number("lora_alpha", 1.0, least=0) / rank)


class JinaEmbeddingsV3Model(EncoderModel):
    """Jina v3 (Sturua et al. 2024): as its makers write it, with adapters by task, or as transformers does, without."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        fields = fields.with_defaults(rotary_emb_base=20000.0)
        fields = fields.with_defaults(
            hidden_act="gelu", max_position_embeddings=8194, type_vocab_size=1, layer_norm_eps=1e-5,
            rope_theta=fields.number("rotary_emb_base"),
        )  # fmt: skip
        _refuse_others(fields, {"truncate_dim": None})
        dense = HeadLayer(name="classifier.dense", size=fields.count("hidden_size"), activation="tanh")
        heads: dict[str, tuple[HeadLayer, ...]] = {"classify": (dense, HeadLayer(name="classifier.out_proj", size=0))}
        mlp = MLPSpec(size=0, gated=False, bias=True, names=(("mlp.fc1",), "mlp.fc2"))
        config = _rope_bert(
            fields, mixer="mixer", mlp=mlp, bias=True, prefixes=("roberta.",), heads=heads, method=_cls(fields)
        )
        return replace(config, adapters=_read_adapters(fields))


class GteModel(EncoderModel):
    """GTE (Zhang et al. 2024), whose makers' repositories call it New."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        fields = fields.with_defaults(
            hidden_act="gelu", max_position_embeddings=8192, type_vocab_size=1, rope_theta=160000.0
        )
        _refuse_others(
            fields,
            {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True,
             "logn_attention_scale": False},
        )  # fmt: skip
        mlp = MLPSpec(size=0, bias=False, down_bias=True, up_first=True, names=(("mlp.up_gate_proj",), "mlp.down_proj"))
        heads = _pooled_head(fields)
        config = _rope_bert(fields, mixer="attention", mlp=mlp, bias=True, prefixes=("new.", "gte."), heads=heads)
        block = config.blocks[0]
        block = replace(
            block,
            mixer=replace(block.mixer, names=(("attention.qkv_proj",), "attention.o_proj")),
            norms=("attn_ln", "mlp_ln"),
        )
        embedding = replace(config.embedding, norm="embeddings.LayerNorm")
        return replace(config, blocks=(block,) * len(config.blocks), layers="encoder.layer", embedding=embedding)


class JinaBertModel(EncoderModel):
    """Jina v2 (Guenther et al. 2023): BERT without positions, a bias that falls with the distance, and gated blocks."""

    @staticmethod
    def read(fields: Fields) -> EncoderConfig:
        fields = fields.with_defaults(max_position_embeddings=8192, type_vocab_size=2, feed_forward_type="geglu")
        if fields.get("position_embedding_type") != "alibi":
            raise fields.refuse("position_embedding_type", "is not implemented; 'alibi' is")
        sizes = read_sizes(fields)
        names = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
        block = EncoderBlockSpec(
            mixer=AttentionSpec(
                num_heads=sizes.num_heads, num_kv_heads=sizes.num_heads, head_dim=sizes.head_dim, rope=None, causal=False,
                qkv_bias=True, out_bias=True, names=(names, "attention.output.dense"),
            ),
            ffn=MLPSpec(
                size=sizes.inner, activation=fields.choice("feed_forward_type", {"geglu": "gelu", "reglu": "relu"}),
                bias=False, down_bias=True, names=(("mlp.gated_layers",), "mlp.wo"),
            ),
            norms=("attention.output.LayerNorm", "mlp.layernorm"),
        )  # fmt: skip
        pooled = HeadLayer(name="pooler.dense", size=sizes.hidden_size, activation="tanh")
        heads = {**DENSE_HEADS, "classify": (pooled, HeadLayer(name="classifier", size=0))}
        return EncoderConfig(
            architecture=fields["architectures"][0],
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            longest_context=sizes.max_position,
            embedding=EmbeddingSpec(
                word="embeddings.word_embeddings", token_type="embeddings.token_type_embeddings",
                norm="embeddings.LayerNorm", num_token_types=fields.count("type_vocab_size"),
            ),
            blocks=(block,) * sizes.num_layers,
            layers="encoder.layer",
            norm=NormSpec(fields.number("layer_norm_eps", 1e-12, least=0), kind="layer", bias=True),
            outputs=read_outputs(fields, heads, method="mean"),
            bias=PositionBiasSpec(kind="alibi", num_heads=sizes.num_heads),
            prefixes=("bert.",),
            unused=("pooler.", "cls.", "classifier."),
        )  # fmt: skip
