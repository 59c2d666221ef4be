"""Cohere's Command R (without norms of heads), Command R7B and Command A: attention and feed-forward block side by side behind
one layer norm, interleaved rotation, scaled logits; in the newer ones layers with full attention are not rotated."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import layer_kinds, layer_windows, llama_like, map_blocks, read_sizes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.layers.norm import NormSpec
from headway.models.rope import read_rope


def _cohere(fields: Fields, windows: tuple[int, ...] | None) -> DecoderConfig:
    bias, sizes = fields.flag("attention_bias"), read_sizes(fields)
    rope = replace(read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position), interleaved=True)
    config = llama_like(
        fields, attention_bias=bias, windows=windows, names=BlockNames(before_ffn=""), rope=rope,
        eps="layer_norm_eps",
    )  # fmt: skip
    return replace(
        map_blocks(config, lambda _layer, block: replace(block, parallel=True)),
        norm=NormSpec(config.norm.eps, kind="layer"),
        logit_multiplier=fields.number("logit_scale"),
    )


class CohereForCausalLM(DecoderModel):
    """Command R, Aya; with ``use_qk_norm`` it is refused."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=8192,
            layer_norm_eps=1e-5,
            logit_scale=0.0625,
            tie_word_embeddings=True,
            rope_theta=5e5,
        )
        return _cohere(fields, None)


class Cohere2ForCausalLM(DecoderModel):
    """Three of four layers slide and are rotated; the others see everything and are not."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=8192, layer_norm_eps=1e-5, logit_scale=0.0625, tie_word_embeddings=True, rope_theta=1e4,
            sliding_window=4096, sliding_window_pattern=4,
        )  # fmt: skip
        rotation = fields.get("position_embedding_type")  # releases have the interleaved one's name
        if rotation not in (None, "rope", "rope_gptj"):
            raise fields.refuse("position_embedding_type", "is not implemented; 'rope_gptj' is")
        kinds = layer_kinds(fields, fields.count("sliding_window_pattern"))
        config = _cohere(fields, layer_windows(fields, otherwise=kinds))

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return block if block.attention.window else replace(block, mixer=replace(block.attention, rope=None))

        return map_blocks(config, change)
