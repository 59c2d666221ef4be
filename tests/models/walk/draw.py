"""Draws configurations: any family's class of transformers, every field that a rule knows, one draw for each seed."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import random
import re
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from headway.weights.checkpoint import read_json
from tests.models.walk.rope import draw_ropes
from tests.models.walk.rules import KEEP, Shape, divisors, draw_field

VOCABS = (61, 67, 97, 101, 128, 131, 7, 11, 257, 1009)
HIDDEN_FROM_US: Final[dict[str, dict[str, Any]]] = {
    "relative_attention": {"share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none"},
    "attention_k_eq_v": {"global_head_dim": 512, "num_global_key_value_heads": None},
}
"""Fields that a model reads and its configuration's class does not list, with their defaults, by one that it lists."""
UNLISTED: Final[dict[str, Any]] = {
    "head_dim": None, "full_attention_interval": 4, "sliding_window_pattern": 4, "global_attn_every_n_layers": 3,
    "index_topk_freq": 1, "index_skip_topk_offset": 2, "router_bias": False, "attention_head_size": None,
    "pooler_hidden_size": None,
}  # fmt: skip
"""Others, with what they stand for where they are absent, if the sources ask for them by name. None: they stay absent."""
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@cache
def own_fields(config_class: Any) -> dict[str, Any]:
    """The class's fields beyond those of every configuration -> their defaults."""
    from transformers import PretrainedConfig

    generic = {field.name for field in dataclasses.fields(PretrainedConfig)}
    found = {}
    for field in dataclasses.fields(config_class):
        if field.name not in generic:
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
            found[field.name] = field.default if field.default is not dataclasses.MISSING else made
    for sign, more in HIDDEN_FROM_US.items():
        found |= more if sign in found else {}
    asked = set(re.findall(r"(?:getattr\(config, |kwargs\.\w+\()\"(\w+)\"", _sources(config_class)))
    return found | {name: value for name, value in UNLISTED.items() if name in asked - found.keys()}


@cache
def _sources(config_class: Any) -> str:
    """Of the family's configuration and model."""
    own = config_class.__module__
    names = (own, own.replace("configuration_", "modeling_"))
    return "\n".join(
        inspect.getsource(importlib.import_module(each)) for each in names if importlib.util.find_spec(each)
    )


def standard_names(config_class: Any, name: str) -> list[str]:
    """What other families call a field."""
    return [ours for ours, theirs in config_class.attribute_map.items() if theirs == name]


@cache
def choices(config_class: Any) -> dict[str, tuple[Any, ...]]:
    """Fields that are typed as one of some values."""
    found = {}
    for field in dataclasses.fields(config_class):
        alternatives = (field.type, *get_args(field.type))
        listed = [value for each in alternatives if get_origin(each) is Literal for value in get_args(each)]
        if listed:
            found[field.name] = tuple(listed)
    return found


@cache
def kinds_of_layers(config_class: Any) -> dict[str, tuple[str, ...]]:
    """Kinds of layers that the family's default configurations have, by field; and full attention beside windows."""
    found: dict[str, set[str]] = {}
    name = _own_name(config_class, "num_hidden_layers")
    for given in ({name: 6}, {name: 13}, {}):
        try:
            made = config_class(**given).to_dict()
        except Exception:  # it wants more than that
            continue
        for name, value in made.items():
            if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
                found.setdefault(name, set()).update(value)
    fields = own_fields(config_class)
    if "layer_types" in fields:  # what its model knows besides
        found.setdefault("layer_types", set()).update(_kinds_in_source(config_class))
    if len(found.get("layer_types", "  ")) == 1 and "sliding_window" in fields:  # it may slide, if it is told to
        found["layer_types"] |= {"sliding_attention", "full_attention"}
    return {name: tuple(sorted(kinds)) for name, kinds in found.items() if name != "architectures"}


def _kinds_in_source(config_class: Any) -> set[str]:
    """Kinds of layers that the family's model names."""
    from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

    named = set(re.findall(r"\"(\w+)\"", _sources(config_class)))
    return named & set(ALLOWED_ATTN_LAYER_TYPES)


def _own_name(config_class: Any, standard: str) -> str:
    """What the class calls a field."""
    return str(config_class.attribute_map.get(standard, standard))


def shape_of(config_class: Any, rng: random.Random) -> Shape:
    """Sizes that fit each other."""
    default = own_fields(config_class)
    fields = {*default, *(ours for ours, theirs in config_class.attribute_map.items() if theirs in default)}
    heads = rng.choice([1, 2, 3, 4, 4, 5, 6, 7, 8, 12, 16])
    even = rng.choice([2, 4, 6, 8, 8, 10, 12, 16, 20, 32, 64, 80, 96, 128, 192, 256])
    heads = heads if heads * even <= 512 else rng.choice([1, 2])
    head_dim = even if "rope_parameters" in fields or rng.random() < 0.6 else rng.choice([3, 5, 7, 9, 13])
    free = "head_dim" in fields and "kv_lora_rank" not in fields and rng.random() < 0.6
    hidden = rng.choice([20, 28, 33, 36, 40, 44, 50, 64, 66]) if free else heads * head_dim
    if free and rng.random() < 0.7:  # some families want a multiple, whatever the heads' size
        hidden = max(1, hidden // heads) * heads
    kv_heads = rng.choice([1, heads, *divisors(heads)])
    if "kv_lora_rank" in fields:
        hidden, kv_heads = heads * rng.choice([4, 6, 9, 10]), heads
    experts = rng.choice([1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 32])
    if "n_group" in fields:  # a group is judged by its two best
        experts = rng.choice([2, 4, 6, 8, 9, 12, 16, 32])
    few = (
        divisors(experts)
        if rng.random() < 0.1
        else [each for each in divisors(experts) if each == 1 or experts // each >= 2]
    )
    groups = rng.choice(few)
    chosen_groups = rng.randrange(1, groups + 1)
    most = experts // groups * chosen_groups
    expand = rng.choice([1, 2, 2, 3])
    state_heads = rng.choice([each for each in divisors(expand * hidden) if expand * hidden // each >= 2])
    return Shape(
        rng=rng,
        fields=frozenset(fields),
        default=default,
        choices=choices(config_class),
        kinds=kinds_of_layers(config_class),
        layers=rng.choice([1, 2, 3, 3, 4, 5, 6]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        vocab=rng.choice(VOCABS),
        inner=rng.choice([1, 5, 12, 24, 33, 48, 56, 70, 128, 130]),
        experts=experts,
        chosen=rng.choice([1, most, rng.randrange(1, most + 1)]),
        grouped=rng.random() < 0.6,
        groups=groups,
        chosen_groups=chosen_groups,
        expand=expand,
        state_heads=state_heads,
        state_width=expand * hidden // state_heads,
        key_heads=rng.choice([1, 2, 3, 4, 5]),
    )


def draw(config_class: Any, rng: random.Random, sections: bool = False, **given: Any) -> dict[str, Any]:
    """Fields of a configuration.

    Args:
        sections: rotary dimensions are dealt out to time, height and width.
        given: fields that are not drawn.
    """
    shape, listed = shape_of(config_class, rng), {field.name for field in dataclasses.fields(config_class)}
    found: dict[str, Any] = {}
    for name in shape.default:
        if name in given:
            continue
        value = draw_field(shape, name, standard_names(config_class, name))
        if value is not KEEP and not (value is None and name in UNLISTED and name not in listed):
            found[name] = value
    found |= {name: value for name, value in SPECIAL.items() if name in shape.default} | given
    if "use_sliding_window" in shape.default and "sliding_attention" in found.get("layer_types", ()):
        found["use_sliding_window"] = True
    if "kv_lora_rank" in found and "head_dim" in found:  # of the part that rotates
        found["head_dim"] = found["qk_rope_head_dim"]
    if "rope_parameters" in shape.default and "rope_parameters" not in given:
        found |= draw_ropes(config_class, found, rng, sections)
    return found


def known_fields(config: Any, folder: Path) -> dict[str, Any]:
    """All that a refusal may name: what is in config.json, and what the family has besides."""
    config_class: Any = type(config)
    return {**dict.fromkeys(own_fields(config_class)), **read_json(folder / "config.json")}
