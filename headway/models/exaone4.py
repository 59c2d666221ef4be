"""EXAONE 4: norms behind attention and feed-forward block only, and of each head; where some layers slide the others are not
rotated."""

from __future__ import annotations

from dataclasses import replace

from headway.core.errors import UnsupportedModelError
from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import FULL, SLIDING, layer_windows, llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.deepseek import SPARSE, feed_forward_kinds
from headway.models.fields import Fields
from headway.models.mixtures import corrected_router, expert_count, read_mixture, with_mixture
from headway.models.olmo import NORMS_AFTER


class Exaone4ForCausalLM(DecoderModel):
    """The 1.2B (full attention) and the 32B (three of four layers slide)."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            num_key_value_heads=32,
            sliding_window=4096,
            sliding_window_pattern=4,
        )
        slides = fields.get("sliding_window") is not None
        windows = layer_windows(fields, otherwise=_kinds(fields)) if slides else None
        config = llama_like(fields, qk_norm="head", names=NORMS_AFTER, windows=windows)

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            rotated = not slides or block.attention.window
            return block if rotated else replace(block, mixer=replace(block.attention, rope=None))

        return map_blocks(config, change)


class ExaoneMoeForCausalLM(DecoderModel):
    """K-EXAONE: the same attention with norms before both parts, and DeepSeek-V3's mixtures behind the first layers."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            first_k_dense_replace=1, moe_intermediate_size=1024, num_experts=64, num_experts_per_tok=8, num_shared_experts=1,
            norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1,
        )  # fmt: skip
        config = map_blocks(Exaone4ForCausalLM.read(fields), lambda _, block: replace(block, names=BlockNames()))
        experts = expert_count(fields, "num_experts")
        shared = fields.whole("num_shared_experts", 0) * fields.count("moe_intermediate_size")
        mixture = read_mixture(fields, experts, corrected_router(fields), shared=shared)
        sparse = [layer for layer, kind in enumerate(feed_forward_kinds(fields)) if kind == SPARSE]
        config = with_mixture(config, sparse, replace(mixture, shared_name="shared_experts"))
        respelled = ((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),)
        return replace(config, respelled=respelled, unused=("mtp.",))


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Per layer, from a period, at whose end a layer is full, or from a text of L and G. The last layer is full."""
    pattern, num_layers = fields.get("sliding_window_pattern"), fields.count("num_hidden_layers")
    if fields.get("layer_types"):
        return ()  # these say it
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        kinds = [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(num_layers)]
    elif isinstance(pattern, int) and pattern > 0:
        kinds = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]
    else:
        raise UnsupportedModelError(
            f"config.json: sliding_window_pattern = {pattern!r:.40} must be a number or a text of L and G"
        )
    return (*kinds[:-1], FULL)
