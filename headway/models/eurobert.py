"""EuroBERT (Boizard et al. 2025): Llama's blocks, seeing texts both ways."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.encoder_config import kind_of, read_outputs
from headway.models.fields import Fields
from headway.models.heads import HeadLayer


class EuroBertModel(DecoderModel):
    """EuroBERT; its classifier runs on the first token, on the mean, or on each token ("late"), whose scores are averaged."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=8192, rms_norm_eps=1e-5, classifier_pooling="late")
        bias = fields.flag("attention_bias")
        config = llama_like(fields, attention_bias=bias, mlp_bias=fields.flag("mlp_bias"))

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(block, mixer=replace(block.attention, causal=False))

        late = fields.get("classifier_pooling") == "late"
        pooling = fields.choice("classifier_pooling", {"bos": "cls", "mean": "mean", "late": "mean"})
        dense = HeadLayer(name="dense", size=config.hidden_size, activation="gelu")
        classifier = HeadLayer(name="classifier", size=0)
        heads = {"embed": (), "classify": (dense, classifier), "token_classify": (classifier,)}
        embeds = kind_of(config.architecture) == "embed"
        outputs = read_outputs(fields, heads, method="mean" if embeds else pooling)
        if outputs.pooling.kind == "classify":
            outputs = replace(outputs, pooling=replace(outputs.pooling, head_first=late))
        return replace(map_blocks(config, change), outputs=outputs)
