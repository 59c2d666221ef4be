"""A model's configuration as one of several ranks has it: a part of each layer, and some of the layers."""

from __future__ import annotations

from dataclasses import replace

from headway.core.errors import UnsupportedModelError
from headway.models.blocks import BlockSpec
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.interface import ModelConfig
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.registry import model_class
from headway.parallel.group import Group
from headway.parallel.shard import VocabularyPart
from headway.parallel.stage import Stage


def sharded(config: ModelConfig, tensor: Group, stage: Stage) -> ModelConfig:
    """``config`` for one rank.

    Args:
        tensor: ranks that share each layer.
        stage: of this rank; of all layers where there is only one.

    Raises:
        UnsupportedModelError: the model has parts that only one rank can have; names them.
    """
    if tensor.size == stage.group.size == 1:
        return config
    if type(config) is not DecoderConfig or _has_ways_of_its_own(config):
        raise UnsupportedModelError(
            f"{config.architecture} runs on one rank only; leave out tensor_parallel_size and pipeline_parallel_size, and set "
            "data_parallel_size for more texts at once"
        )
    if stage.group.size > 1:
        config = _staged(config, stage)
    if tensor.size == 1:
        return config
    blocks = tuple(_block(config, i, block, tensor) for i, block in enumerate(config.blocks))
    vocabulary = VocabularyPart(tensor, config.vocab_size) if config.outputs is None else None
    return replace(config, blocks=blocks, vocabulary=vocabulary)


def _has_ways_of_its_own(config: DecoderConfig) -> bool:
    """Whether its class does something between the parts that are cut."""
    own = model_class(config.architecture)
    names = ("forward", "_inputs", "_embedded", "_enter", "_add_behind", "_last_norm", "logits")
    return any(getattr(own, name, None) is not getattr(DecoderModel, name) for name in names)


def _staged(config: DecoderConfig, stage: Stage) -> DecoderConfig:
    if config.outputs is not None:
        raise UnsupportedModelError(
            f"{config.architecture}: a model that pools has no tokens to hand back from stage to stage; leave out "
            "pipeline_parallel_size"
        )
    shares = config.narrow_from is not None or config.names.blocks_per_layer != 1
    if shares or any(block.state is not None for block in config.blocks):
        raise UnsupportedModelError(
            f"{config.architecture} has layers that read what other layers cache, or states, which stages do not hand on; "
            "leave out pipeline_parallel_size"
        )
    return replace(config, stage=stage)


def _block(config: DecoderConfig, number: int, block: BlockSpec, group: Group) -> BlockSpec:
    mixer, ffn = block.mixer, block.ffn
    for part in (mixer, ffn):
        if part is not None and type(part) not in (AttentionSpec, MLPSpec):
            kind = type(part).__name__.removesuffix("Spec")
            raise UnsupportedModelError(
                f"{config.architecture}: layer {number} has a part ({kind}) that cannot be cut into tensor_parallel_size="
                f"{group.size}; leave it out, and set data_parallel_size or pipeline_parallel_size"
            )
    if isinstance(mixer, AttentionSpec):
        if mixer.qk_norm == "all" and config.norm.kind != "rms":
            raise UnsupportedModelError(
                f"{config.architecture}: a layer norm over all heads cannot be cut into tensor_parallel_size={group.size}; "
                "leave it out"
            )
        if not mixer.causal:
            raise UnsupportedModelError(
                f"{config.architecture}: attention both ways runs on one rank; set data_parallel_size instead of "
                "tensor_parallel_size"
            )
        kept = {
            "sinks": mixer.sinks, "flex": mixer.flex, "slopes": mixer.slopes, "shared keys": mixer.shared_with is not None,
            "keys_are_values": mixer.keys_are_values, "by_head": mixer.by_head, "unbiased": mixer.unbiased,
            "norms behind the rotation": mixer.norm_behind,
        }  # fmt: skip
        for name in (name for name, has in kept.items() if has):
            raise UnsupportedModelError(
                f"{config.architecture}: attention with {name} is not cut into tensor_parallel_size={group.size} yet; leave it "
                "out, and set data_parallel_size or pipeline_parallel_size"
            )
        mixer = mixer.sharded(group)
    return replace(block, mixer=mixer, ffn=ffn.sharded(group) if isinstance(ffn, MLPSpec) else None)
