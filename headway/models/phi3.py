"""Phi-3, Phi-3.5 and Phi-4: Llama with one tensor for queries, keys and values and one for gate and up; some rotate only part
of a head."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import SLIDING, layer_windows, llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields


class Phi3ForCausalLM(DecoderModel):
    """The plain decoder with merged tensors."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
        slides = fields.get("sliding_window") is not None
        kinds = (SLIDING,) * fields.count("num_hidden_layers") if slides else ()
        config = llama_like(fields, windows=layer_windows(fields, otherwise=kinds), partial=True)

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            mixer = replace(block.attention, names=(("qkv_proj",), "o_proj"))
            return replace(block, mixer=mixer, ffn=replace(block.mlp, names=(("gate_up_proj",), "down_proj")))

        return map_blocks(config, change)
