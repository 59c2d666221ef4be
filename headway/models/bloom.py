"""Decoders with ALiBi in place of positions (Press et al. 2022): Bloom, MPT, and the Falcons, of which some rotate instead."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import llama_like, map_blocks, whole_heads
from headway.models.decoder import DecoderConfig, DecoderModel, DecoderNames
from headway.models.fields import Fields
from headway.models.interface import WeightMap
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec
from headway.models.position_bias import alibi_slopes
from headway.models.rope import RopeConfig
from headway.state.batch import StepBatch

FOUR_TIMES = (("dense_h_to_4h",), "dense_4h_to_h")
FUSED = (("query_key_value",), "dense")
HEAD_BY_HEAD = BlockNames(mixer="self_attention")
TRUNK = DecoderNames(
    embedding="transformer.word_embeddings", layers="transformer.h", norm="transformer.ln_f", head="lm_head"
)


def first_of(fields: Fields, *names: str) -> Any:
    """The value of the first of these fields that is there; all of them are read."""
    found = [fields.get(name) for name in names]
    return next((value for value in found if value is not None), None)


def without_rope(fields: Fields) -> RopeConfig:
    """What ``llama_like`` takes where blocks do not rotate."""
    most = fields.count("max_position_embeddings")
    return RopeConfig(theta=10000.0, rotary_dim=2, original_len=most)


class BloomForCausalLM(DecoderModel):
    """A norm behind the embedding, one tensor of queries, keys and values head by head, biases everywhere."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        self.embedding_norm = config.norm.make(config.hidden_size, dtype=dtype, device=device)

    def _embedded(self, batch: StepBatch) -> torch.Tensor:
        return self.embedding_norm.forward(super()._embedded(batch))

    def weights(self) -> WeightMap:
        """See ``DecoderModel``."""
        own = self.embedding_norm.destinations("transformer.word_embeddings_layernorm.")
        return self._with_entry(super().weights(), own)

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(layer_norm_epsilon=1e-5, tie_word_embeddings=True)
        hidden = first_of(fields, "hidden_size", "n_embed")
        fields = fields.replaced(
            hidden_size=hidden,
            num_hidden_layers=first_of(fields, "n_layer", "num_hidden_layers"),
            num_attention_heads=first_of(fields, "n_head", "num_attention_heads"),
            num_key_value_heads=None,
            intermediate_size=4 * hidden if isinstance(hidden, int) else hidden,
            max_position_embeddings=first_of(fields, "seq_length") or 2048,
        )
        if fields.flag("apply_residual_connection_post_layernorm"):
            raise fields.refuse("apply_residual_connection_post_layernorm", "is not implemented")
        config = llama_like(
            whole_heads(fields),
            attention_bias=True,
            names=HEAD_BY_HEAD,
            rope=without_rope(fields),
            eps="layer_norm_epsilon",
        )
        return with_alibi(
            config,
            MLPSpec(size=4 * config.hidden_size, activation="gelu_tanh", gated=False, bias=True, names=FOUR_TIMES),
        )


def with_alibi(config: DecoderConfig, mlp: MLPSpec, scale: float = 1.0) -> DecoderConfig:
    """Bloom's blocks: ALiBi, whose slopes are multiplied by ``scale``, heads in one tensor, layer norms with biases."""

    def change(_layer: int, block: BlockSpec) -> BlockSpec:
        slopes = tuple(slope * scale for slope in alibi_slopes(block.attention.num_heads))
        return replace(
            block, mixer=replace(block.attention, rope=None, slopes=slopes, names=FUSED, by_head=True), ffn=mlp
        )

    norm = NormSpec(config.norm.eps, kind="layer", bias=True)
    return replace(map_blocks(config, change), norm=norm, names=TRUNK)


class MptForCausalLM(DecoderModel):
    """Layer norms without biases."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            expansion_ratio=4, layer_norm_epsilon=1e-5, tie_word_embeddings=True, no_bias=True, max_seq_len=2048
        )
        attention = Fields(fields.get("attn_config") or {}, {"alibi": True, "alibi_bias_max": 8})
        for name in ("clip_qkv", "qk_ln", "prefix_lm", "attn_uses_sequence_id"):
            if attention.get(name):
                raise attention.refuse(name, "in attn_config is not implemented")
        if not attention.flag("alibi"):
            raise attention.refuse("alibi", "in attn_config: learned positions are not implemented")
        if not fields.flag("no_bias"):
            raise fields.refuse("no_bias", "is not implemented")
        heads, hidden = fields.count("n_heads"), fields.count("d_model")
        inner = int(hidden * fields.number("expansion_ratio", least=1 / hidden))
        fields = fields.replaced(
            hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=None, intermediate_size=inner,
            num_hidden_layers=fields.count("n_layers"),
            max_position_embeddings=fields.count("max_seq_len"),
        )  # fmt: skip
        names = BlockNames(before_mixer="norm_1", mixer="attn", before_ffn="norm_2", ffn="ffn")
        config = llama_like(whole_heads(fields), names=names, rope=without_rope(fields), eps="layer_norm_epsilon")
        mlp = MLPSpec(size=inner, activation="gelu", gated=False, names=(("up_proj",), "down_proj"))
        slopes = _mpt_slopes(heads, attention.number("alibi_bias_max", least=0))
        scale = None if attention.get("softmax_scale") is None else attention.number("softmax_scale", least=0)

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            mixer = replace(block.attention, rope=None, slopes=slopes, scale=scale, names=(("Wqkv",), "out_proj"))
            return replace(block, mixer=mixer, ffn=mlp)

        return replace(
            map_blocks(config, change),
            norm=NormSpec(config.norm.eps, kind="layer"),
            names=DecoderNames(embedding="transformer.wte", layers="transformer.blocks", norm="transformer.norm_f"),
        )


def _mpt_slopes(heads: int, top: float) -> tuple[float, ...]:
    """2 ** (-top i / n) for the next power of two n; where that is not ``heads``, every other one from the second on first."""
    n = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-top * i / n) for i in range(1, n + 1)]
    return tuple(slopes if n == heads else (slopes[1::2] + slopes[::2])[:heads])


class FalconForCausalLM(DecoderModel):
    """ALiBi, scaled as scores are, or rotations; side by side or one after the other; one norm or two."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            layer_norm_epsilon=1e-5, activation="gelu", multi_query=True, parallel_attn=True, max_position_embeddings=2048,
            tie_word_embeddings=True, hidden_act="gelu",
        )  # fmt: skip
        hidden, heads = fields.count("hidden_size"), first_of(fields, "num_attention_heads", "n_head")
        grouped, parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn")
        kv_heads = (
            first_of(fields, "num_kv_heads", "n_head_kv") if grouped else 1 if fields.flag("multi_query") else heads
        )
        inner = fields.get("ffn_hidden_size") or 4 * hidden
        fields = fields.replaced(
            num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner,
            num_hidden_layers=first_of(fields, "num_hidden_layers", "n_layer"),
        )  # fmt: skip
        bias, alibi = fields.flag("bias"), fields.flag("alibi")
        two = (grouped and (fields.get("num_ln_in_parallel_attn") or 2) == 2) or not (grouped or parallel)
        names = replace(HEAD_BY_HEAD, before_mixer="ln_attn", before_ffn="ln_mlp") if grouped and two else HEAD_BY_HEAD
        rope = without_rope(fields) if alibi else None
        config = llama_like(whole_heads(fields), attention_bias=bias, names=names, rope=rope, eps="layer_norm_epsilon")
        activation = fields.choice("activation", ACTIVATIONS)
        mlp = MLPSpec(size=inner, activation=activation, gated=False, bias=bias, names=FOUR_TIMES)
        if alibi:
            config = with_alibi(config, mlp, scale=(hidden // heads) ** -0.5)

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            side_by_side = parallel or grouped
            mixer = replace(block.attention, names=FUSED, by_head=True)
            return replace(block, mixer=mixer, ffn=mlp, parallel=side_by_side, two_norms=side_by_side and two)

        norm = NormSpec(config.norm.eps, kind="layer", bias=True)
        return replace(map_blocks(config, change), norm=norm, names=TRUNK)
