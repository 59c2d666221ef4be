"""``DecoderConfig``: the numbers of a decoder, read from a config.json and checked before any weight is touched.

The rule: a field that changes the arithmetic is either honoured or refused by name. Unknown fields are assumed to be
remarks; ``_NEUTRAL`` lists those known to change the arithmetic of some model, with the values that leave it alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from headway.core.errors import UnsupportedModelError
from headway.models.rope import RopeConfig, read_rope


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder of the Llama family, every default resolved.

    Attributes:
        architecture: the name in config.json, a key of ``models.registry``.
        num_heads, num_kv_heads, head_dim: H, KH, D.
        max_position_embeddings: the context the model says it has.
        windows: per layer, how many tokens back a query sees (itself included), 0 for all; None: no layer is limited.
        qkv_bias, o_bias, mlp_bias: which projections have biases.
        qk_norm: queries and keys are normalised per head before the rotation.
        tie_word_embeddings: the output matrix is the embedding.
        eos_token_ids: of config.json; generation_config.json may name more.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int, ...] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"config.json: num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise UnsupportedModelError(
                f"config.json: layer_types names {len(self.windows)} layers, num_hidden_layers={self.num_layers}"
            )

    @property
    def longest_context(self) -> int:
        """Tokens up to which the rotary embedding was stretched; at least max_position_embeddings.

        "dynamic" does not count as stretched: a longer engine would change what short sequences get (``models.rope``),
        so going beyond the original context is the user's choice.
        """
        stretched = {"linear": self.max_position_embeddings, "yarn": self.rope.original_len}
        return max(self.max_position_embeddings, int(stretched.get(self.rope.kind, 0) * self.rope.factor))


class KVSpec(TypedDict):
    """The model's part of ``KVPool``'s arguments."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def kv_spec(config: DecoderConfig) -> KVSpec:
    """Shape of the model's KV cache: ``KVPool(num_blocks=..., **kv_spec(config))``."""
    return KVSpec(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a config.json of one architecture means where it is silent, and which optional parts the architecture has.

    Attributes:
        defaults: values of absent fields, where they differ from ``_DEFAULTS``.
        qkv_bias, o_bias, mlp_bias: fixed, or the name of the boolean field that decides.
        qk_norm: per-head norms on queries and keys.
        window_switch: field that must be true for ``sliding_window`` to mean anything; None: it always does; "": never
            (layer_types may still ask for it).
        refused: fields other families honour and this one does not: must be absent, null or false.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window_switch: str | None = ""
    refused: tuple[str, ...] = ()


_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_window_layers": 28,
}

_OFF = (None, False)
_ONE = (None, 1)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "quantization_config": (None,),
    "compression_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": _ONE,
    "residual_multiplier": _ONE,
    "logits_scaling": _ONE,
    "logit_scale": _ONE,
    "scale_emb": _ONE,
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "use_qk_norm": _OFF,
    "qk_layernorm": _OFF,
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None,),
    "attention_chunk_size": (None,),
    "num_kv_shared_layers": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "is_causal": (None, True),
    "use_bidirectional_attention": _OFF,
    "is_encoder_decoder": _OFF,
    "add_cross_attention": _OFF,
    "alibi": _OFF,
    "use_parallel_residual": _OFF,
    "parallel_attn": _OFF,
    "use_mrope": _OFF,
    "rope_interleaved": _OFF,
    "rope_interleave": _OFF,
    "use_mamba": _OFF,
}


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a config.json, in the form of any transformers version.

    Raises:
        UnsupportedModelError: an architecture, field or value that is not implemented, or is inconsistent; names it.
    """
    from headway.models.registry import model_class  # architectures import this module

    names = config.get("architectures") or []
    if len(names) != 1:
        raise UnsupportedModelError(f"config.json must name one architecture in 'architectures', got {names!r}")
    return read_config(names[0], config, model_class(names[0]).family)


def read_config(architecture: str, config: Mapping[str, Any], family: Family) -> DecoderConfig:
    """``decoder_config`` once the architecture's family is known."""
    fields = dict(_DEFAULTS) | dict(family.defaults) | dict(config)
    for name in family.refused:
        _refuse_unless(fields, name, _OFF)
    for name, neutral in _NEUTRAL.items():
        _refuse_unless(fields, name, neutral)
    num_layers, num_heads = _count(fields, "num_hidden_layers"), _count(fields, "num_attention_heads")
    hidden = _count(fields, "hidden_size")
    if fields.get("head_dim") is None:
        if hidden % num_heads:
            raise UnsupportedModelError(
                f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={num_heads}; set head_dim"
            )
        fields["head_dim"] = hidden // num_heads
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = num_heads
    head_dim, max_position = _count(fields, "head_dim"), _count(fields, "max_position_embeddings")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_count(fields, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_count(fields, "num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=_epsilon(fields),
        max_position_embeddings=max_position,
        rope=read_rope(config, head_dim=head_dim, max_position=max_position),
        windows=_windows(fields, family, num_layers),
        qkv_bias=_flag(fields, family.qkv_bias),
        o_bias=_flag(fields, family.o_bias),
        mlp_bias=_flag(fields, family.mlp_bias),
        qk_norm=family.qk_norm,
        tie_word_embeddings=_flag(fields, "tie_word_embeddings"),
        eos_token_ids=_eos(fields),
    )


def _windows(fields: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...] | None:
    """Per layer the sliding window, 0 for full attention; None when no layer has one."""
    on = not family.window_switch or bool(fields.get(family.window_switch))
    window = fields.get("sliding_window") if on else None
    kinds = fields.get("layer_types")
    if kinds is None:
        if window is None or family.window_switch == "":
            return None
        first = fields["max_window_layers"] if family.window_switch else 0
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r}, which is not implemented")
    if "sliding_attention" not in kinds:
        return None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        switch = f" with {family.window_switch}=true" if family.window_switch else ""
        raise UnsupportedModelError(
            f"config.json: sliding layers need sliding_window >= 1{switch}; got {fields.get('sliding_window')!r}"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _refuse_unless(fields: Mapping[str, Any], name: str, neutral: tuple[Any, ...]) -> None:
    value = fields.get(name)
    if value not in neutral:
        raise UnsupportedModelError(f"config.json: {name} = {value!r:.80} is not implemented")


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json: {name} must be a positive integer, got {value!r:.60}")
    return value


def _epsilon(fields: Mapping[str, Any]) -> float:
    value = fields["rms_norm_eps"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UnsupportedModelError(f"config.json: rms_norm_eps must be a number >= 0, got {value!r:.60}")
    return float(value)


def _flag(fields: Mapping[str, Any], flag: bool | str) -> bool:
    return flag if isinstance(flag, bool) else bool(fields.get(flag))


def _eos(fields: Mapping[str, Any]) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)
