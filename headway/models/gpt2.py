"""Decoders with a learned vector for each position: GPT-2, GPT-BigCode (StarCoder, SantaCoder) and OPT."""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.bloom import without_rope
from headway.models.config import llama_like, map_blocks, whole_heads
from headway.models.decoder import DecoderConfig, DecoderModel, DecoderNames
from headway.models.fields import Fields
from headway.models.interface import WeightMap
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.embedding import Embedding
from headway.models.layers.norm import NormSpec
from headway.state.batch import StepBatch

_NAMES = BlockNames(before_mixer="ln_1", mixer="attn", before_ffn="ln_2")
_TRUNK = DecoderNames(embedding="transformer.wte", layers="transformer.h", norm="transformer.ln_f")


class LearnedPositions(DecoderModel):
    """A decoder whose embeddings are sums of those of tokens and positions."""

    offset = 0
    """Rows of the table before that of position 0."""
    table = "transformer.wpe."
    """Its name in the checkpoint."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        rows = config.longest_context + self.offset if self._enters else 0
        self.positions = Embedding(rows, config.hidden_size, dtype=dtype, device=device)

    def _embedded(self, batch: StepBatch) -> torch.Tensor:
        return super()._embedded(batch).add_(self.positions.forward(batch.positions + self.offset))

    def weights(self) -> WeightMap:
        """See ``DecoderModel``."""
        found = self._with_entry(super().weights(), self.positions.destinations(self.table))
        return replace(found, computed=(*found.computed, "attn.bias", "attn.masked_bias"))


def read_activation(fields: Fields) -> str:
    """The name of the activation, which these families have in a field of another name."""
    fields.choice("activation_function", ACTIVATIONS)
    return str(fields["activation_function"])


def _read(fields: Fields, names: BlockNames, kv_heads: int | None, mlp: tuple[tuple[str, ...], str]) -> DecoderConfig:
    """Blocks with layer norms, biases and plain feed-forward parts, without rotations."""
    if fields.flag("add_cross_attention"):
        raise fields.refuse("add_cross_attention", "is not implemented")
    fields = fields.replaced(num_key_value_heads=kv_heads)
    config = llama_like(
        whole_heads(fields),
        attention_bias=True,
        names=names,
        rope=without_rope(fields),
        eps="layer_norm_epsilon",
    )

    def change(_layer: int, block: BlockSpec) -> BlockSpec:
        return replace(
            block,
            mixer=replace(block.attention, rope=None),
            ffn=replace(block.mlp, gated=False, bias=True, names=mlp),
        )

    return replace(map_blocks(config, change), norm=NormSpec(config.norm.eps, kind="layer", bias=True))


def _read_gpt(fields: Fields, kv_heads: int | None) -> DecoderConfig:
    hidden = fields.count("n_embd")
    fields = fields.with_defaults(layer_norm_epsilon=1e-5, n_positions=1024, tie_word_embeddings=True).replaced(
        hidden_size=hidden, num_attention_heads=fields.count("n_head"), num_hidden_layers=fields.count("n_layer"),
        intermediate_size=fields.get("n_inner") or 4 * hidden, hidden_act=read_activation(fields),
    )  # fmt: skip
    fields = fields.replaced(max_position_embeddings=fields.count("n_positions"))
    if fields.with_defaults(scale_attn_weights=True)["scale_attn_weights"] is not True:
        raise fields.refuse("scale_attn_weights", "is not implemented; true is")
    config = _read(fields, _NAMES, kv_heads, (("c_fc",), "c_proj"))
    return replace(config, names=_TRUNK)


class GPT2LMHeadModel(LearnedPositions):
    """Products lie transposed in the checkpoint."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        config = _read_gpt(fields.with_defaults(activation_function="gelu_new"), None)
        by_layer = fields.flag("scale_attn_by_inverse_layer_idx")

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            attention = block.attention
            scale = attention.head_dim**-0.5 / (layer + 1 if by_layer else 1)
            return replace(block, mixer=replace(attention, scale=scale, names=(("c_attn",), "c_proj")))

        return map_blocks(config, change)

    def weights(self) -> WeightMap:
        """See ``DecoderModel``."""
        found = super().weights()
        products = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        turned = {name: to._replace(transposed=True) for name, to in found.targets.items() if name.endswith(products)}
        return replace(found, targets={**found.targets, **turned})


class GPTBigCodeForCausalLM(LearnedPositions):
    """All heads of queries share one of keys, or each has its own."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        one = bool(fields.with_defaults(multi_query=True)["multi_query"])
        config = _read_gpt(fields.with_defaults(activation_function="gelu_pytorch_tanh"), 1 if one else None)

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(block, mixer=replace(block.attention, names=(("c_attn",), "c_proj"), by_head=not one))

        return map_blocks(config, change)


class OPTForCausalLM(LearnedPositions):
    """All but the 350M model, whose embeddings are narrower than its layers and whose norms stand behind the sums."""

    offset = 2
    table = "model.decoder.embed_positions."

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            activation_function="relu", do_layer_norm_before=True, enable_bias=True, layer_norm_elementwise_affine=True,
            max_position_embeddings=2048, tie_word_embeddings=True, layer_norm_epsilon=1e-5, ffn_dim=3072,
        )  # fmt: skip
        for name in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
            if fields[name] is not True:
                raise fields.refuse(name, "is not implemented; true is")
        if fields.flag("_remove_final_layer_norm"):
            raise fields.refuse("_remove_final_layer_norm", "is not implemented; false is")
        if fields.get("word_embed_proj_dim") not in (None, fields.count("hidden_size")):
            raise fields.refuse("word_embed_proj_dim", "is not implemented; hidden_size is")
        fields = fields.replaced(intermediate_size=fields.count("ffn_dim"), hidden_act=read_activation(fields))
        names = BlockNames(before_mixer="self_attn_layer_norm", before_ffn="final_layer_norm", ffn="")
        config = _read(fields, names, None, (("fc1",), "fc2"))

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            projections = (("q_proj", "k_proj", "v_proj"), "out_proj")
            return replace(block, mixer=replace(block.attention, names=projections))

        trunk = "model.decoder"
        parts = DecoderNames(
            embedding=f"{trunk}.embed_tokens", layers=f"{trunk}.layers", norm=f"{trunk}.final_layer_norm"
        )
        return replace(map_blocks(config, change), names=parts)

    def weights(self) -> WeightMap:
        """See ``DecoderModel``."""
        found = super().weights()
        return replace(found, beginnings=(*found.beginnings, ("decoder.", "model.decoder.")))
