"""A model's configuration as one of several ranks has it: a part of each layer, and some of the layers.

Cut over ``tensor`` ranks are attention, cross-attention, latent attention, Mamba, delta nets and short convolutions,
feed-forward blocks, mixtures, embedding and output layer. Whole on every rank, which computes the same there as the others,
are: encoders; attention of models that have a rule of their own or a layer norm over all heads; mixers with states whose heads,
groups or channels cannot be dealt out evenly, or that are attention and Mamba in one; Gemma3n's feed-forward blocks with a
cut-off; towers, and inputs by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headway.core.errors import UnsupportedModelError
from headway.core.log import logger
from headway.models.blocks import BlockSpec
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.encoder_decoder import EncoderDecoderConfig
from headway.models.interface import ModelConfig
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mixer import CutMixer
from headway.models.layers.mla import MLASpec
from headway.models.layers.moe import MixtureSpec
from headway.models.registry import model_class
from headway.models.vision_language import SightConfig
from headway.parallel.group import Alone, Group
from headway.parallel.mesh import stage_starts
from headway.parallel.shard import VocabularyPart
from headway.parallel.stage import Stage


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whom a rank shares the model with.

    Attributes:
        tensor: ranks that share each layer.
        stage: of this rank; of all layers where there is only one.
        peers: replicas that share experts, and nothing else.
        whole_experts: experts are dealt out whole.
    """

    tensor: Group
    stage: Stage
    peers: Group = field(default_factory=Alone)
    whole_experts: bool = False

    @property
    def is_alone(self) -> bool:
        return self.tensor.size == self.stage.group.size == self.peers.size == 1


def sharded(config: ModelConfig, sharing: Sharing) -> ModelConfig:
    """``config`` for one rank.

    Raises:
        UnsupportedModelError: it has not what is to be dealt out; says what to leave out.
    """
    if sharing.whole_experts and not _has_mixtures(config):
        raise UnsupportedModelError(
            f"{config.architecture} has no experts to deal out; leave out enable_expert_parallel"
        )
    if sharing.is_alone:
        return config
    if not isinstance(config, DecoderConfig):
        if sharing.stage.group.size > 1:
            raise UnsupportedModelError(
                f"{config.architecture} is an encoder, which is whole on each rank; leave out pipeline_parallel_size, and set "
                "data_parallel_size for more texts at once"
            )
        logger.info("%s is whole on each of the %d ranks", config.architecture, sharing.tensor.size)
        return config
    if sharing.stage.group.size > 1:
        config = _staged(config, sharing.stage)
    cuts = _can_cut_heads(config)
    blocks = tuple(_block(block, sharing, cuts_heads=cuts) for block in config.blocks)
    whole = config.outputs is not None or isinstance(config, EncoderDecoderConfig) or sharing.tensor.size == 1
    vocabulary = None if whole else VocabularyPart(sharing.tensor, config.vocab_size)
    return replace(config, blocks=blocks, vocabulary=vocabulary)


def _has_mixtures(config: ModelConfig) -> bool:
    return isinstance(config, DecoderConfig) and any(isinstance(block.ffn, MixtureSpec) for block in config.blocks)


def _block(block: BlockSpec, sharing: Sharing, *, cuts_heads: bool) -> BlockSpec:
    found = block.sharded(sharing.tensor, sharing.peers, whole_experts=sharing.whole_experts)
    keys = block.cache is not None or isinstance(block.mixer, AttentionSpec)
    return found if cuts_heads or not keys else replace(found, mixer=block.mixer)


def _can_cut_heads(config: DecoderConfig) -> bool:
    """Whether all attention can be cut. Where one layer's cannot none is: their caches share storage, block by block."""
    for mixer in (block.mixer for block in config.blocks if block.cache is not None):
        if not isinstance(mixer, CutMixer):
            return False
        if isinstance(mixer, AttentionSpec) and mixer.flex is not None:
            return False  # rules know heads by their numbers
        if isinstance(mixer, AttentionSpec) and mixer.qk_norm == "all" and config.norm.kind != "rms":
            return False
    return True


def _not_staged(config: ModelConfig) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.architecture} does something between its layers that stages do not hand on; leave out "
        "pipeline_parallel_size, and set tensor_parallel_size or data_parallel_size"
    )


def _staged(config: DecoderConfig, stage: Stage) -> DecoderConfig:
    own = model_class(config.architecture)
    assert isinstance(own, type)
    names = ("forward", "_entering", "_inputs", "_enter", "_add_behind", "_last_norm", "logits")
    if any(not _knows_stages(own, name) for name in names):
        raise _not_staged(config)
    _check_borders(config, first_blocks(config, stage.group.size)[1:])
    return replace(config, stage=stage)


def first_blocks(config: ModelConfig, stages: int) -> list[int]:
    """With which block of the model each of ``stages`` begins, rising.

    Raises:
        ConfigError: there are more stages than layers.
    """
    each, barred = 1, set[int]()
    if isinstance(config, DecoderConfig):
        each, barred = config.names.blocks_per_layer, _barred(config)
    layers = len(getattr(config, "blocks", ())) // each
    starts = stage_starts(layers, stages, {layer for layer in range(layers) if layer * each in barred})
    return [layer * each for layer in starts]


def _barred(config: DecoderConfig) -> set[int]:
    """Blocks with which no stage but the first may begin: they, or some behind them, read more of those before than hidden
    states."""
    found = set[int]()
    for layer, block in enumerate(config.blocks):
        if block.cache is not None and block.cache.shared_with is not None:
            found |= {*range(block.cache.shared_with + 1, layer + 1)}
        mixer = block.mixer
        if isinstance(mixer, MLASpec) and mixer.index is not None and mixer.index.shared:
            found.add(layer)
    sight = getattr(config, "sight", None)
    return found | {*range(1, len(sight.vision.deepstack))} if isinstance(sight, SightConfig) else found


def _knows_stages(model: type, name: str) -> bool:
    """Whether part ``name`` of its forward pass is right on stages: it is every decoder's, and whoever adds to it says so."""
    owners = [each for each in model.__mro__ if issubclass(each, DecoderModel) and name in vars(each)]
    return all(owner is DecoderModel or name in vars(owner).get("knows_stages", ()) for owner in owners)


def _check_borders(config: DecoderConfig, starts: Sequence[int]) -> None:
    """Raises UnsupportedModelError: a stage, all but the first of which begin at ``starts``, needs more than hidden states."""
    for layer, block in enumerate(config.blocks):
        source = layer if block.cache is None or block.cache.shared_with is None else block.cache.shared_with
        if any(source < start <= layer for start in starts):
            raise UnsupportedModelError(
                f"{config.architecture}: layer {layer} reads what layer {source} caches, and {len(starts) + 1} stages are too "
                "many to have such layers on one; lower pipeline_parallel_size, and set tensor_parallel_size or "
                "data_parallel_size"
            )
    for start in starts:
        mixer = config.blocks[start].mixer
        if isinstance(mixer, MLASpec) and mixer.index is not None and mixer.index.shared:
            raise UnsupportedModelError(
                f"{config.architecture}: of {len(starts) + 1} stages one would begin with layer {start}, which attends to what "
                "an earlier layer's indexer has selected, and stages do not hand that on; lower pipeline_parallel_size, or "
                "take tensor_parallel_size"
            )
    sight: SightConfig | None = getattr(config, "sight", None)
    if sight is None:
        return
    if config.embeds_everywhere:
        raise UnsupportedModelError(
            f"{config.architecture} makes an input for each layer from embeddings, pictures among them, which later stages do "
            "not have; leave out pipeline_parallel_size, and set tensor_parallel_size or data_parallel_size"
        )
    deep = len(sight.vision.deepstack)
    if deep > starts[0]:
        raise UnsupportedModelError(
            f"{config.architecture} adds what its tower sees behind its first {deep} layers, and the first of "
            f"{len(starts) + 1} stages has {starts[0]}; lower pipeline_parallel_size"
        )
