"""Nemotron-H: every layer is one thing: Mamba-2, attention without positions, or a feed-forward block."""

from __future__ import annotations

from dataclasses import replace

from headway.kernels.expert_mlp import ACTS
from headway.models.blocks import BlockNames, BlockSpec
from headway.models.bloom import without_rope
from headway.models.config import llama_like
from headway.models.decoder import DecoderConfig, DecoderModel, DecoderNames
from headway.models.fields import Fields
from headway.models.hybrid import ATTENTION, STATE, refuse_tied
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mamba import Mamba2Spec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.moe import ExpertNames, MixtureSpec
from headway.models.mamba import check_groups, read_limits, read_state_dtype
from headway.models.mixtures import corrected_router, expert_count, read_mixture

_KINDS = {
    "M": STATE, "*": ATTENTION, "-": "mlp", "E": "moe", STATE: STATE, ATTENTION: ATTENTION, "mamba": STATE,
    "attention": ATTENTION, "mlp": "mlp", "moe": "moe",
}  # fmt: skip


def _mixture(fields: Fields, experts: int, mlp: MLPSpec) -> MixtureSpec:
    """Experts and a shared block like ``mlp``."""
    fields = fields.with_defaults(
        num_experts_per_tok=2, moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=1.0,
    )  # fmt: skip
    names = ExpertNames(products=(("up_proj",), "down_proj"), stacks=("experts.up_proj", "experts.down_proj"))
    mixture = read_mixture(fields, experts, corrected_router(fields), names=names)
    return replace(
        mixture,
        gated=False,
        shared=replace(mlp, size=fields.count("moe_shared_expert_intermediate_size")),
        shared_name="shared_experts",
        latent=0 if fields.get("moe_latent_size") is None else fields.count("moe_latent_size"),
        latent_bias=mlp.bias,
    )


class NemotronHForCausalLM(DecoderModel):
    """Feed-forward blocks are dense, or mixtures of experts that are not gated."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=4096, num_key_value_heads=8, head_dim=128, intermediate_size=21504, ssm_state_size=128,
            mamba_num_heads=128, mamba_head_dim=64, n_groups=8, conv_kernel=4, use_conv_bias=True, layer_norm_epsilon=1e-5,
            mlp_hidden_act="relu2",
        )  # fmt: skip
        pattern = next(
            (
                fields[name]
                for name in ("layers_block_type", "layer_types", "hybrid_override_pattern")
                if fields.get(name)
            ),
            (),
        )
        kinds = [_KINDS.get(kind, kind) for kind in pattern]
        for kind in kinds:
            if kind not in (STATE, ATTENTION, "mlp", "moe"):
                raise fields.refuse("layers_block_type", f"has {kind!r}, which is not implemented")
        if fields.with_defaults(mamba_hidden_act="silu")["mamba_hidden_act"] != "silu":
            raise fields.refuse("mamba_hidden_act", "is not implemented; silu is")
        if fields.choice("mlp_hidden_act", ACTIVATIONS) not in ACTS and "moe" in kinds:
            raise fields.refuse("mlp_hidden_act", "is not implemented in mixtures")
        fields = fields.with_defaults(num_hidden_layers=len(kinds), rope_theta=1e4)
        fields = fields.replaced(hidden_act=fields["mlp_hidden_act"])
        if kinds and fields["num_hidden_layers"] != len(kinds):
            raise fields.refuse("num_hidden_layers", f"must be {len(kinds)}, the layers that the pattern names")
        bias, mlp_bias = fields.flag("use_bias"), fields.flag("mlp_bias")
        _ = fields.flag("attention_bias")  # written, but the architecture's attention has none
        refuse_tied(fields)
        config = llama_like(fields, mlp_bias=mlp_bias, rope=without_rope(fields), eps="layer_norm_epsilon")
        if (limits := read_limits(fields)) != (
            0.0,
            float("inf"),
        ):  # transformers takes time_step_min alone, others neither
            raise fields.refuse("time_step_limit", "is not implemented: implementations disagree")
        heads, groups = fields.count("mamba_num_heads"), fields.count("n_groups")
        check_groups(heads, groups)
        mamba = Mamba2Spec(
            num_heads=heads,
            head_dim=fields.count("mamba_head_dim"),
            state_size=fields.count("ssm_state_size"),
            num_groups=groups,
            taps=fields.count("conv_kernel"),
            bias=bias,
            out_bias=bias,
            conv_bias=fields.flag("use_conv_bias"),
            limits=limits,
            norm_eps=config.norm.eps,
            state_dtype=read_state_dtype(fields),
        )
        block = config.blocks[0]
        assert isinstance(block.mixer, AttentionSpec) and isinstance(block.ffn, MLPSpec)
        mlp = replace(block.ffn, gated=False, names=(("up_proj",), "down_proj"))
        names = BlockNames(before_mixer="norm", mixer="mixer", before_ffn="")
        feeds = BlockNames(before_mixer="", before_ffn="norm", ffn="mixer")
        experts = expert_count(fields, "n_routed_experts", "num_local_experts", "num_experts")
        mixture = _mixture(fields, experts, mlp) if "moe" in kinds else None
        of_kind = {
            STATE: BlockSpec(mixer=mamba, ffn=None, names=names),
            ATTENTION: BlockSpec(mixer=replace(block.mixer, rope=None), ffn=None, names=names),
            "mlp": BlockSpec(mixer=None, ffn=mlp, names=feeds),
            "moe": BlockSpec(mixer=None, ffn=mixture or mlp, names=feeds),
        }
        return replace(
            config,
            blocks=tuple(of_kind[kind] for kind in kinds),
            names=DecoderNames(embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f"),
        )
