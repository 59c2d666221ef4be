"""Differences that are transformers', or that are right as they are: each with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

Fields = Mapping[str, Any]


def _conv_sizes_differ(fields: Fields) -> bool:
    heads = fields.get("linear_num_key_heads") or fields["num_attention_heads"]
    values = fields.get("linear_num_value_heads") or fields["num_attention_heads"]
    return heads * (fields.get("linear_key_head_dim") or 0) != values * (fields.get("linear_value_head_dim") or 0)


def _of_mpt(fields: Fields) -> bool:
    slopes = (fields.get("attn_config") or {}).get("alibi_bias_max", 8)
    return bool(slopes != 8 or fields.get("expansion_ratio", 4) != 4)


KNOWN: Final[tuple[tuple[str, Callable[[Fields], bool], str], ...]] = (
    ("Falcon(For|Model)", lambda fields: bool(fields.get("alibi")), "transformers rounds Falcon's ALiBi to bfloat16"),
    ("Mpt(For|Model)", _of_mpt, "transformers reads neither MPT's alibi_bias_max nor its expansion_ratio"),
    ("OlmoHybrid", _conv_sizes_differ, "transformers saves the convolution cut in three equal parts"),
    (
        "Gemma(For|Model)",
        lambda fields: fields.get("hidden_act") == "gelu",
        "exporters wrote gelu, and meant its tanh form",
    ),
)
"""(part of an architecture's name, fields, why)."""


def reason(architecture: str, fields: Fields) -> str:
    """Why a difference of such a model is none of ours; "" for none."""
    own = fields.get("text_config", fields)
    return next((why for name, applies, why in KNOWN if re.match(name, architecture) and applies(own)), "")
