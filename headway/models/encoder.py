"""``EncoderModel``: token ids to hidden states, every token seeing all of its text. Architectures differ in configuration.

Shapes: T tokens of the step, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from headway.core.cache import CacheLayout
from headway.core.switches import FUSED_LAYERS, is_on
from headway.kernels.embed import embed
from headway.models.heads import Head, Outputs
from headway.models.interface import Forward, ModelSpec, Target, Want, WeightMap
from headway.models.layers.adapters import ORIGINAL, AdapterSpec, LinearAdapters, TableAdapters, adapter_mask
from headway.models.layers.attention import Attention, AttentionSpec
from headway.models.layers.forms import Rules, rules_for
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Site
from headway.models.layers.mlp import MLP, MLPSpec
from headway.models.layers.norm import Norm, NormSpec, RMSNorm
from headway.models.position_bias import PositionBias, PositionBiasSpec
from headway.models.rope import RopeConfig, rotation
from headway.pooling.spec import PoolingSpec
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSpec:
    """What a token's first hidden state is the sum of, and its norm.

    Attributes:
        word, position, token_type, norm: names in the checkpoint; "" for what there is not.
        num_positions: rows of the table of positions.
        first_position: its row for position 0.
        num_token_types: rows of the table of types.
        width: numbers of a row; 0: as many as of a hidden state. Else ``project`` is the product that follows the norm.
    """

    word: str
    position: str = ""
    token_type: str = ""
    norm: str = ""
    num_positions: int = 0
    first_position: int = 0
    num_token_types: int = 0
    width: int = 0
    project: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBlockSpec:
    """One block.

    Attributes:
        mixer, ffn: its parts; products are named from the block on.
        norms: names of the norms of attention and of the feed-forward block, "" for none.
        before: norms stand before the parts, as x += part(norm(x)); else behind the sum, as x = norm(x + part(x)).
    """

    mixer: AttentionSpec
    ffn: MLPSpec
    norms: tuple[str, str]
    before: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """An encoder, every default resolved.

    Attributes:
        architecture: the name in config.json.
        longest_context: tokens up to which a text may go.
        layers: name of the blocks in the checkpoint.
        layer_of: which block each layer is, where layers share them; (): there are as many.
        norm: of all norms.
        last_norm: name of the one behind all blocks, "" for none.
        bias: added to all layers' scores by distance; None: nothing.
        outputs: what it gives.
        prefixes, unused, renamed: see ``WeightMap``.
        adapters: of all products and tables of embeddings, but for the heads'.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    longest_context: int
    embedding: EmbeddingSpec
    blocks: tuple[EncoderBlockSpec, ...]
    layers: str
    norm: NormSpec
    outputs: Outputs
    last_norm: str = ""
    bias: PositionBiasSpec | None = None
    prefixes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    adapters: AdapterSpec | None = None
    layer_of: tuple[int, ...] = ()

    @property
    def pooling(self) -> PoolingSpec:
        """What it gives instead of logits."""
        return self.outputs.pooling


class EncoderBlock(nn.Module):
    """A block of ``spec``.

    Args:
        cos_sin: float32 [L, Drot], of the mixer's rope.
        adapters: of its four products.

    Attributes:
        attend_otherwise: what attends in place of the mixer, projections [T, 3 * H * D] -> [T, H * D]; None: the mixer does.
    """

    def __init__(
        self,
        spec: EncoderBlockSpec,
        norm: NormSpec,
        hidden: int,
        cos_sin: torch.Tensor,
        adapters: AdapterSpec | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.mixer = Attention(spec.mixer, Site(norm, hidden, cos_sin, -1, dtype, device))
        self.ffn = MLP(spec.ffn, hidden, dtype=dtype, device=device)
        self.attend_otherwise: Callable[[torch.Tensor, StepBatch], torch.Tensor] | None = None
        self.norms = [norm.make(hidden, dtype=dtype, device=device) if name else None for name in spec.norms]
        inner, attended = spec.ffn.size * (2 if spec.ffn.gated else 1), spec.mixer.num_heads * spec.mixer.head_dim
        sizes = ((hidden, 3 * attended), (attended, hidden), (hidden, inner), (spec.ffn.size, hidden))
        made = (LinearAdapters(adapters, *size, dtype=dtype, device=device) for size in sizes if adapters is not None)
        self.adapters = nn.ModuleList(made)
        self._added: list[LinearAdapters] = [each for each in self.adapters if isinstance(each, LinearAdapters)]

    def _product(self, place: int, linear: Linear, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[T, M] of one of the block's four products, in order."""
        y = linear.forward(x)
        return y if mask is None else self._added[place].forward(y, x, mask)

    def _inner(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        ffn = self.ffn
        return ffn.inner(x) if mask is None else ffn.act(self._product(2, ffn.gate_up, x, mask))

    def forward(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        batch: StepBatch,
        bias: torch.Tensor | None,
        following: Norm | None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add both parts.

        Args:
            x: [T, C], overwritten.
            normed: [T, C], what attention reads: x itself where norms stand behind the sums.
            bias: of the scores.
            following: the norm that the next block begins with; None: none.
            mask: see ``adapter_mask``; None where there are no adapters.

        Returns:
            the same of the next block.
        """
        mixer, ffn = self.mixer, self.ffn
        first, second = self.norms
        qkv, otherwise = self._product(0, mixer.qkv, normed, mask), self.attend_otherwise
        attended = mixer.both_ways(qkv, batch, bias) if otherwise is None else otherwise(qkv, batch)
        mixed = self._product(1, mixer.out, attended, mask)
        if self.spec.before:
            normed = second.add(mixed, x) if second is not None else x.add_(mixed)
            passed = self._product(3, ffn.down, self._inner(normed, mask), mask)
            return x, following.add(passed, x) if following is not None else x.add_(passed)
        assert first is not None and second is not None
        x = first.add(mixed, x)
        x = second.add(self._product(3, ffn.down, self._inner(x, mask), mask), x)
        return x, x

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.mixer.destinations(prefix) | self.ffn.destinations(prefix)
        for name, norm in zip(self.spec.norms, self.norms, strict=True):
            if norm is not None:
                found |= norm.destinations(f"{prefix}{name}.")
        linears = (self.mixer.qkv, self.mixer.out, self.ffn.gate_up, self.ffn.down)
        for linear, adapters in zip(linears, self._added, strict=False):
            [name] = linear.parts
            found |= adapters.destinations(prefix + name)
        return found


class EncoderModel(nn.Module):
    """An encoder with uninitialised weights; ``models.load`` fills them and calls ``finalize``.

    Args:
        config: checked numbers.
        dtype, device: of the weights and activations.
        max_model_len: positions it must be able to run.
    """

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        hidden, spec = config.hidden_size, config.embedding
        width = spec.width or hidden
        tables: dict[tuple[RopeConfig | None, int], torch.Tensor] = {}
        for block in config.blocks:
            key = block.mixer.rope, block.mixer.turning
            if key not in tables:
                tables[key] = rotation(*key, 1 if block.mixer.rope is None else max_model_len, device)

        def made(rows: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(rows, width, dtype=dtype, device=device), False) if rows else None

        self.word, self.position, self.token_type = (
            made(rows) for rows in (config.vocab_size, spec.num_positions, spec.num_token_types)
        )
        self.blocks = nn.ModuleList(
            EncoderBlock(block, config.norm, hidden, tables[block.mixer.rope, block.mixer.turning], config.adapters,
                         dtype=dtype, device=device)
            for block in config.blocks
        )  # fmt: skip
        rows = (config.vocab_size, spec.num_token_types) if config.adapters is not None else ()
        self.adapters = nn.ModuleList(
            TableAdapters(config.adapters, number, hidden, dtype=dtype, device=device)
            for number in rows
            if config.adapters is not None
        )
        self._added: list[TableAdapters] = [each for each in self.adapters if isinstance(each, TableAdapters)]
        self.embedding_norm = config.norm.make(width, dtype=dtype, device=device) if spec.norm else None
        self.project = (
            Linear(width, {spec.project: hidden}, bias=True, dtype=dtype, device=device) if spec.project else None
        )
        self.last_norm = config.norm.make(hidden, dtype=dtype, device=device) if config.last_norm else None
        self.bias = None if config.bias is None else PositionBias(config.bias, max_model_len, device=device)
        self.head = Head(config.outputs.head, config.outputs.inputs(hidden), device=device, embedding=self.word)
        self.head_width = self.head.width
        self.token_heads = nn.ModuleList(Head(spec, hidden, device=device) for spec in config.outputs.token_heads)
        self._own: list[EncoderBlock] = [block for block in self.blocks if isinstance(block, EncoderBlock)]
        self._layers = [self._own[i] for i in config.layer_of] if config.layer_of else self._own
        none = tuple(None for _ in self._layers)
        self.spec = ModelSpec(
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            longest_context=config.longest_context,
            eos_token_ids=(),
            cache=CacheLayout(none, (), (-1,) * len(none)),
            layer_kinds=tuple(block.spec for block in self._layers),
            layer_weights=sum(parameter.numel() for parameter in self.blocks.parameters()),
            head_weights=0,
            num_token_types=max(spec.num_token_types, 1),
            adapters=() if config.adapters is None else config.adapters.names,
            pooling=config.outputs.pooling,
        )

    def forward(self, batch: StepBatch, caches: CachePool, want: Want) -> Forward:
        """One step; never waits for the device."""
        mask = None
        if self.config.adapters is not None and batch.adapters is not None:
            mask = adapter_mask(self.config.adapters, batch.adapters, self.dtype)
        x = self._embedded(batch, mask)
        layers = self._layers if want.layers is None else [self._layers[i] for i in want.layers]
        bias = None if self.bias is None else self.bias.table
        begins = [block.norms[0] if block.spec.before else None for block in layers]
        normed = x if begins[0] is None else begins[0].forward(x)
        for block, following in zip(layers, [*begins[1:], self.last_norm], strict=True):
            x, normed = block.forward(x, normed, batch, bias, following, mask)
        return Forward(normed.index_select(0, batch.logit_indices) if want.last_only else normed)

    def _embedded(self, batch: StepBatch, mask: torch.Tensor | None) -> torch.Tensor:
        spec = self.config.embedding
        assert self.word is not None
        x: torch.Tensor = embed(batch.input_ids, self.word)
        if self.position is not None:
            x += embed(batch.positions + spec.first_position, self.position)
        if self.token_type is not None:
            x += self.token_type[0] if batch.token_types is None else embed(batch.token_types, self.token_type)
        if mask is not None and batch.adapters is not None:
            types = torch.zeros_like(batch.input_ids) if batch.token_types is None else batch.token_types
            for each, index in zip(self._added, (batch.input_ids, types), strict=True):
                x = each.forward(x, index, batch.adapters, mask)
        x = x if self.embedding_norm is None else self.embedding_norm.forward(x)
        return x if self.project is None else self.project.forward(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] hidden states, or what was pooled of them -> f32 [N, width]."""
        return self.head.forward(hidden)

    def token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, C] -> f32 [T, numbers of all ``Outputs.token_heads``]."""
        return torch.cat([head(hidden) for head in self.token_heads], dim=1)

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""
        config, spec = self.config, self.config.embedding
        tables = {spec.word: self.word, spec.position: self.position, spec.token_type: self.token_type}
        found = {f"{name}.weight": Target(table) for name, table in tables.items() if table is not None}
        for name, norm in ((spec.norm, self.embedding_norm), (config.last_norm, self.last_norm)):
            if norm is not None:
                found |= norm.destinations(f"{name}.")
        if self.project is not None:
            found |= self.project.destinations("")
        for i, block in enumerate(self._own):
            found |= block.destinations(f"{config.layers}.{i}.")
        if self.bias is not None:
            found |= self.bias.destinations()
        for head in (self.head, *self.token_heads):
            assert isinstance(head, Head)
            found |= head.destinations()
        for each, name in zip(self._added, (spec.word, spec.token_type), strict=False):
            found |= each.destinations(name)
        renamed = config.renamed if config.adapters is None else {**config.renamed, ORIGINAL: ".weight"}
        return WeightMap(found, ("position_ids", "inv_freq"), config.prefixes, config.unused, renamed)

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""
        for module in self.modules():
            if isinstance(module, Linear | RMSNorm | LinearAdapters | TableAdapters):
                module.finalize()
            vars(module).update(module.named_parameters(recurse=False))  # as in ``DecoderModel.finalize``
            vars(module).update(module.named_children())
        self.use_forms(rules_for(self.device, self.dtype) if is_on(FUSED_LAYERS) else Rules())
        if self.bias is not None:
            self.bias.finalize()
        self.head.finalize()

    def use_forms(self, rules: Rules) -> None:
        """Run products in the forms that ``rules`` say are the fastest for a step's number of tokens."""
        for block in self._own:
            if self.config.adapters is None:  # those add to the product before it is activated
                block.ffn.fuse(rules)
