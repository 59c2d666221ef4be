"""``Fields``: a config.json that knows which of its fields were read.

The rule: a field that changes the arithmetic is honoured or refused by name. An architecture reads what it honours, in any
order; ``refuse_unread`` then refuses what is left and would change the arithmetic of some model. Unknown fields are assumed to
be remarks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from headway.core.errors import UnsupportedModelError

_OFF = (None, False)
_ONE = (None, 1)
_NONE = (None, 0)
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "hidden_act": ("silu", "swish"),
        "hidden_activation": (None, "silu", "swish"),
        "quantization_config": (None,),
        "compression_config": (None,),
        "attn_logit_softcapping": _NONE,
        "final_logit_softcapping": _NONE,
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
        "attention_bias": _OFF,
        "mlp_bias": _OFF,
        "use_qk_norm": _OFF,
        "qk_layernorm": _OFF,
        "no_rope_layers": (None, []),
        "no_rope_layer_interval": (None,),
        "attention_chunk_size": (None,),
        "num_kv_shared_layers": _NONE,
        "num_experts": _NONE,
        "num_local_experts": _NONE,
        "n_routed_experts": _NONE,
        "is_causal": (None, True),
        "use_bidirectional_attention": _OFF,
        "is_encoder_decoder": _OFF,
        "add_cross_attention": _OFF,
        "alibi": _OFF,
        "position_embedding_type": (None, "absolute", "rope", "rotary"),
        "conv_kernel_size": _NONE,
        "use_parallel_residual": _OFF,
        "parallel_attn": _OFF,
        "use_mrope": _OFF,
        "rope_interleaved": _OFF,
        "rope_interleave": _OFF,
        "rope_local_base_freq": (None,),
        "use_mamba": _OFF,
    }
)
"""Fields known to change the arithmetic of some model -> values that leave it alone."""

_LIST, _OBJECT = (list, tuple), (Mapping,)
SHAPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("attn_type_list", "deepstack_visual_indexes", "full_attn_idxs", "full_attn_layers", "fullatt_block_indexes",
             "indexer_types", "layer_types", "layers_block_type", "mlp_layer_types", "mlp_only_layers", "moe_layers",
             "mrope_section", "no_rope_layers", "sscp_conv_kernel_size", "sscp_conv_stride_size"),
            _LIST,
        ),
        **dict.fromkeys(
            ("attn_config", "audio_config", "linear_attn_config", "per_layer_config", "rope_parameters", "rope_scaling",
             "text_config", "vision_config"),
            _OBJECT,
        ),
    }
)  # fmt: skip
"""Fields that are lists, or objects, or null, whatever the architecture."""


class Fields(Mapping[str, Any]):
    """A config.json, or one of the objects in it. Reading it as a mapping counts as reading, too.

    Args:
        config: as it was parsed.
        defaults: what the architecture takes absent fields for. A field that is null is present.

    Raises:
        UnsupportedModelError: ``config`` is no object. Reading raises it where a field of ``SHAPES`` has another shape.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})) -> None:
        if not isinstance(config, Mapping):
            raise UnsupportedModelError(f"config.json: an object is wanted in place of {config!r:.60}")
        self._values = {**defaults, **config}
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        value, shape = self._values[name], SHAPES.get(name)
        if shape is not None and value is not None and not isinstance(value, shape):
            wanted = "a list" if shape is _LIST else "an object"
            raise UnsupportedModelError(f"config.json: {name} must be {wanted}, got {value!r:.60}")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_defaults(self, **defaults: Any) -> Fields:
        """The same fields, these in place of absent ones; what is read there is read here."""
        found = Fields(self._values, defaults)
        found._read = self._read
        return found

    def replaced(self, **values: Any) -> Fields:
        """The same fields but for these; what is read there is read here."""
        found = Fields({**self._values, **values})
        found._read = self._read
        return found

    def count(self, name: str) -> int:
        """A positive integer.

        Raises:
            UnsupportedModelError: it is absent, or something else. The other readers raise it alike.
        """
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"config.json: {name} must be a positive integer, got {value!r:.60}")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """An integer from 0 on; ``default`` in place of null and absence."""
        value = self.number(name, default, least=0)
        if not value.is_integer():
            raise UnsupportedModelError(f"config.json: {name} must be an integer >= 0, got {value!r:.60}")
        return int(value)

    def number(self, name: str, default: float | None = None, *, least: float = -math.inf) -> float:
        """A finite number from ``least`` on; ``default`` in place of null and absence."""
        value = self.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            limit = "" if least == -math.inf else f" >= {least:g}"
            raise UnsupportedModelError(f"config.json: {name} must be a number{limit}, got {value!r:.60}")
        return float(value)

    def flag(self, name: str) -> bool:
        """A boolean, or an integer for one; false when it is null or absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, int):
            raise UnsupportedModelError(f"config.json: {name} must be true or false, got {value!r:.60}")
        return bool(value)

    def choice(self, name: str, allowed: Mapping[str, str]) -> str:
        """What ``allowed`` maps the field's value to."""
        value = self.get(name)
        if not isinstance(value, str) or value not in allowed:
            raise UnsupportedModelError(
                f"config.json: {name} = {value!r:.80} is not implemented; {', '.join(allowed)} are"
            )
        return allowed[value]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; none when it is null or absent."""
        value = self.get(name)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    def refuse(self, name: str, reason: str) -> UnsupportedModelError:
        """The error to raise for a field's value."""
        return UnsupportedModelError(f"config.json: {name} = {self.get(name)!r:.80} {reason}")

    def refuse_unread(self) -> None:
        """To be called when everything that is honoured has been read.

        Raises:
            UnsupportedModelError: a field that was not read changes the arithmetic of some model; names it.
        """
        for name, neutral in NEUTRAL.items():
            if name not in self._read and name in self._values and self._values[name] not in neutral:
                raise UnsupportedModelError(f"config.json: {name} = {self._values[name]!r:.80} is not implemented")
