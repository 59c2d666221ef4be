"""T5 (Raffel et al. 2020), Flan-T5 and mT5: no positions but a bias of the scores by distance, which are not scaled."""

from __future__ import annotations

import torch

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.decoder import DecoderNames
from headway.models.encoder import EncoderBlockSpec
from headway.models.encoder_decoder import EncoderDecoderConfig, EncoderDecoderModel, StackSpec
from headway.models.fields import Fields
from headway.models.interface import WeightMap
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.cross import CrossSpec
from headway.models.layers.distance import DistanceAttention, DistanceBias, DistanceSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec
from headway.models.position_bias import PositionBiasSpec
from headway.models.text_front import TextFront

CONTEXT = 512
"""Tokens it was trained on, on either side; where ``n_positions`` says nothing."""
_PRODUCTS = ("q", "k", "v")
_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"


class T5ForConditionalGeneration(EncoderDecoderModel):
    """Tensor names: encoder.block.N.layer.M.*, decoder.block.N.layer.M.*, shared."""

    may_scale = True
    usual_proj = "relu"

    def __init__(
        self, config: EncoderDecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        bias = config.stack.bias
        assert bias is not None
        self.distances = DistanceBias(
            f"decoder.{_BIAS}", bias.num_heads, bias.num_buckets, bias.max_distance, max_model_len, device=device
        )

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""
        found = super().weights()
        targets = {**found.targets, **self.distances.destinations()}
        return WeightMap(targets, found.computed, found.prefixes, found.unused)

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""
        self.distances.finalize()
        super().finalize()
        for block in self._layers:
            if isinstance(block.mixer, DistanceAttention):
                block.mixer.table = self.distances.table

    @classmethod
    def read(cls, fields: Fields) -> EncoderDecoderConfig:
        fields.flag("is_encoder_decoder")
        for name in ("hidden_act", "dense_act_fn", "is_gated_act"):
            fields.get(name)  # what ``feed_forward_proj`` says
        fields = fields.with_defaults(
            feed_forward_proj=cls.usual_proj, relative_attention_max_distance=128, layer_norm_epsilon=1e-6,
            tie_word_embeddings=True, n_positions=CONTEXT,
        )  # fmt: skip
        hidden, heads, size = fields.count("d_model"), fields.count("num_heads"), fields.count("d_kv")
        layers = fields.count("num_layers")
        decoder_layers = layers if fields.get("num_decoder_layers") is None else fields.count("num_decoder_layers")
        context, tied = fields.count("n_positions"), fields.flag("tie_word_embeddings")
        said = fields.get("scale_decoder_outputs")  # of newer exporters; older ones tied what they scaled
        scaled = cls.may_scale and (tied if said is None else bool(said))
        buckets, most = fields.count("relative_attention_num_buckets"), fields.count("relative_attention_max_distance")
        if buckets < 4 or most <= buckets // 2:
            raise fields.refuse(
                "relative_attention_max_distance",
                f"must be more than half of {buckets} buckets, of which there must be 4",
            )
        norm = NormSpec(fields.number("layer_norm_epsilon", least=0))
        attention = DistanceSpec(
            num_heads=heads, num_kv_heads=heads, head_dim=size, rope=None, scale=1.0, names=(_PRODUCTS, "o")
        )
        cross = CrossSpec(
            num_heads=heads, head_dim=size, encoder_size=hidden, encoder_tokens=context, scale=1.0,
            names=(*_PRODUCTS, "o"),
        )  # fmt: skip
        first = BlockNames(before_mixer="layer.0.layer_norm", mixer="layer.0.SelfAttention", before_ffn="", ffn="")
        second = BlockNames(
            before_mixer="layer.1.layer_norm", mixer="layer.1.EncDecAttention", before_ffn="layer.2.layer_norm",
            ffn="layer.2.DenseReluDense",
        )  # fmt: skip
        layer = (
            BlockSpec(mixer=attention, ffn=None, names=first),
            BlockSpec(mixer=cross, ffn=_mlp(fields, ""), names=second),
        )
        return EncoderDecoderConfig(
            architecture=fields["architectures"][0],
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            longest_context=context,
            blocks=layer * decoder_layers,
            norm=norm,
            tie_word_embeddings=tied,
            logit_multiplier=hidden**-0.5 if scaled else 1.0,
            eos_token_ids=fields.token_ids("eos_token_id"),
            names=DecoderNames(
                embedding="shared",
                layers="decoder.block",
                norm="decoder.final_layer_norm",
                head="lm_head",
                blocks_per_layer=2,
            ),
            shared=("encoder.embed_tokens", "decoder.embed_tokens"),
            front=TextFront(longest=context, norm=norm),
            stack=StackSpec(
                hidden_size=hidden,
                longest=context,
                blocks=(_encoder_block(fields, heads, size),) * layers,
                layers="encoder.block",
                norm=norm,
                last_norm="encoder.final_layer_norm",
                bias=PositionBiasSpec(
                    kind="buckets", num_heads=heads, name=f"encoder.{_BIAS}", num_buckets=buckets, max_distance=most
                ),
            ),
        )


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    """Hidden states are never scaled ahead of the output layer, tied or not."""

    may_scale = False
    usual_proj = "gated-gelu"


def _mlp(fields: Fields, prefix: str) -> MLPSpec:
    """``feed_forward_proj`` is an activation, or "gated-" and one; gated-gelu is the tanh form."""
    said = fields["feed_forward_proj"]
    gated = isinstance(said, str) and said.startswith("gated-")
    name = "gelu_new" if said == "gated-gelu" else str(said).removeprefix("gated-")
    activation = fields.replaced(feed_forward_proj=name).choice("feed_forward_proj", ACTIVATIONS)
    into = ("wi_0", "wi_1") if gated else ("wi",)
    names = (tuple(f"{prefix}{each}" for each in into), f"{prefix}wo")
    return MLPSpec(size=fields.count("d_ff"), activation=activation, gated=gated, names=names)


def _encoder_block(fields: Fields, heads: int, size: int) -> EncoderBlockSpec:
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=size, rope=None, scale=1.0, causal=False,
        names=(tuple(f"layer.0.SelfAttention.{name}" for name in _PRODUCTS), "layer.0.SelfAttention.o"),
    )  # fmt: skip
    norms = ("layer.0.layer_norm", "layer.1.layer_norm")
    return EncoderBlockSpec(mixer=attention, ffn=_mlp(fields, "layer.1.DenseReluDense."), norms=norms, before=True)
