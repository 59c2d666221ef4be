"""MiniCPM3: latent attention in a dense decoder, with multipliers of embeddings, residual and logits."""

from __future__ import annotations

import math
from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.latent import latent_like


class MiniCPM3ForCausalLM(DecoderModel):
    """Rotated pairs lie half of the rotated part apart, as in Llama."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=32768, rms_norm_eps=1e-5, tie_word_embeddings=True, kv_lora_rank=256, q_lora_rank=768,
            qk_nope_head_dim=64, qk_rope_head_dim=32, scale_emb=12, scale_depth=1.4, dim_model_base=256,
        )  # fmt: skip
        heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
        if fields.get("v_head_dim") is None:
            fields = fields.replaced(v_head_dim=hidden // heads)
        config = latent_like(fields, interleaved=False)
        depth = math.sqrt(len(config.blocks))
        multiplier = fields.number("scale_depth", depth) / depth

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(block, residual_multiplier=multiplier)

        return replace(
            map_blocks(config, change),
            embedding_multiplier=fields.number("scale_emb", 1.0),
            round_multiplier=True,
            logit_multiplier=fields.number("dim_model_base", hidden) / hidden,
        )
