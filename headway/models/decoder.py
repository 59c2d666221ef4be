"""``DecoderModel``: token ids to logits, through blocks. Architectures differ in their configuration, not in code.

Shapes: T tokens of the step, C hidden size, V vocabulary, R rows, N positions whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from headway.core.cache import CacheLayout
from headway.core.errors import UnsupportedModelError
from headway.core.switches import FUSED_LAYERS, is_on
from headway.models.blocks import Block, BlockSpec
from headway.models.heads import Head, Outputs
from headway.models.interface import Forward, ModelSpec, Target, Want, WeightMap
from headway.models.layers.embedding import Embedding
from headway.models.layers.forms import FormTable, Rules, rules_for
from headway.models.layers.junction import ProjectIn, Stream
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import StateMixer
from headway.models.layers.mlp import MLP
from headway.models.layers.norm import NormSpec, RMSNorm
from headway.models.rope import RopeConfig, cos_sin_table, no_rotation
from headway.pooling.spec import PoolingSpec
from headway.recurrent.base import load_states, save_states
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderNames:
    """What a decoder's parts are called in the checkpoint; blocks are ``layers``.0, ``layers``.1, ..."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder, every default resolved.

    Attributes:
        architecture: the name in config.json, a key of ``models.registry``.
        hidden_size: C.
        longest_context: tokens up to which a sequence may go.
        blocks: from the first to the last.
        norm: of all norms.
        tie_word_embeddings: the output matrix is the embedding.
        embedding_multiplier: of the embeddings; rounded to the model's dtype first with ``round_multiplier``.
        logit_multiplier: of the logits.
        logit_soft_cap: behind that logits become cap * tanh(logit / cap); 0: off.
        eos_token_ids: of config.json; generation_config.json may name more.
        narrow_from: the last layer whose keys and values later tokens need; from its scores on only the rows' last tokens are
            computed where no others are wanted. None: the last layer.
        outputs: what it gives instead of logits; None: it generates.
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
    logit_soft_cap: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    names: DecoderNames = DecoderNames()
    narrow_from: int | None = None
    outputs: Outputs | None = None

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
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__()
        self.config, self.dtype, self.device, self.max_model_len = config, dtype, device, max_model_len
        hidden, vocab = config.hidden_size, config.vocab_size
        layout = CacheLayout.of(
            [block.cache for block in config.blocks], max_model_len, [block.state for block in config.blocks]
        )
        tables: dict[tuple[RopeConfig | None, int], torch.Tensor] = {}  # layers with the same rotation share one

        def table(block: BlockSpec) -> torch.Tensor | None:
            attention = None if block.mixer is None else block.mixer.rotated
            if attention is None:
                return None
            key = attention.rope, attention.head_dim
            if key not in tables:
                tables[key] = _rotation(*key, max_model_len, device)
            return tables[key]

        self.embedding = Embedding(vocab, hidden, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(
            Block(block, config.norm, hidden, table(block), group, dtype=dtype, device=device)
            for block, group in zip(config.blocks, layout.group_of_layer, strict=True)
        )
        self.norm = config.norm.make(hidden, dtype=dtype, device=device)
        tied = self.embedding.weight if config.tie_word_embeddings else None
        name, _, head = config.names.head.rpartition(".")
        self._head_prefix = f"{name}." if name else ""
        self.head, self.outputs, self.head_width = None, None, vocab
        if config.outputs is None:
            self.head = Linear(hidden, {head: vocab}, bias=False, dtype=dtype, device=device, tied=tied)
        else:
            inputs = config.outputs.inputs(hidden)
            self.outputs = Head(config.outputs.head, inputs, device=device, embedding=self.embedding.weight)
            self.head_width = self.outputs.width
        multiplier = config.embedding_multiplier
        if config.round_multiplier:
            multiplier = float(torch.tensor(multiplier, dtype=dtype))
        self._multiplier = multiplier
        narrow = config.narrow_from
        self._narrow_from = len(config.blocks) - 1 if narrow is None else narrow
        attentions = [block.mixer.rotated for block in config.blocks if block.mixer is not None]
        if not all(each.causal for each in attentions if each is not None):
            self._narrow_from = len(config.blocks)
        self.spec = self._declare(layout)
        self._layers: list[Block] = [block for block in self.blocks if isinstance(block, Block)]
        self._project_head = None if self.head is None else ProjectIn(None, self.head)
        self._forms = FormTable([], None, Rules())  # until ``finalize``

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
            layer_weights=sum(parameter.numel() for parameter in self.blocks.parameters()),
            head_weights=0 if self.head is None else config.vocab_size * config.hidden_size,
            auxiliary_layers=tuple(range(len(config.blocks))),
            pooling=config.pooling,
        )

    def forward(self, batch: StepBatch, caches: CachePool, want: Want) -> Forward:
        """One step. Writes the step's keys and values into ``caches``; never waits for the device."""
        if caches.state_storage is not None:
            load_states(batch, caches.state_storage)
        x = self.embedding.forward(batch.input_ids)
        if self._multiplier != 1.0:
            x *= self._multiplier
        num_tokens = x.shape[0]
        forms = self._forms.of(num_tokens, batch.num_decode_rows == num_tokens)
        last_only = want.last_only and batch.num_decode_rows < len(
            batch.row_slots
        )  # else there is a row for every token
        narrow_from = len(self._layers)
        if last_only and self._forms.narrows(num_tokens) and max(want.auxiliary, default=-1) < self._narrow_from:
            narrow_from = self._narrow_from
        layers = range(len(self._layers)) if want.layers is None else want.layers
        auxiliary, batch_of_all = [], batch
        stream = self._layers[layers[0]].enter(x, forms[layers[0]])
        for i in layers:
            if i == narrow_from:
                stream = self._layers[i].forward_last(stream, batch, caches.layers[i], forms[i])
                if i != layers[-1]:
                    batch, forms = batch.of_last_tokens(), self._forms.plain
            else:
                stream = self._layers[i].forward(stream, batch, caches.layers[i], forms[i])
            if i in want.auxiliary:
                auxiliary.append(stream.residual.clone())
        if caches.state_storage is not None:
            save_states(batch_of_all, caches.state_storage)
        hidden = self._last_norm(stream)
        if last_only and narrow_from == len(self._layers):
            hidden = hidden.index_select(0, batch.logit_indices)
        return Forward(hidden, tuple(auxiliary))

    def _last_norm(self, stream: Stream) -> torch.Tensor:
        """[T, C]; where no norm is left between products the last one is of its own all the same."""
        normed = stream.normed
        return self.norm.forward(stream.residual) if normed is None or stream.squares is not None else normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] hidden states -> [N, V] in the model's dtype; of a model that pools f32 [N, width], what its head gives."""
        if self.outputs is not None:
            return self.outputs.forward(hidden)
        assert self._project_head is not None
        logits = self._project_head(Stream(hidden, hidden), self._forms.of_head(hidden.shape[0]))
        config = self.config
        if config.logit_multiplier != 1.0:
            logits *= config.logit_multiplier
        if config.logit_soft_cap:
            logits = logits.div_(config.logit_soft_cap).tanh_().mul_(config.logit_soft_cap)
        return logits

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""
        names = self.config.names
        found: dict[str, Target] = self.embedding.destinations(f"{names.embedding}.")
        for i, block in enumerate(self._layers):
            found |= block.destinations(f"{names.layers}.{i}.")
        found |= self.norm.destinations(f"{names.norm}.")
        shared: tuple[str, ...] = ()
        if self.outputs is not None:
            found |= self.outputs.destinations()
            shared = (f"{names.head}.weight", f"{names.head}.bias")
        elif self.head is not None:
            found |= self.head.destinations(self._head_prefix)
            shared = (f"{names.head}.weight",) if self.config.tie_word_embeddings else ()
        trunk = names.norm.rpartition(".")[0]
        return WeightMap(found, ("rotary_emb.inv_freq", *shared), (f"{trunk}.",) if trunk else ())

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""
        for module in self.modules():
            if isinstance(module, Linear | RMSNorm | MLP | StateMixer):
                module.finalize()
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

    def use_forms(self, rules: Rules) -> None:
        """Run each product in the form that ``rules`` say is the fastest for a step's number of tokens."""
        products = [block.products for block in self._layers]
        head = None if self._project_head is None else self._project_head.product()
        self._forms = FormTable(products, head, rules)


def _rotation(rope: RopeConfig | None, head_dim: int, max_len: int, device: torch.device) -> torch.Tensor:
    return no_rotation(head_dim, max_len, device) if rope is None else cos_sin_table(rope, max_len, device)
