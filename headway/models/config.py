"""Reading the config.json of decoders that resemble Llama's: what they have in common, and sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headway.core.errors import UnsupportedModelError
from headway.models.blocks import BlockNames, BlockSpec
from headway.models.decoder import DecoderConfig
from headway.models.fields import Fields
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec
from headway.models.rope import RopeConfig, read_rope


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The numbers every decoder's config.json has.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, KH, D.
        inner: width of the feed-forward blocks.
        max_position: the context the model says it has.
    """

    vocab_size: int
    hidden_size: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int


def read_sizes(fields: Fields) -> Sizes:
    """The numbers; head_dim and num_key_value_heads follow from others where they are null or absent.

    Raises:
        UnsupportedModelError: one is missing or no positive integer, or they do not fit together.
    """
    num_heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    head_dim = None if fields.get("head_dim") is None else fields.count("head_dim")
    if head_dim is None:
        if hidden % num_heads:
            raise UnsupportedModelError(
                f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={num_heads}; set head_dim"
            )
        head_dim = hidden // num_heads
    return Sizes(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        inner=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if fields.get("num_key_value_heads") is None else fields.count("num_key_value_heads"),
        head_dim=head_dim,
        max_position=fields.count("max_position_embeddings"),
    )


def whole_heads(fields: Fields) -> Fields:
    """The fields of a family whose heads share out the hidden states, whatever head_dim says.

    Raises:
        UnsupportedModelError: head_dim says something else.
    """
    size = fields.count("hidden_size") / fields.count("num_attention_heads")
    if fields.get("head_dim") not in (None, size):
        raise fields.refuse("head_dim", f"is not implemented unless it is a head's part of hidden_size, {size:g}")
    return fields


def llama_like(
    fields: Fields,
    *,
    attention_bias: bool = False,
    out_bias: bool | None = None,
    mlp_bias: bool = False,
    qk_norm: Literal["", "head", "all"] = "",
    windows: Sequence[int] | None = None,
    names: BlockNames | None = None,
    rope: RopeConfig | None = None,
    partial: bool = False,
    eps: str = "rms_norm_eps",
) -> DecoderConfig:
    """A decoder of equal blocks with a gated MLP and RMS norms. What an architecture has beyond that it puts into the result
    with ``dataclasses.replace`` or ``with_blocks``.

    Args:
        fields: a config.json, with the architecture's defaults.
        attention_bias, mlp_bias: which products have biases.
        out_bias: of attention's last product, where it is not as its first.
        qk_norm: see ``AttentionSpec``.
        windows: per layer the window of its attention, 0 for none; None: no layer has one.
        names: of the blocks' parts in the checkpoint.
        rope: of all layers; None: the configuration has one for all.
        partial: see ``read_rope``.
        eps: the field that norms have theirs from.

    Raises:
        UnsupportedModelError: a field is missing, or its value is not implemented.
    """
    sizes = read_sizes(fields)
    if rope is None:
        rope = read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position, partial=partial)
    activation = fields.with_defaults(hidden_act="silu").choice("hidden_act", ACTIVATIONS)
    attention = AttentionSpec(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        rope=rope,
        qkv_bias=attention_bias,
        out_bias=attention_bias if out_bias is None else out_bias,
        qk_norm=qk_norm,
    )
    mlp = MLPSpec(size=sizes.inner, activation=activation, bias=mlp_bias)
    block = BlockSpec(mixer=attention, ffn=mlp, names=names or BlockNames())
    if windows is None:
        windows = (0,) * sizes.num_layers
    if len(windows) != sizes.num_layers:
        raise UnsupportedModelError(
            f"config.json: layer_types names {len(windows)} layers, num_hidden_layers={sizes.num_layers}"
        )
    return DecoderConfig(
        architecture=fields["architectures"][0],
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        longest_context=rope.longest_context(sizes.max_position),
        blocks=tuple(replace(block, mixer=replace(attention, window=window)) for window in windows),
        norm=NormSpec(fields.with_defaults(rms_norm_eps=1e-6).number(eps, least=0)),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def layer_windows(
    fields: Fields, *, switch: str | None = None, otherwise: Sequence[str] = ()
) -> tuple[int, ...] | None:
    """Per layer the sliding window, 0 for full attention; None when no layer has one.

    Args:
        switch: field that must be true for ``sliding_window`` to mean anything; None: there is none.
        otherwise: per layer the kind of attention, where layer_types does not say it.

    Raises:
        UnsupportedModelError: an unknown kind of layer, or windowed layers without a window.
    """
    kinds = fields.get("layer_types") or otherwise
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r}, which is not implemented")
    if SLIDING not in kinds:
        return None
    window = fields.get("sliding_window") if switch is None or fields.flag(switch) else None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        wanted = f" with {switch}=true" if switch else ""
        raise UnsupportedModelError(
            f"config.json: sliding layers need sliding_window >= 1{wanted}; got {fields.get('sliding_window')!r}"
        )
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


SLIDING, FULL = "sliding_attention", "full_attention"


def layer_kinds(fields: Fields, period: int) -> tuple[str, ...]:
    """Per layer its kind of attention: what layer_types says, else every ``period``-th layer is full and the others slide.

    Raises:
        UnsupportedModelError: layer_types names more layers, or fewer.
    """
    num_layers = fields.count("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds and len(kinds) != num_layers:
        raise fields.refuse("layer_types", f"names {len(kinds)} layers, num_hidden_layers={num_layers}")
    return tuple(kinds or (FULL if (i + 1) % period == 0 else SLIDING for i in range(num_layers)))


def map_blocks(config: DecoderConfig, change: Callable[[int, BlockSpec], BlockSpec]) -> DecoderConfig:
    """``config`` with each block replaced by what ``change`` makes of (layer, block)."""
    return replace(config, blocks=tuple(change(i, block) for i, block in enumerate(config.blocks)))


def read_ropes(
    fields: Fields, *, full_theta: float, sliding_theta: float, sliding_field: str = ""
) -> dict[str, RopeConfig]:
    """The rotary embeddings of full and of sliding layers, by kind of layer.

    Newer exporters write rope_parameters for each kind. Older ones write rope_theta and rope_scaling, which full layers alone
    have; sliding layers take their base from ``sliding_field``, or are not stretched.

    Args:
        full_theta, sliding_theta: bases where the configuration has none.
        sliding_field: older exporters' field for the base of sliding layers; "": rope_theta.

    Raises:
        UnsupportedModelError: see ``read_rope``.
    """
    sizes = read_sizes(fields)
    by_kind = fields.get("rope_parameters") or {}
    nested = any(isinstance(value, Mapping) for value in by_kind.values())
    outer = {name: fields.get(name) for name in ("partial_rotary_factor", "original_max_position_embeddings")}
    scaling, theta = fields.get("rope_scaling"), fields.get("rope_theta")
    found = {}
    for kind, default in ((FULL, full_theta), (SLIDING, sliding_theta)):
        if nested:
            scaling_of_kind, theta_of_kind = by_kind.get(kind), None
            if isinstance(scaling_of_kind, Mapping) and scaling_of_kind.get("truncate") is False:
                raise UnsupportedModelError(
                    f"config.json: rope_parameters.{kind}.truncate = False: implementations disagree whether it counts for one "
                    "kind of layers; true is implemented"
                )
        elif kind == FULL:
            scaling_of_kind, theta_of_kind = scaling or by_kind, theta
        else:
            scaling_of_kind, theta_of_kind = None, fields.get(sliding_field) if sliding_field else theta
        own = {**outer, "rope_theta": theta_of_kind or default, "rope_parameters": scaling_of_kind or {}}
        found[kind] = read_rope(own, head_dim=sizes.head_dim, max_position=sizes.max_position)
    return found


def upper_layers_slide(fields: Fields, switch: str) -> tuple[str, ...]:
    """Qwen's kinds of layers: those from ``max_window_layers`` on have a window, where ``switch`` is on."""
    num_layers = fields.count("num_hidden_layers")
    if not fields.flag(switch) or fields.get("sliding_window") is None:
        return (FULL,) * num_layers
    least = fields.whole("max_window_layers", 28)
    return tuple(SLIDING if i >= least else FULL for i in range(num_layers))
