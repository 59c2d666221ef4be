"""Reading the config.json of decoders with latent attention: what DeepSeek's and those that follow it have in common."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig
from headway.models.fields import Fields
from headway.models.layers.mla import MLASpec
from headway.models.rope import temperature


def latent_like(fields: Fields, *, interleaved: bool, mlp_bias: bool = False) -> DecoderConfig:
    """A decoder of equal blocks with latent attention, a gated MLP and RMS norms; ``models.config.llama_like`` for the rest.

    Args:
        interleaved: the checkpoint's rotated pairs are (2 i, 2 i + 1).

    Raises:
        UnsupportedModelError: a field is missing, or its value is not implemented.
    """
    heads, rotated = fields.count("num_attention_heads"), fields.count("qk_rope_head_dim")
    groups = fields.get("num_key_value_heads")
    if groups not in (None, heads):
        raise fields.refuse("num_key_value_heads", f"must be num_attention_heads={heads}: latents have no fewer heads")
    config = llama_like(fields.replaced(head_dim=rotated, num_key_value_heads=heads), mlp_bias=mlp_bias)
    nope = fields.count("qk_nope_head_dim")
    rope = config.blocks[0].attention.rope
    mixer = MLASpec(
        num_heads=heads,
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=fields.count("v_head_dim"),
        rank=fields.count("kv_lora_rank"),
        q_rank=0 if fields.get("q_lora_rank") is None else fields.count("q_lora_rank"),
        rope=None if rope is None else replace(rope, interleaved=interleaved),
        scale=(nope + rotated) ** -0.5 * score_factor(fields),
        bias=fields.flag("attention_bias"),
    )

    def change(_layer: int, block: BlockSpec) -> BlockSpec:
        return replace(block, mixer=mixer)

    return map_blocks(config, change)


def score_factor(fields: Fields) -> float:
    """What stretched contexts multiply the scores by: the square of YaRN's temperature at ``mscale_all_dim``."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    kind, weight = rope.get("rope_type") or rope.get("type") or "default", rope.get("mscale_all_dim")
    if kind == "default" or not weight:
        return 1.0
    return temperature(float(rope.get("factor") or 1.0), float(weight)) ** 2
