"""DeepSeek V2, V2-Lite, V3 and R1, and models of their architecture (Kimi-K2, GLM-4-MoE-Lite): latent attention."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from headway.models.blocks import BlockSpec
from headway.models.config import map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.latent import latent_like
from headway.models.layers.indexer import IndexSpec
from headway.models.layers.mla import MLASpec
from headway.models.layers.moe import RouterSpec
from headway.models.mixtures import corrected_router, expert_count, read_mixture, with_mixture
from headway.models.mtp import behind_last, next_layers

SPARSE, DENSE = "sparse", "dense"
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""Fields that say how many there are."""
MIXTURE = MappingProxyType(
    {"n_shared_experts": 1, "moe_intermediate_size": 2048, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
)
"""Defaults that models with DeepSeek-V3's router share."""


def feed_forward_kinds(fields: Fields) -> tuple[str, ...]:
    """Per layer ``SPARSE`` (a mixture of experts) or ``DENSE``: what mlp_layer_types says, else the first
    ``first_k_dense_replace`` layers are dense, and of the others every ``moe_layer_freq``-th is sparse.

    Raises:
        UnsupportedModelError: another kind, or not one for each layer.
    """
    layers, named = fields.count("num_hidden_layers"), fields.get("mlp_layer_types")
    first, every = fields.whole("first_k_dense_replace", 0), fields.whole("moe_layer_freq", 1) or 1
    has_experts = expert_count(fields, *EXPERTS) > 0
    if named is None:
        return tuple(SPARSE if has_experts and i >= first and i % every == 0 else DENSE for i in range(layers))
    if len(named) != layers or any(kind not in (SPARSE, DENSE) for kind in named):
        raise fields.refuse("mlp_layer_types", f"must say {DENSE!r} or {SPARSE!r} for each of {layers} layers")
    return tuple(named)


def read_latent(
    fields: Fields, router: RouterSpec | None, *, interleaved: bool, mlp_bias: bool = False
) -> DecoderConfig:
    """A decoder of DeepSeek's kind; see ``latent_like``. Layers behind the last one predict further
    tokens (``models.mtp``).

    Args:
        router: of its mixtures; None: DeepSeek-V3's.
    """
    config = latent_like(fields, interleaved=interleaved, mlp_bias=mlp_bias)
    config = behind_last(config, next_layers(fields))
    sparse = [layer for layer, kind in enumerate(feed_forward_kinds(fields)) if kind == SPARSE]
    if not sparse:
        return config
    experts = expert_count(fields, *EXPERTS)
    if router is None:
        fields.with_defaults(scoring_func="sigmoid").choice("scoring_func", {"sigmoid": ""})
        fields.with_defaults(topk_method="noaux_tc").choice("topk_method", {"noaux_tc": ""})
        router = corrected_router(fields)
    shared = fields.whole("n_shared_experts", 0) * fields.count("moe_intermediate_size")
    if mlp_bias and fields.get("n_shared_experts") == 0:
        raise fields.refuse(
            "n_shared_experts", "is not implemented with mlp_bias: transformers adds the bias of a block without rows"
        )
    mixture = read_mixture(fields, experts, router, shared=shared)
    if mixture.shared is not None:
        mixture = replace(mixture, shared=replace(mixture.shared, bias=mlp_bias), shared_name="shared_experts")
    return with_mixture(config, sparse, mixture)


def plain_router(fields: Fields) -> RouterSpec:
    """DeepSeek-V2's: a softmax, from some groups alone where ``topk_method`` says so."""
    if fields.flag("norm_topk_prob"):
        raise fields.refuse("norm_topk_prob", "is not implemented: DeepSeek's code and transformers' differ there")
    fields.with_defaults(scoring_func="softmax").choice("scoring_func", {"softmax": ""})
    methods = {"greedy": "", "group_limited_greedy": "groups"}
    limited = fields.with_defaults(topk_method="greedy").choice("topk_method", methods)
    return RouterSpec(
        top_k=fields.count("num_experts_per_tok"),
        renormalise=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=(fields.count("n_group"), fields.count("topk_group"), 1) if limited else None,
    )


class DeepseekV2ForCausalLM(DecoderModel):
    """V2 and V2-Lite."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=2048, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1407, first_k_dense_replace=0,
        )  # fmt: skip
        experts = SPARSE in feed_forward_kinds(fields)
        router = plain_router(fields) if experts else None
        return read_latent(fields, router, interleaved=True, mlp_bias=fields.flag("mlp_bias"))


class DeepseekV3ForCausalLM(DecoderModel):
    """V3, R1, Kimi-K2."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=4096, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, n_routed_experts=256, first_k_dense_replace=3, rope_interleave=True,
            **MIXTURE, n_group=8, topk_group=4, num_experts_per_tok=8, num_nextn_predict_layers=1,
        )  # fmt: skip
        return read_latent(fields, None, interleaved=fields.flag("rope_interleave"))


class YoutuForCausalLM(DecoderModel):
    """Youtu-LLM: the same attention, dense throughout."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=131072, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, rope_interleave=True, rope_theta=1e4, tie_word_embeddings=True,
        )  # fmt: skip
        return latent_like(fields, interleaved=fields.flag("rope_interleave"))


class Glm4MoeLiteForCausalLM(DecoderModel):
    """GLM-4.7-Flash."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=202752, rms_norm_eps=1e-5, kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192,
            qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=64, first_k_dense_replace=1, rope_interleave=True,
            **{**MIXTURE, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8}, n_group=1, topk_group=1,
            num_experts_per_tok=4,
        )  # fmt: skip
        return read_latent(fields, None, interleaved=fields.flag("rope_interleave"))


class DeepseekV32ForCausalLM(DecoderModel):
    """V3.2: an indexer in each layer, whose rotated pairs lie apart."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=163840, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, n_routed_experts=256, first_k_dense_replace=3, **MIXTURE, n_group=8, topk_group=4,
            num_experts_per_tok=8, index_topk=2048, index_head_dim=128, index_n_heads=64,
        )  # fmt: skip
        config = read_latent(fields, None, interleaved=True)
        return with_index(config, fields, ("full",) * len(config.blocks), interleaved=False)


class GlmMoeDsaForCausalLM(DecoderModel):
    """GLM-5: the same, but that pairs are interleaved, and that layers may share what another one has selected."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=202752, rms_norm_eps=1e-5, kv_lora_rank=512, q_lora_rank=2048, qk_nope_head_dim=192,
            qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=256, first_k_dense_replace=3, **MIXTURE, n_group=1,
            topk_group=1, num_experts_per_tok=8, index_topk=2048, index_head_dim=128, index_n_heads=32,
        )  # fmt: skip
        config = read_latent(fields, None, interleaved=True)
        return with_index(config, fields, index_kinds(fields), interleaved=True)


def index_kinds(fields: Fields) -> tuple[str, ...]:
    """Per layer "full" or "shared": what indexer_types says, else index_topk_pattern, else one of every ``index_topk_freq``
    layers from ``index_skip_topk_offset`` on is full, and all before it."""
    layers, pattern = fields.count("num_hidden_layers"), fields.get("index_topk_pattern")
    every = fields.count("index_topk_freq") if fields.get("index_topk_freq") else 1
    offset = int(fields.number("index_skip_topk_offset", 2))
    named = fields.get("indexer_types")
    if named is None and pattern is not None:
        named = [{"F": "full", "S": "shared"}.get(each, each) for each in pattern]
    if named is None:
        named = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    if len(named) != layers or named[0] != "full" or any(each not in ("full", "shared") for each in named):
        raise fields.refuse(
            "indexer_types", f"must say 'full' or 'shared' for each of {layers} layers, of the first 'full'"
        )
    return tuple(named)


def with_index(config: DecoderConfig, fields: Fields, kinds: tuple[str, ...], *, interleaved: bool) -> DecoderConfig:
    """``config`` with the indexer of ``fields`` in each layer, or in those of kind "full".

    Raises:
        UnsupportedModelError: queries have no latent, heads are smaller than what is rotated, or layers are of other kinds.
    """
    rotated, size = fields.count("qk_rope_head_dim"), fields.count("index_head_dim")
    if fields.get("q_lora_rank") is None:
        raise fields.refuse("q_lora_rank", "is not implemented beside an indexer, which reads the queries' latent")
    if size < rotated:
        raise fields.refuse("index_head_dim", f"is less than qk_rope_head_dim={rotated}")
    for kind in fields.get("layer_types") or ():
        if kind not in ("indexed_attention", "deepseek_sparse_attention"):
            raise fields.refuse("layer_types", f"has {kind!r}, which is not implemented")
    heads, top = fields.count("index_n_heads"), fields.count("index_topk")

    def change(layer: int, block: BlockSpec) -> BlockSpec:
        assert isinstance(block.mixer, MLASpec)
        shared = kinds[layer] == "shared"
        index = IndexSpec(num_heads=heads, head_dim=size, top=top, interleaved=interleaved, shared=shared)
        return replace(block, mixer=replace(block.mixer, index=index))

    return map_blocks(config, change)
