"""SmolLM3: Llama with layers that are not rotated, every fourth unless the configuration says which."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import FULL, SLIDING, layer_windows, llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields


class SmolLM3ForCausalLM(DecoderModel):
    """The plain decoder, rotated in part."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=32768, num_key_value_heads=4, tie_word_embeddings=True, rope_theta=2e6,
            no_rope_layer_interval=4,
        )  # fmt: skip
        num_layers, interval = fields.count("num_hidden_layers"), fields.count("no_rope_layer_interval")
        rotated = fields.get("no_rope_layers")  # 1 for layers that are rotated, whatever the name says
        if rotated is None:
            rotated = [(i + 1) % interval != 0 for i in range(num_layers)]
        if len(rotated) != num_layers:
            raise fields.refuse("no_rope_layers", f"must have an entry for each of the {num_layers} layers")
        slides = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
        kinds = [SLIDING if slides and not each else FULL for each in rotated]
        bias = fields.flag("attention_bias")
        config = llama_like(
            fields, attention_bias=bias, mlp_bias=fields.flag("mlp_bias"),
            windows=layer_windows(fields, otherwise=kinds),
        )  # fmt: skip

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            return block if rotated[layer] else replace(block, mixer=replace(block.attention, rope=None))

        return map_blocks(config, change)
