"""Kimi Linear (48B-A3B): Kimi delta attention, every fourth layer latent attention without positions, mixtures like V3's."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.deepseek import SPARSE, feed_forward_kinds
from headway.models.fields import Fields
from headway.models.hybrid import ATTENTION, STATE, check_activation, kinds_of, refuse_tied
from headway.models.latent import latent_like
from headway.models.layers.kimi_delta import KimiDeltaSpec
from headway.models.layers.mla import MLASpec
from headway.models.mixtral import NAMES, RESPELLED
from headway.models.mixtures import corrected_router, expert_count, read_mixture, with_mixture

_SAME = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
}  # fmt: skip
"""Fields of released configurations -> those of DeepSeek's."""
_RESPELLED = ((".self_attn.forget_gate.", ".self_attn."), *RESPELLED, (".block_sparse_moe.", ".mlp."))


class KimiLinearForCausalLM(DecoderModel):
    """Heads of queries are one product; the part of a key that other models rotate is shared by all heads here, too."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.replaced(**{ours: fields[theirs] for theirs, ours in _SAME.items() if theirs in fields})
        fields = fields.with_defaults(
            max_position_embeddings=1048576, rms_norm_eps=1e-5, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, num_experts=256, num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=1024,
            norm_topk_prob=True, routed_scaling_factor=2.446, n_group=1, topk_group=1, first_k_dense_replace=1, rope_theta=1e4,
        )  # fmt: skip
        if fields.with_defaults(mla_use_nope=True)["mla_use_nope"] is not True:
            raise fields.refuse("mla_use_nope", "is not implemented; true is")
        if fields.with_defaults(moe_router_activation_func="sigmoid")["moe_router_activation_func"] != "sigmoid":
            raise fields.refuse("moe_router_activation_func", "is not implemented; 'sigmoid' is")
        layers, linear = fields.count("num_hidden_layers"), fields.get("linear_attn_config") or {}
        kinds = kinds_of(fields, _kinds(layers, linear), "layer_types")
        check_activation(fields, kinds)
        refuse_tied(fields)
        own = Fields(linear, {
            "head_dim": fields.get("linear_head_dim", 128), "num_heads": fields.get("linear_num_heads", 32),
            "short_conv_kernel_size": fields.get("linear_conv_kernel_dim", 4),
        })  # fmt: skip
        config = latent_like(fields, interleaved=False)
        delta = KimiDeltaSpec(
            num_heads=own.count("num_heads"),
            head_dim=own.count("head_dim"),
            taps=own.count("short_conv_kernel_size"),
            norm_eps=config.norm.eps,
        )

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            assert isinstance(block.mixer, MLASpec)
            return replace(block, mixer=delta if kinds[layer] == STATE else replace(block.mixer, rope=None))

        config = replace(map_blocks(config, change), respelled=_RESPELLED)
        sparse = [layer for layer, kind in enumerate(feed_forward_kinds(fields)) if kind == SPARSE]
        if not sparse:
            return config
        shared = fields.whole("n_shared_experts", 0) * fields.count("moe_intermediate_size")
        experts = expert_count(fields, "num_local_experts", "num_experts")
        mixture = read_mixture(fields, experts, corrected_router(fields), names=NAMES, shared=shared)
        return with_mixture(config, sparse, replace(mixture, shared_name="shared_experts"))


def _kinds(layers: int, linear: object) -> list[str]:
    """Per layer its kind, where layer_types does not say it: released configurations count the full ones from 1."""
    named = linear.get("full_attn_layers") if isinstance(linear, dict) else None
    full = {i for i in range(layers) if i and i % 4 == 0} if named is None else {i - 1 for i in named}
    return [ATTENTION if i in full else STATE for i in range(layers)]
