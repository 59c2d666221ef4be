"""Nemotron-H: every layer is one thing: Mamba-2, attention without positions, or a feed-forward block."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import llama_like
from headway.models.decoder import DecoderConfig, DecoderModel, DecoderNames
from headway.models.fields import Fields
from headway.models.hybrid import ATTENTION, STATE
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mamba import Mamba2Spec
from headway.models.layers.mlp import MLPSpec
from headway.models.mamba import check_groups, read_limits

_KINDS = {
    "M": STATE, "*": ATTENTION, "-": "mlp", "E": "moe", STATE: STATE, ATTENTION: ATTENTION, "mamba": STATE,
    "attention": ATTENTION, "mlp": "mlp", "moe": "moe",
}  # fmt: skip


class NemotronHForCausalLM(DecoderModel):
    """Its dense members."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        """The configuration in a config.json; see ``models.interface.Architecture``."""
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
            if kind not in (STATE, ATTENTION, "mlp"):
                raise fields.refuse("layers_block_type", f"has {kind!r}, which is not implemented")
        if fields.with_defaults(mamba_hidden_act="silu")["mamba_hidden_act"] != "silu":
            raise fields.refuse("mamba_hidden_act", "is not implemented; silu is")
        fields = fields.with_defaults(num_hidden_layers=len(kinds), hidden_act=fields["mlp_hidden_act"], rope_theta=1e4)
        if kinds and fields["num_hidden_layers"] != len(kinds):
            raise fields.refuse("num_hidden_layers", f"must be {len(kinds)}, the layers that the pattern names")
        bias, mlp_bias = fields.flag("use_bias"), fields.flag("mlp_bias")
        _ = fields.flag("attention_bias")  # written, but the architecture's attention has none
        for name in ("num_experts", "n_routed_experts", "num_local_experts"):
            fields.get(name)  # of layers that there are not
        config = llama_like(fields, mlp_bias=mlp_bias, eps="layer_norm_epsilon")
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
            limits=read_limits(fields),
            norm_eps=config.norm.eps,
        )
        block = config.blocks[0]
        assert isinstance(block.mixer, AttentionSpec) and isinstance(block.ffn, MLPSpec)
        mlp = replace(block.ffn, gated=False, names=(("up_proj",), "down_proj"))
        names = BlockNames(before_mixer="norm", mixer="mixer", before_ffn="")
        of_kind = {
            STATE: BlockSpec(mixer=mamba, ffn=None, names=names),
            ATTENTION: BlockSpec(mixer=replace(block.mixer, rope=None), ffn=None, names=names),
            "mlp": BlockSpec(mixer=None, ffn=mlp, names=BlockNames(before_mixer="", before_ffn="norm", ffn="mixer")),
        }
        return replace(
            config,
            blocks=tuple(of_kind[kind] for kind in kinds),
            names=DecoderNames(embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f"),
        )
