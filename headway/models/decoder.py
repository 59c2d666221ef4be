"""``DecoderModel``: token ids to logits, through blocks. Architectures differ in their configuration, not in code.

Shapes: T tokens of the step, C hidden size, V vocabulary, R rows, N positions whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from headway.core.cache import CacheLayout
from headway.core.errors import UnsupportedModelError
from headway.core.switches import FAST_PREFILL, FUSED_LAYERS, is_on
from headway.kernels.cap_logits import cap_logits
from headway.kernels.linear_forms.shapes import HEAD_MULTIPLE
from headway.models.blocks import Block, BlockSpec
from headway.models.heads import Head, Outputs
from headway.models.interface import Forward, ModelSpec, Stack, Target, Want, WeightMap
from headway.models.layers.attention import Attention
from headway.models.layers.embedding import Embedding, ShardedEmbedding
from headway.models.layers.forms import FormTable, LayerForms, Rules, rules_for
from headway.models.layers.junction import ProjectIn, Stream
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Site, StateMixer
from headway.models.layers.mlp import MLP
from headway.models.layers.moe import Mixture
from headway.models.layers.norm import Norm, NormSpec, RMSNorm
from headway.models.mtp import MTPSpec
from headway.models.native_blocks import NativeBlocks
from headway.models.rope import RopeConfig, rotation
from headway.parallel.shard import VocabularyPart
from headway.parallel.stage import Stage
from headway.pooling.spec import PoolingSpec
from headway.recurrent.base import load_states, save_states
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderNames:
    """What a decoder's parts are called in the checkpoint; blocks are ``layers``.0, ``layers``.1, ..., ``blocks_per_layer``
    of them each. ``norm`` "": none stands behind the last block."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    blocks_per_layer: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder, every default resolved.

    Attributes:
        architecture: the name in config.json, a key of ``models.registry``.
        hidden_size: C.
        longest_context: tokens up to which a sequence may go.
        longest: tokens of the longest sequence that the engine admits, which some rotations follow; drafts may have positions
            behind it. 0: as many as there are positions.
        blocks: from the first to the last.
        norm: of all norms.
        tie_word_embeddings: the output matrix is the embedding.
        embedding_multiplier: of the embeddings; rounded to the model's dtype first with ``round_multiplier``.
        logit_multiplier: of the logits.
        head_bias: the output layer has one.
        logit_soft_cap: behind that logits become cap * tanh(logit / cap); 0: off.
        eos_token_ids: of config.json; generation_config.json may name more.
        narrow_from: the last layer whose keys and values later tokens need; from its scores on only the rows' last tokens are
            computed where no others are wanted. None: the last layer.
        outputs: what it gives instead of logits; None: it generates.
        respelled: see ``WeightMap``.
        unused: beginnings of checkpoint names that are not needed, behind the first word of ``names``.
        vocabulary: of embedding and logits this rank has this part; None: all.
        stage: of the blocks this rank has those of a stage; None: all.
        mtp: the checkpoint's layer that drafts tokens, which the model itself leaves out; None: it has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    longest_context: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    round_multiplier: bool = False
    logit_multiplier: float = 1.0
    head_bias: bool = False
    logit_soft_cap: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    names: DecoderNames = DecoderNames()
    narrow_from: int | None = None
    outputs: Outputs | None = None
    unused: tuple[str, ...] = ()
    respelled: tuple[tuple[str, str], ...] = ()
    longest: int = 0
    vocabulary: VocabularyPart | None = None
    stage: Stage | None = None
    mtp: MTPSpec | None = None

    @property
    def own(self) -> range:
        """The blocks of this rank."""
        return range(len(self.blocks)) if self.stage is None else self.stage.own

    @property
    def embeds_everywhere(self) -> bool:
        """Whether every stage reads the embedding: it runs an encoder that does, or layers that read it beside hidden
        states."""
        return False

    @property
    def pooling(self) -> PoolingSpec | None:
        """What it gives instead of logits; None: it generates."""
        return None if self.outputs is None else self.outputs.pooling

    def __post_init__(self) -> None:
        for block in self.blocks:
            attention = None if block.mixer is None else block.mixer.rotated
            heads, kv_heads = (attention.num_heads, attention.num_kv_heads) if attention else (1, 1)
            if heads % kv_heads:
                raise UnsupportedModelError(
                    f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
                )


class DecoderModel(nn.Module):
    """A decoder with uninitialised weights; ``models.load`` fills them and calls ``finalize``.

    Args:
        config: checked numbers.
        dtype, device: of the weights and activations.
        max_model_len: positions the rotary tables cover.

    Attributes:
        knows_stages: parts of the forward pass that a class replaces and that are right on stages, too; of that class alone.
    """

    knows_stages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__()
        self.config, self.dtype, self.device, self.max_model_len = config, dtype, device, max_model_len
        hidden, vocab = config.hidden_size, config.vocab_size
        layout = CacheLayout.of(
            [block.cache for block in config.blocks], max_model_len, [block.state for block in config.blocks]
        ).of_layers(config.own)
        tables: dict[tuple[RopeConfig | None, int], torch.Tensor] = {}  # layers with the same rotation share one

        def table(block: BlockSpec) -> torch.Tensor | None:
            attention = None if block.mixer is None else block.mixer.rotated
            if attention is None:
                return None
            key = attention.rope, attention.turning
            if key not in tables:
                tables[key] = rotation(*key, max_model_len, device, config.longest)
            return tables[key]

        part, stage, tie = config.vocabulary, config.stage, config.tie_word_embeddings
        self._enters, self._ends = stage is None or stage.is_first, stage is None or stage.is_last
        generates = config.outputs is None and self._ends
        self._padding = -vocab % HEAD_MULTIPLE if generates and part is None else 0
        if part is not None:
            self.embedding: Embedding = ShardedEmbedding(part, hidden, dtype=dtype, device=device)
        else:
            shares = tie if generates else config.outputs is not None and config.outputs.head.shares_embedding
            shares = shares or (stage is not None and stage.embeds)
            reads = vocab if self._enters or config.embeds_everywhere or (self._ends and shares) else 0
            behind = self._padding if tie else 0
            self.embedding = Embedding(reads, hidden, dtype=dtype, device=device, padding=behind)
        self.blocks = nn.ModuleList(
            config.blocks[i].make(
                Site(config.norm, hidden, table(config.blocks[i]), layout.group_of_layer[i], dtype, device)
            )
            for i in config.own
        )
        made = config.norm.make(hidden, dtype=dtype, device=device) if config.names.norm else None
        self.norm: Norm | None = made
        tied = self.embedding.weight if tie else None
        name, _, head = config.names.head.rpartition(".")
        self._head_prefix = f"{name}." if name else ""
        self.head, self.outputs, self.head_width = None, None, vocab
        if generates:
            rows = vocab if part is None else part.rows
            self.head = Linear(
                hidden,
                {head: rows},
                bias=config.head_bias,
                dtype=dtype,
                device=device,
                tied=tied,
                padding=self._padding,
            )
            if part is not None:
                self.head.taken = {head: part.taken}
                with torch.no_grad():
                    for table_of_head in (None if tied is not None else self.head.weight, self.head.bias):
                        if table_of_head is not None:
                            table_of_head[part.own :].zero_()
        elif config.outputs is not None:
            spec, inputs = config.outputs.head, config.outputs.inputs(hidden)
            self.head_width = spec.width(inputs)
            if self._ends:
                self.outputs = Head(spec, inputs, device=device, embedding=self.embedding.weight)
        multiplier = config.embedding_multiplier
        if config.round_multiplier:
            multiplier = float(torch.tensor(multiplier, dtype=dtype))
        self._multiplier = multiplier
        narrow = config.narrow_from if is_on(FAST_PREFILL) else None
        self._narrow_from = len(config.blocks) - 1 if narrow is None else narrow
        attentions = [block.mixer.rotated for block in config.blocks if block.mixer is not None]
        if not all(each.causal for each in attentions if each is not None):
            self._narrow_from = len(config.blocks)
        self.num_added = 0  # leading layers behind which ``_add_behind`` adds something
        self.spec = self._declare(layout)
        self._layers: list[Block] = [block for block in self.blocks if isinstance(block, Block)]
        self._project_head = None if self.head is None else ProjectIn(None, self.head)
        self._forms = FormTable([], None, Rules())  # until ``finalize``
        self._native = NativeBlocks([], 0, dtype)

    def _declare(self, layout: CacheLayout) -> ModelSpec:
        config = self.config
        return ModelSpec(
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            longest_context=config.longest_context,
            eos_token_ids=config.eos_token_ids,
            cache=layout,
            layer_kinds=tuple((block, i > self._narrow_from) for i, block in enumerate(config.blocks)),
            layer_weights=sum(block.token_weights for block in self.blocks if isinstance(block, Block)),
            narrow_layers=max(len(config.blocks) - 1 - self._narrow_from, 0),
            head_weights=0 if self.head is None else config.vocab_size * config.hidden_size,
            auxiliary_layers=tuple(range(len(config.blocks))),
            pooling=config.pooling,
            vocabulary=config.vocabulary,
            stage=config.stage,
        )

    def forward(self, batch: StepBatch, caches: CachePool, want: Want) -> Forward:
        """One step. Writes the step's keys and values into ``caches``; never waits for the device."""
        batch.masks.clear()
        load_states(batch, caches)
        x, batch = self._inputs(batch, caches)
        num_tokens = x.shape[0]
        forms = self._forms.of(num_tokens, batch.num_decode_rows == num_tokens)
        last_only = want.last_only and batch.num_decode_rows < len(
            batch.row_slots
        )  # else there is a row for every token
        first, narrow_from = self.config.own.start, len(self.config.blocks)
        if (
            last_only
            and self._ends
            and self._forms.narrows(num_tokens)
            and max(want.auxiliary, default=-1) < self._narrow_from
        ):
            narrow_from = self._narrow_from
        layers = self._own(want)
        auxiliary, batch_of_all = [], batch
        stream = self._enter(x, batch, self._layers[layers[0] - first], forms[layers[0] - first])
        done = 0
        if not self.num_added:
            done, stream = self._native(stream, batch, caches, want, min(narrow_from, self.config.own.stop))
        for i in layers[done:]:
            layer, form = self._layers[i - first], forms[i - first]
            if i == narrow_from:
                stream = layer.forward_last(stream, batch, caches.layers[i], form)
                if i != layers[-1]:
                    batch, forms = batch.of_last_tokens(), self._forms.plain
            else:
                stream = layer.forward(stream, batch, caches.layers[i], form)
            if i < self.num_added:
                stream = self._add_behind(i, stream, batch, caches, forms)
            if i in want.auxiliary:
                auxiliary.append(stream.residual.clone())
        save_states(batch_of_all, caches)
        if not self._ends:
            return Forward(stream.residual.flatten(1), tuple(auxiliary))
        hidden = self._last_norm(stream)
        if last_only and narrow_from == len(self.config.blocks):
            hidden = hidden.index_select(0, batch.logit_indices)
        return Forward(hidden, tuple(auxiliary))

    def _enter(self, x: torch.Tensor, batch: StepBatch, block: Block, forms: LayerForms) -> Stream:
        """The stream of embeddings x [T, C] at its first block."""
        return block.enter(x, forms)

    def _entering(self, batch: StepBatch) -> torch.Tensor:
        """[T, C] that may be written to: the embeddings, or what the stage before has made of them."""
        if self._enters:
            return self._embedded(batch)
        assert batch.entering is not None, "a later stage runs what has come from the one before"
        return batch.entering

    def _embedded(self, batch: StepBatch) -> torch.Tensor:
        """[T, C] that may be written to: the embeddings, with all that is added to them; of the first stage alone."""
        return self.embedding.forward(batch.input_ids, self._multiplier)

    def _embedded_here(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """The embeddings, for layers that read them beside what enters, x [T, C]: on each stage from its own table."""
        return x if self._enters else self._embedded(batch)

    def _with_entry(self, found: WeightMap, own: Mapping[str, Target]) -> WeightMap:
        """``found``, and what only the first stage needs; others have no use for it."""
        if self._enters:
            return replace(found, targets={**found.targets, **own})
        return replace(found, unused=(*found.unused, *own))

    def _own(self, want: Want) -> Sequence[int]:
        """The layers that run here, of those that are wanted."""
        own = self.config.own
        return own if want.layers is None else [i for i in want.layers if i in own] or own[:1]

    def _inputs(self, batch: StepBatch, caches: CachePool) -> tuple[torch.Tensor, StepBatch]:
        """What enters the first block, [T, C], and the batch that the blocks see."""
        return self._entering(batch), batch

    def _add_behind(
        self, layer: int, stream: Stream, batch: StepBatch, caches: CachePool, forms: Sequence[LayerForms]
    ) -> Stream:
        """What is added behind one of the first ``num_added`` layers."""
        raise NotImplementedError

    def _last_norm(self, stream: Stream) -> torch.Tensor:
        """[T, C]; where no norm is left between products the last one is of its own all the same."""
        normed = stream.normed
        if self.norm is None:
            return stream.residual
        return self.norm.forward(stream.residual) if normed is None or stream.squares is not None else normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] hidden states -> [N, V] in the model's dtype, rows perhaps farther apart; of a model that pools f32
        [N, width], what its head gives."""
        if self.outputs is not None:
            return self.outputs.forward(hidden)
        assert self._project_head is not None
        logits = self._project_head(Stream(hidden, hidden), self._forms.of_head(hidden.shape[0]))
        config = self.config
        if config.logit_multiplier != 1.0 or config.logit_soft_cap:
            cap_logits(logits, config.logit_multiplier, config.logit_soft_cap)
        return logits[:, : config.vocab_size] if self._padding else logits

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""
        names = self.config.names
        whole, own = (
            {i // names.blocks_per_layer for i in blocks}
            for blocks in (range(len(self.config.blocks)), self.config.own)
        )
        elsewhere = [f"{names.layers}.{i}." for i in sorted(whole - own)]
        found: dict[str, Target] = {}
        if self.embedding.weight.shape[0]:
            found |= self.embedding.destinations(f"{names.embedding}.")
        else:
            elsewhere.append(f"{names.embedding}.")
        stacks: dict[str, Stack] = {}
        for i, block in zip(self.config.own, self._layers, strict=True):
            found |= block.destinations(f"{names.layers}.{i // names.blocks_per_layer}.")
            stacks |= block.stacks(f"{names.layers}.{i // names.blocks_per_layer}.")
            elsewhere += block.elsewhere(f"{names.layers}.{i // names.blocks_per_layer}.")
        if self.norm is not None:
            found |= self.norm.destinations(f"{names.norm}.")
        shared: tuple[str, ...] = ()
        if self.outputs is not None:
            found |= self.outputs.destinations()
            shared = (f"{names.head}.weight", f"{names.head}.bias")
        elif self.head is not None:
            found |= self.head.destinations(self._head_prefix)
            shared = (f"{names.head}.weight",) if self.config.tie_word_embeddings else ()
        else:
            elsewhere += [
                f"{names.head}.",
                *([] if self.config.outputs is None else self.config.outputs.head.beginnings),
            ]
        # transformers gives classifiers of tokens either name, by family
        ends = [end for end in ("weight", "bias") if f"score.{end}" in found]
        aliases = {f"classifier.{end}": f"score.{end}" for end in ends}
        trunk = names.norm.rpartition(".")[0]
        prefix, computed = f"{trunk}." if trunk else "", ("rotary_emb.inv_freq", *shared)
        unused = tuple(dict.fromkeys([*elsewhere, *(name.removeprefix(prefix) for name in elsewhere)]))
        return WeightMap(
            found,
            computed,
            (prefix,) if prefix else (),
            (*self.config.unused, *unused),
            stacks=stacks,
            respelled=self.config.respelled,
            # a text model that was taken out of one with sight keeps its names
            beginnings=(("model.language_model.", "model."), ("language_model.", "")),
            aliases=aliases,
        )

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""
        finalize_parts(self)
        if self.head is not None and self.head.tied:
            self.embedding.share(self.head.packed)
        if self.outputs is not None:
            self.outputs.finalize()
        for module in self.modules():
            # nn.Module finds parameters and submodules through a Python-level __getattr__, at 20 look-ups a layer a
            # visible part of a decode step on CPU. Plain instance attributes shadow it.
            vars(module).update(module.named_parameters(recurse=False))
            vars(module).update(module.named_children())
        for block, following in zip(self._layers, [*self._layers[1:], None], strict=True):
            block.link(self.norm if following is None else following.first_norm)
        self.use_forms(rules_for(self.device, self.dtype) if is_on(FUSED_LAYERS) else Rules())
        if self.device.type == "cpu":
            self._native = NativeBlocks(self._layers, self.config.own.start, self.dtype)

    def use_forms(self, rules: Rules) -> None:
        """Run each product in the form that ``rules`` say is the fastest for a step's number of tokens."""
        products = [block.products for block in self._layers]
        head = None if self._project_head is None else self._project_head.product()
        self._forms = FormTable(products, head, rules)

    @property
    def forms(self) -> FormTable:
        """The forms of its products; those of a model that is not finalized have no layers."""
        return self._forms


def finalize_parts(model: nn.Module) -> None:
    """Let each part of ``model`` whose weights are in place make its last changes to them."""
    for module in model.modules():
        if isinstance(module, Linear | RMSNorm | MLP | Mixture | StateMixer | Attention):
            module.finalize()
