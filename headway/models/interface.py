"""What the house asks of a model. Boot, loading and the runner know models by this page alone.

An architecture is a class that is called with a configuration and gives a ``Model``; ``models.registry`` finds it by the name
in config.json, and its ``read`` makes the configuration. The model declares (``ModelSpec``), the house allocates.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, TypeVar

import torch

from headway.core.cache import CacheLayout
from headway.core.encode import BlockCost
from headway.core.errors import WeightsError
from headway.core.hearing import AlignedRow
from headway.core.media import SoundInfo, VisionInfo
from headway.models.fields import Fields
from headway.parallel.shard import VocabularyPart
from headway.parallel.stage import Stage
from headway.pooling.spec import PoolingSpec
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


class ModelConfig(Protocol):
    """What of a configuration is needed before there is a model."""

    @property
    def architecture(self) -> str:
        """The name in config.json."""

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence that the model can be run with."""

    @property
    def pooling(self) -> PoolingSpec | None:
        """What it gives instead of logits; None: it generates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """What a model declares.

    Attributes:
        architecture: the name in config.json.
        vocab_size: V.
        hidden_size: C, of the hidden states that ``forward`` gives.
        longest_context: most tokens of a sequence.
        eos_token_ids: of config.json; generation_config.json may name others.
        cache: what its layers cache.
        layer_kinds: per layer; layers of one kind launch the same kernels.
        layer_weights: elements of all layers' parameters that a token passes.
        head_weights: elements of the output layer.
        narrow_layers: upper layers that cache nothing, and run for the rows' last tokens alone where no others are wanted.
        auxiliary_layers: layers whose output ``Want.auxiliary`` may ask for.
        num_token_types: kinds of tokens it knows; from 2 on it reads ``StepBatch.token_types``.
        adapters: names of its tasks' adapters; where there are any it reads ``StepBatch.adapters``.
        pooling: what it gives instead of logits; None: it generates.
        encoder: what its encoder takes; None: it has none, and ``encode`` is never called.
        vision: how pictures are prepared for it; None: it sees none.
        sound: how recordings in prompts are prepared for it; None: it hears none there.
        vocabulary: logits are of this part of the vocabulary alone, and other ranks have the others; None: of all of it.
        stage: other ranks have other layers, and take ``streams`` hidden states of a token; None: all layers are here.
        encodes: the encoder runs here; False: on another stage, and what it gives is needed there alone.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    longest_context: int
    eos_token_ids: tuple[int, ...]
    cache: CacheLayout
    layer_kinds: tuple[Hashable, ...]
    layer_weights: int
    head_weights: int
    narrow_layers: int = 0
    auxiliary_layers: tuple[int, ...] = ()
    num_token_types: int = 1
    adapters: tuple[str, ...] = ()
    pooling: PoolingSpec | None = None
    encoder: EncoderSpec | None = None
    vision: VisionInfo | None = None
    sound: SoundInfo | None = None
    vocabulary: VocabularyPart | None = None
    stage: Stage | None = None
    streams: int = 1
    encodes: bool = True

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    def rehearsed_layers(self) -> tuple[int, ...]:
        """Layers that use all kernels of the model: the first of each kind, and the last, which may run for the rows' last
        tokens alone."""
        first = {kind: layer for layer, kind in reversed(list(enumerate(self.layer_kinds)))}
        return tuple(sorted({*first.values(), self.num_layers - 1}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """What a step needs of a forward pass.

    Attributes:
        last_only: hidden states of each row's last token alone. Others are not computed behind the last layer that caches,
            unless an auxiliary output needs them.
        auxiliary: layers whose output is wanted, too, rising.
        layers: run these layers alone, rising: a rehearsal, whose results mean nothing. None: all.
    """

    last_only: bool = False
    auxiliary: tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None


ALL_TOKENS, LAST_TOKENS = Want(), Want(last_only=True)


class Forward(NamedTuple):
    """What a forward pass gives.

    Attributes:
        hidden: [T, C], or with ``Want.last_only`` [R, C], after the final norm, in the model's dtype; of a stage that others
            follow [T, C], what it hands on. Rows of padding and zombies mean nothing.
        auxiliary: [T, C] each, the residual stream behind the layers of ``Want.auxiliary``.
    """

    hidden: torch.Tensor
    auxiliary: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpec:
    """What a model's encoder takes.

    Attributes:
        kind: of ``EncoderItem``s.
        longest: most outputs of an item.
        words_per_row: most words of an item's input for each of its outputs.
        width: numbers of an output, where these lie in the encoder cache; 0: they do not.
        patches: what an output takes of the encoder's time, in units of its input.
        blocks: what each of its blocks costs, where they run one by one (``PartedModel``); (): they run at once.
        sizes: of the longest item, see ``EncoderItem``.
        beside: a second one, of another kind, whose outputs lie in the same cache and are as wide; None: there is none.
    """

    kind: str
    longest: int
    words_per_row: int
    width: int = 0
    patches: int = 1
    blocks: tuple[BlockCost, ...] = ()
    sizes: tuple[int, ...] = ()
    beside: EncoderSpec | None = None

    @property
    def both(self) -> tuple[EncoderSpec, ...]:
        """It, and what stands beside it."""
        return (self,) if self.beside is None else (self, self.beside)

    def of_kind(self, kind: str) -> tuple[BlockCost, ...]:
        """The blocks of the one that takes such items; (): there is none."""
        return next((each.blocks for each in self.both if each.kind == kind), ())

    @property
    def words(self) -> int:
        """Of the longest item's input."""
        return self.longest * self.words_per_row


class EncoderInput(NamedTuple):
    """One item on the device. The buffer belongs to the step: what is needed later must be written elsewhere.

    Attributes:
        rows, sizes: host integers, see ``EncoderItem``.
        data: int32 [n], its input.
        places: int32 [rows], where its outputs go, see ``EncodeJob``.
    """

    rows: int
    sizes: tuple[int, ...]
    data: torch.Tensor
    places: torch.Tensor


class Target(NamedTuple):
    """Where a checkpoint's tensor goes.

    Attributes:
        tensor: the view of our parameter it fills, of the tensor's shape.
        order: int64 [rows], the tensor's row that each of ours is; None: they are in the same order.
        rows: of the tensor, where there are others than ours; None: as many.
        columns: (first, end, of how many) of the tensor's columns are ours; None: all.
        transposed: the checkpoint has the matrix [inputs, outputs]; all of the above is said of it transposed.
    """

    tensor: torch.Tensor
    order: torch.Tensor | None = None
    rows: int | None = None
    columns: tuple[int, int, int] | None = None
    transposed: bool = False

    @classmethod
    def part(cls, tensor: torch.Tensor, taken: tuple[torch.Tensor, int] | None) -> Target:
        """Where other ranks have other rows: ours, and how many there are. None: all are here."""
        return cls(tensor) if taken is None else cls(tensor, *taken)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's."""
        shape = tuple(self.tensor.shape)
        if self.columns is not None:
            shape = (shape[0], self.columns[2])
        shape = shape if self.rows is None else (self.rows, *shape[1:])
        return shape[::-1] if self.transposed else shape

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy ``tensor``, cast to our dtype. Of one that lies in a file only what is ours is read."""
        tensor = tensor.T if self.transposed else tensor
        if self.columns is not None:
            tensor = tensor[:, self.columns[0] : self.columns[1]]
        self.tensor.copy_(tensor if self.order is None else tensor.index_select(0, self.order.to(tensor.device)))


class Stack(NamedTuple):
    """A checkpoint's tensor that holds the tensors of several ``Target``s.

    Attributes:
        names: of the targets: for each index of the tensor's first dimension those that its rows are, one behind the other.
        transposed: the last two dimensions of the tensor are those of the targets exchanged.
        interleaved: rows of an index alternate between its targets.
    """

    names: tuple[tuple[str, ...], ...]
    transposed: bool = False
    interleaved: bool = False

    def pieces(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(a target's name, its tensor), all of them.

        Raises:
            WeightsError: the tensor has not as many parts.
        """
        parts, rows = len(self.names[0]), tensor.dim() - 1 if self.transposed else 1
        if tensor.dim() < 2 or tensor.shape[0] != len(self.names) or tensor.shape[rows] % parts:
            raise WeightsError(
                f"tensor {name} has shape {list(tensor.shape)}; config.json implies {len(self.names)} times {parts} parts"
            )
        for names, slab in zip(self.names, tensor, strict=True):
            slab = slab.transpose(0, 1) if self.transposed else slab
            for at, own in enumerate(names):
                yield own, slab[at::parts] if self.interleaved else slab.chunk(parts)[at]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Every checkpoint tensor that a model needs.

    Attributes:
        targets: by name.
        computed: endings of names that some exporters write and that are computed, shared, or not needed here.
        prefixes: beginnings of names that some exporters leave out, or add.
        unused: beginnings of names, behind a prefix, that are not needed here.
        renamed: older endings of names -> today's.
        aliases: other names that some exporters write -> those in ``targets``.
        stacks: tensors that some exporters write in place of several in ``targets``, by name.
        respelled: (parts of names that some exporters write, what they are here), applied in this order.
        beginnings: of names that exporters write -> those here; applied in order.
    """

    targets: Mapping[str, Target]
    computed: tuple[str, ...] = field(default=())
    prefixes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    respelled: tuple[tuple[str, str], ...] = ()
    beginnings: tuple[tuple[str, str], ...] = ()

    def find(self, name: str) -> tuple[str, Target] | None:
        """The target of a checkpoint's tensor, and its name here; None: there is none."""
        for each in self._spellings(name):
            if each in self.targets:
                return each, self.targets[each]
        return None

    def stack(self, name: str) -> Stack | None:
        """What a checkpoint's tensor holds, where it is several of ``targets``."""
        return next((self.stacks[each] for each in self._spellings(name) if each in self.stacks), None)

    def _spellings(self, name: str) -> Sequence[str]:
        name = self._begun(self.aliases.get(name, name))
        name = self.aliases.get(name, name)
        for part, ours in self.respelled:
            name = name.replace(part, ours)
        for old, new in self.renamed.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return [name, *(other for prefix in self.prefixes for other in (prefix + name, name.removeprefix(prefix)))]

    def _begun(self, name: str) -> str:
        for old, new in self.beginnings:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        return name

    def leaves_out(self, name: str) -> bool:
        """Whether a tensor that has no target is none that is missed."""
        spelled = self._spellings(name)
        name = self._begun(name)
        owns = (name, *(name.removeprefix(prefix) for prefix in self.prefixes), *spelled)
        return name.endswith(self.computed) or any(own.startswith(self.unused) for own in owns if self.unused)


class Model(Protocol):
    """A model with its weights in place."""

    @property
    def spec(self) -> ModelSpec:
        """What it declares."""

    @property
    def device(self) -> torch.device:
        """Of its weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its hidden states."""

    @property
    def head_width(self) -> int:
        """Numbers that ``logits`` gives for each hidden state."""

    def forward(self, batch: StepBatch, caches: CachePool, want: Want) -> Forward:
        """One step. Writes the step's keys, values and states into ``caches``; never waits for the device."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] hidden states -> [N, V] in the model's dtype; of a model that pools f32 [N, width], what its head gives."""

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""

    def finalize(self) -> None:
        """Called once, when the weights are in place; nothing may move or replace them afterwards."""

    def eval(self) -> Self:
        """As torch modules have it."""


class EncodingModel(Model, Protocol):
    """A model whose ``spec.encoder`` is not None."""

    def encode(self, inputs: Sequence[EncoderInput], starts: torch.Tensor, caches: CachePool) -> None:
        """Encode items, ahead of the rows of a step that read them; never waits for the device.

        Each item's outputs, or the keys and values that cross-attention has of them, go to its ``places``.

        Args:
            starts: int32 [items + 1], the first output of each item among all of them, and their number.
        """


class Aligner(Protocol):
    """Finds when the tokens of rows are heard.

    Attributes:
        layers: whose outputs it reads (``Want.auxiliary``).
    """

    layers: tuple[int, ...]

    def __call__(
        self, auxiliary: Sequence[torch.Tensor], batch: StepBatch, rows: Sequence[AlignedRow], caches: CachePool
    ) -> torch.Tensor:
        """int32 [all the rows' tokens], row by row: the encoder output with which each begins. Never waits for the device."""


class AligningModel(Model, Protocol):
    """A model whose decoder reads recordings."""

    @property
    def cross_heads(self) -> tuple[int, int]:
        """Layers, and heads of each, whose cross-attention is here whole; none where ranks share them."""

    def aligner(self, heads: Sequence[tuple[int, int]]) -> Aligner:
        """By these (layer, head)s of its decoder."""


class PassShape(Hashable, Protocol):
    """Sizes of a pass through an encoder, as its model sees them: exact, or those of a captured one."""

    def holds(self, other: Self) -> bool:
        """Whether a pass of exactly ``other`` fits."""


Shape = TypeVar("Shape", bound=PassShape)
Buffers = TypeVar("Buffers")


class PartedModel(Model, Protocol[Shape, Buffers]):
    """A model whose ``spec.encoder.blocks`` are not empty: its encoder runs block by block, one item at a time.

    What lies between two blocks lies in buffers, at addresses of their own, which nothing else writes. No call waits for the
    device.
    """

    def pass_buffers(self) -> Buffers:
        """Memory for the largest item."""

    def pass_shapes(self) -> list[Shape]:
        """Sizes whose blocks are worth capturing, rising."""

    def exact_shape(self, sizes: tuple[int, ...]) -> Shape:
        """Of an item of ``sizes``."""

    def blocks_of(self, shape: Shape) -> tuple[BlockCost, ...]:
        """The blocks that passes of ``shape`` go through."""

    def open_pass(self, item: EncoderInput, buffers: Buffers, shape: Shape) -> None:
        """An item's pass begins, padded to ``shape``; ``item.places`` is not read."""

    def run_block(self, number: int, buffers: Buffers, shape: Shape) -> None:
        """The pass goes through a block: the same work for every item of ``shape``."""

    def close_pass(self, item: EncoderInput, buffers: Buffers, caches: CachePool) -> None:
        """The pass ends: outputs go to ``item.places``; ``item.data`` is not read."""


class Architecture(Protocol):
    """A class of the registry."""

    def read(self, fields: Fields) -> ModelConfig:
        """The configuration in a config.json.

        Raises:
            UnsupportedModelError: a value that is not implemented, or is inconsistent; names the field.
        """

    def __call__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> Model:
        """A model with uninitialised weights.

        Args:
            dtype, device: of the weights and activations.
            max_model_len: positions it must be able to run.
        """
