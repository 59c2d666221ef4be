"""Draws rotary embeddings: their kind, base and stretching, one for all layers or one for each kind of layer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

LONGEST = 40
"""Tokens of the longest sequence that a walk runs. A draw's original context is as long, or shorter than any prompt: in between
a sequence's frequencies depend on its length, see ``headway.models.rope``."""
SHORTEST = 12
KINDS = ("default", "default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


def draw_ropes(config_class: Any, fields: Mapping[str, Any], rng: random.Random, sections: bool) -> dict[str, Any]:
    """``rope_parameters`` for a configuration of ``fields``; {}: the family's own."""
    try:
        made = config_class(**fields)
    except Exception:  # the model will not be built either
        return {}
    own = (made.rope_parameters or {}) | ({"mrope_section": True} if sections else {})
    labels = getattr(made, "_rope_type_labels", None) or getattr(made, "layer_types", None) or ()
    nested = [kind for kind in own if kind in labels]
    if rng.random() < 0.25 and not sections:
        return {}
    if nested:
        return {"rope_parameters": {kind: draw_rope(made, own[kind] or {}, kind, rng) for kind in nested}}
    return {"rope_parameters": draw_rope(made, own, "", rng)}


def _rotating(made: Any, kind: str) -> int:
    values = made.to_dict()  # of a configuration whose layers differ, too
    for name in ("qk_rope_head_dim", "global_head_dim" if kind == "full_attention" else "", "head_dim"):
        if values.get(name):
            return int(values[name])
    return int(made.hidden_size // made.num_attention_heads)


def draw_rope(made: Any, own: Mapping[str, Any], kind: str, rng: random.Random) -> dict[str, Any]:
    """One rotary embedding; ``own``: the family's."""
    found: dict[str, Any] = {
        "rope_type": rng.choice(KINDS), "rope_theta": rng.choice([100.0, 1000.0, 10000.0, 500000.0, 1e6]),
    }  # fmt: skip
    if own.get("rope_type") == "proportional" and rng.random() < 0.7:
        found["rope_type"] = "proportional"
    size = _rotating(made, kind)
    part = own.get("partial_rotary_factor")
    if part is not None or found["rope_type"] == "proportional" or rng.random() < 0.04:
        parts = [each for each in (0.25, 0.4, 0.5, 0.75, 1.0) if int(size * each) >= 2 and int(size * each) % 2 == 0]
        part = rng.choice(parts or [1.0])
        found["partial_rotary_factor"] = part
    if own.get("llama_4_scaling_beta"):
        found |= {
            "llama_4_scaling_beta": rng.choice([0.1, 0.5]),
            "original_max_position_embeddings": rng.choice([4, 8, 64]),
        }
    if own.get("mrope_section"):
        found["rope_type"] = "default"
        first, second = sorted(rng.sample(range(size // 2 + 1), 2)) if size >= 4 else (0, 0)
        found["mrope_section"] = [first, second - first, size // 2 - second]
    pairs = int(size * (part or 1.0)) // 2
    factor, original = rng.choice([1.0, 2.0, 2.5, 8.0]), rng.choice([8, 8, LONGEST, 64])
    kind = found["rope_type"]
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        found["factor"] = factor
    if kind in ("yarn", "llama3", "longrope"):
        found["original_max_position_embeddings"] = original
    if kind == "llama3":
        found |= {"low_freq_factor": rng.choice([0.5, 1.0]), "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "longrope":
        found |= {"short_factor": _divisors(pairs, rng), "long_factor": _divisors(pairs, rng)}
        found |= {"factor": factor} if rng.random() < 0.5 else {}
        found |= {"short_mscale": 1.2, "long_mscale": 1.3} if rng.random() < 0.1 else {}
    if kind == "yarn":
        found |= _yarn(rng)
    return found


def _divisors(pairs: int, rng: random.Random) -> list[float]:
    return [round(rng.uniform(1.0, 3.0), 2) for _ in range(pairs)]


def _yarn(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.3:
        found["attention_factor"] = rng.choice([0.8, 1.3])
    if rng.random() < 0.3:
        found |= {"mscale": rng.choice([0.7, 1.0]), "mscale_all_dim": rng.choice([0.5, 0.8, 1.0])}
    if rng.random() < 0.4:
        found |= {"beta_fast": rng.choice([4.0, 32.0]), "beta_slow": rng.choice([0.5, 1.0])}
    if rng.random() < 0.3:
        found["truncate"] = False
    return found
