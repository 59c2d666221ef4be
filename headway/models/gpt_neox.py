"""Decoders with layer norms, mostly with plain feed-forward blocks and heads rotated in part: GPT-NeoX (Pythia), GPT-J, Phi,
StableLM and StarCoder2."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import llama_like, map_blocks, whole_heads
from headway.models.decoder import DecoderConfig, DecoderModel, DecoderNames
from headway.models.fields import Fields
from headway.models.gpt2 import read_activation
from headway.models.interface import WeightMap
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec
from headway.models.rope import RopeConfig


def _layer_norms(config: DecoderConfig) -> DecoderConfig:
    return replace(config, norm=NormSpec(config.norm.eps, kind="layer", bias=True))


def _ungated(block: BlockSpec, names: tuple[tuple[str, ...], str], *, bias: bool = True) -> MLPSpec:
    return replace(block.mlp, gated=False, bias=bias, names=names)


class GPTNeoXForCausalLM(DecoderModel):
    """Attention and MLP side by side, each behind a norm of its own."""

    def weights(self) -> WeightMap:
        """See ``DecoderModel``."""
        found = super().weights()
        aliases = {**found.aliases, "embed_out.weight": "lm_head.weight"}  # the output layer's older name
        return replace(found, computed=(*found.computed, "attention.bias", "attention.masked_bias"), aliases=aliases)

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            layer_norm_eps=1e-5, hidden_act="gelu", use_parallel_residual=True, attention_bias=True, rotary_pct=0.25,
            max_position_embeddings=2048,
        ).replaced(num_key_value_heads=None)  # fmt: skip
        rope = fields.get("rope_parameters")
        if rope is None:
            fields = fields.replaced(
                partial_rotary_factor=fields.get("rotary_pct"), rope_theta=fields.get("rotary_emb_base") or 10000.0
            )
        bias, parallel = fields.flag("attention_bias"), fields.flag("use_parallel_residual")
        names = BlockNames(mixer="attention")
        config = llama_like(whole_heads(fields), attention_bias=bias, names=names, partial=True, eps="layer_norm_eps")

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            mixer = replace(block.attention, names=(("query_key_value",), "dense"), by_head=True)
            mlp = _ungated(block, (("dense_h_to_4h",), "dense_4h_to_h"))
            return replace(block, mixer=mixer, ffn=mlp, parallel=parallel, two_norms=parallel)

        parts = DecoderNames(embedding="gpt_neox.embed_in", layers="gpt_neox.layers", norm="gpt_neox.final_layer_norm")
        return replace(_layer_norms(map_blocks(config, change)), names=parts)


class GPTJForCausalLM(DecoderModel):
    """Attention and MLP side by side behind one norm; neighbouring dimensions are rotated."""

    def weights(self) -> WeightMap:
        """See ``DecoderModel``."""
        found = super().weights()
        return replace(found, computed=(*found.computed, "attn.bias", "attn.masked_bias"))

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            layer_norm_epsilon=1e-5, activation_function="gelu_new", n_positions=2048, rotary_dim=64
        )
        hidden = fields.count("n_embd")
        fields = fields.replaced(
            hidden_size=hidden, num_attention_heads=fields.count("n_head"), num_key_value_heads=None,
            num_hidden_layers=fields.count("n_layer"),
            intermediate_size=fields.get("n_inner") or 4 * hidden, max_position_embeddings=fields.count("n_positions"),
            hidden_act=read_activation(fields),
        )  # fmt: skip
        rotated = fields.count("rotary_dim")
        rope = RopeConfig(theta=10000.0, rotary_dim=rotated, original_len=fields.count("n_positions"), interleaved=True)
        if rotated % 2 or rotated > hidden // fields.count("n_head"):
            raise fields.refuse("rotary_dim", "is no even part of a head")
        names = BlockNames(before_mixer="ln_1", mixer="attn")
        config = llama_like(whole_heads(fields), names=names, rope=rope, eps="layer_norm_epsilon")

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            mixer = replace(block.attention, names=(("q_proj", "k_proj", "v_proj"), "out_proj"))
            return replace(block, mixer=mixer, ffn=_ungated(block, (("fc_in",), "fc_out")), parallel=True)

        parts = DecoderNames(embedding="transformer.wte", layers="transformer.h", norm="transformer.ln_f")
        return replace(_layer_norms(map_blocks(config, change)), names=parts, head_bias=True)


class PhiForCausalLM(DecoderModel):
    """Phi 1 to 2: attention and MLP side by side behind one norm, biases everywhere."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            layer_norm_eps=1e-5, hidden_act="gelu_new", max_position_embeddings=2048, partial_rotary_factor=0.5
        )
        config = llama_like(fields, attention_bias=True, partial=True, eps="layer_norm_eps")

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            mixer = replace(block.attention, names=(("q_proj", "k_proj", "v_proj"), "dense"))
            return replace(block, mixer=mixer, ffn=_ungated(block, (("fc1",), "fc2")), parallel=True)

        names = DecoderNames(norm="model.final_layernorm")
        return replace(_layer_norms(map_blocks(config, change)), names=names, head_bias=True)


class StableLmForCausalLM(DecoderModel):
    """Llama's blocks with layer norms, in some models side by side."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(layer_norm_eps=1e-5, max_position_embeddings=4096, partial_rotary_factor=0.25)
        parallel = fields.flag("use_parallel_residual")
        config = llama_like(
            whole_heads(fields),
            attention_bias=fields.flag("use_qkv_bias"),
            out_bias=False,
            partial=True,
            eps="layer_norm_eps",
        )
        return _layer_norms(map_blocks(config, lambda _, block: replace(block, parallel=parallel)))


class Starcoder2ForCausalLM(DecoderModel):
    """Grouped queries, plain MLPs, and a window in some models."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            norm_epsilon=1e-5, hidden_act="gelu_pytorch_tanh", use_bias=True, max_position_embeddings=4096,
            num_key_value_heads=2, tie_word_embeddings=True,
        )  # fmt: skip
        bias, window = fields.flag("use_bias"), fields.get("sliding_window")
        windows = None if window is None else (fields.count("sliding_window"),) * fields.count("num_hidden_layers")
        config = llama_like(fields, attention_bias=bias, windows=windows, eps="norm_epsilon")

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(block, ffn=_ungated(block, (("c_fc",), "c_proj"), bias=bias))

        return _layer_norms(map_blocks(config, change))
