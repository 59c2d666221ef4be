"""Models of Mamba layers alone: Mamba, Falcon Mamba, Mamba-2 (also Codestral Mamba)."""

from __future__ import annotations

from headway.core.errors import UnsupportedModelError
from headway.models.blocks import BlockNames, BlockSpec
from headway.models.decoder import DecoderConfig, DecoderModel, DecoderNames
from headway.models.fields import Fields
from headway.models.layers.mamba import Mamba2Spec, MambaSpec
from headway.models.layers.mixer import MixerSpec
from headway.models.layers.norm import NormSpec

LONGEST = 65_536
"""Such models have no positions, so no limit but memory: a slot keeps the tokens it has seen."""
NAMES = DecoderNames(embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f")


def read_stack(fields: Fields, mixer: MixerSpec) -> DecoderConfig:
    """``num_hidden_layers`` blocks of a norm and ``mixer``."""
    if fields.with_defaults(hidden_act="silu")["hidden_act"] not in ("silu", "swish"):
        raise fields.refuse("hidden_act", "is not implemented in Mamba layers; silu is")
    block = BlockSpec(mixer=mixer, ffn=None, names=BlockNames(before_mixer="norm", mixer="mixer"))
    return DecoderConfig(
        architecture=fields["architectures"][0],
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        longest_context=LONGEST,
        blocks=(block,) * fields.count("num_hidden_layers"),
        norm=NormSpec(fields.with_defaults(layer_norm_epsilon=1e-5).number("layer_norm_epsilon", least=0)),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        names=NAMES,
    )


def read_mamba(fields: Fields, *, norms: str = "", norm_eps: float = 1e-6) -> MambaSpec:
    """A Mamba-1 mixer with the field names of MambaConfig."""
    fields = fields.with_defaults(state_size=16, conv_kernel=4, use_conv_bias=True, expand=2)
    hidden = fields.count("hidden_size")
    inner = fields.get("intermediate_size")
    rank = fields.get("time_step_rank")
    return MambaSpec(
        inner=int(fields.number("expand") * hidden) if inner is None else fields.count("intermediate_size"),
        state_size=fields.count("state_size"),
        rank=-(-hidden // 16) if rank in (None, "auto") else fields.count("time_step_rank"),
        taps=fields.count("conv_kernel"),
        bias=fields.flag("use_bias"),
        conv_bias=fields.flag("use_conv_bias"),
        norms=norms,
        norm_eps=norm_eps,
        state_dtype=read_state_dtype(fields),
    )


def read_state_dtype(fields: Fields) -> str:
    """What a config.json says of recurrent states, by the names that releases and vLLM have for it; "": nothing."""
    for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        value = fields.get(name)
        if value not in (None, "auto"):
            if value not in ("float32", "bfloat16", "float16"):
                raise fields.refuse(name, "must be float32, bfloat16 or float16")
            return str(value)
    return ""


def read_limits(fields: Fields) -> tuple[float, float]:
    """(least, most) of time steps; config.json writes infinity as a string, an object or a bare word."""
    name = "time_step_limit"
    value = fields.get(name)
    if value is None:
        return 0.0, float("inf")
    try:
        least, most = (float(each["__float__"] if isinstance(each, dict) else each) for each in value)
    except (KeyError, TypeError, ValueError) as error:
        raise fields.refuse(name, "is not a pair of numbers") from error
    if not 0 <= least <= most:
        raise fields.refuse(name, "must rise from 0 or more")
    return least, most


def check_groups(num_heads: int, num_groups: int) -> None:
    """Raises UnsupportedModelError unless heads can be dealt out to groups."""
    if num_heads % num_groups:
        raise UnsupportedModelError(
            f"config.json: {num_heads} Mamba heads cannot be shared out to n_groups={num_groups}; it must divide them"
        )


class MambaForCausalLM(DecoderModel):
    """Mamba (Gu and Dao 2023)."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(tie_word_embeddings=True)
        return read_stack(fields, read_mamba(fields))


class FalconMambaForCausalLM(DecoderModel):
    """Falcon Mamba: time steps, b and c are normalised, without weights."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(tie_word_embeddings=True, mixer_rms_eps=1e-6)
        eps = fields.number("mixer_rms_eps", least=0)
        return read_stack(fields, read_mamba(fields, norms="plain", norm_eps=eps))


class Mamba2ForCausalLM(DecoderModel):
    """Mamba-2 (Dao and Gu 2024)."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            num_heads=128, head_dim=64, state_size=128, n_groups=8, conv_kernel=4, expand=2, layer_norm_epsilon=1e-5,
            use_conv_bias=True,
        )  # fmt: skip
        heads, size, groups = (fields.count(name) for name in ("num_heads", "head_dim", "n_groups"))
        if heads * size != fields.number("expand") * fields.count("hidden_size"):
            raise fields.refuse("expand", f"times hidden_size must be num_heads * head_dim = {heads * size}")
        check_groups(heads, groups)
        mixer = Mamba2Spec(
            num_heads=heads,
            head_dim=size,
            state_size=fields.count("state_size"),
            num_groups=groups,
            taps=fields.count("conv_kernel"),
            bias=fields.flag("use_bias"),
            out_bias=fields.flag("use_bias"),
            conv_bias=fields.flag("use_conv_bias"),
            limits=read_limits(fields),
            norm_eps=fields.number("layer_norm_epsilon", least=0),
            state_dtype=read_state_dtype(fields),
        )
        return read_stack(fields, mixer)
