"""What a model caches between steps, declared layer by layer; plain data. The house allocates it (``state.cache_pool``), deals
its blocks out (``scheduler``) and hands each layer its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from headway.core.ints import cdiv


class CacheKind(Enum):
    """How long a layer needs what it has cached.

    FULL: every token, until the request ends. WINDOW: the last ``window`` tokens. CHUNK: those of the chunk of ``window``
    positions that the newest token lies in (a chunk begins at each multiple). CROSS: the tokens of an encoder,
    written once. STATE: one state a request, of fixed size, written anew by every token.
    """

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    CROSS = "cross"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer's cache.

    Attributes:
        name: "k" and "v", "latent", "conv", ...
        shape: of one token, (heads, size) for keys and values; of one request where the kind is STATE.
        dtype: a torch dtype's name; "": the engine's cache dtype (``EngineArgs.kv_cache_dtype``), of a STATE the model's.
        inputs: numbers that a token brings into a recurrent state, and from which it can be run again; 0: it cannot, or the
            part is none.
        inputs_dtype: of those, as ``dtype``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = ""
    inputs: int = 0
    inputs_dtype: str = ""

    @property
    def elements(self) -> int:
        """Of one token, or of one request."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer caches.

    Attributes:
        parts: in the order in which the layer takes them.
        window: tokens that a query sees at most, itself included; 0 unless the kind is WINDOW or CHUNK.
        shared_with: the layer whose cache this one reads and does not write; None: it has its own.
        tokens: most outputs of the encoder; 0 unless the kind is CROSS.
    """

    kind: CacheKind
    parts: tuple[Part, ...]
    window: int = 0
    shared_with: int | None = None
    tokens: int = 0

    def __post_init__(self) -> None:
        if (self.window > 0) != (self.kind in (CacheKind.WINDOW, CacheKind.CHUNK)):
            raise ValueError(f"a {self.kind.value} cache cannot have a window of {self.window}")
        if (self.tokens > 0) != (self.kind is CacheKind.CROSS):
            raise ValueError(f"a {self.kind.value} cache cannot be of {self.tokens} encoder outputs")


def keys_and_values(
    num_kv_heads: int, head_dim: int, window: int = 0, shared_with: int | None = None, chunk: int = 0
) -> CacheSpec:
    """The cache of an attention layer, of which one of ``window`` and ``chunk`` may be given; neither: of all tokens."""
    parts = (Part("k", (num_kv_heads, head_dim)), Part("v", (num_kv_heads, head_dim)))
    kind = CacheKind.WINDOW if window else CacheKind.CHUNK if chunk else CacheKind.FULL
    return CacheSpec(kind, parts, window or chunk, shared_with)


CONV, SSM = "conv", "ssm"
"""Parts of a STATE: the window of a convolution, [places, channels], and the recurrent state."""
LATENT, INDEX_KEY = "latent", "index_k"
"""Parts of multi-head latent attention: one row a token, without heads."""


def latents(size: int, index_size: int = 0) -> CacheSpec:
    """The cache of a layer with latent attention: latents of ``size`` and, with ``index_size``, the keys of its indexer."""
    index = (Part(INDEX_KEY, (index_size,)),) if index_size else ()
    return CacheSpec(CacheKind.FULL, (Part(LATENT, (size,)), *index))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that use the same blocks: one block table, one list of blocks a request.

    Attributes:
        kind, window: of all its layers; FULL where they differ.
        layers: indices, rising. The n-th layers of all groups share their storage, in which no block belongs to two
            groups.
        tokens: most outputs of the encoder, of a CROSS group.
    """

    kind: CacheKind = CacheKind.FULL
    window: int = 0
    layers: tuple[int, ...] = ()
    tokens: int = 0

    def peak_blocks(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """Most blocks that a request of ``num_tokens`` holds at once, in steps of up to ``step_tokens``."""
        if self.kind is CacheKind.CROSS:  # taken whole
            return cdiv(self.tokens, block_size)
        whole = cdiv(num_tokens, block_size)
        return min(whole, cdiv(self.window + step_tokens, block_size) + 1) if self.window else whole


ALL_LAYERS = (CacheGroup(),)
"""One group that keeps every token."""
MOST_GROUPS = 8
"""Each has a block table, and takes blocks of its own."""
GROUP_COST = 0.01
"""Share of the memory that a group more must save."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All caches of a model. A model without one (an encoder) has no groups.

    Attributes:
        layers: per layer what it declared, None for layers that cache nothing.
        groups: of layers that use the same blocks.
        group_of_layer: per layer the index of its group; -1 for layers that cache nothing.
        states: per layer its state, which lies in no block but belongs to the request's slot; None for layers without. A
            layer may have both. Empty: no layer has one.
    """

    layers: tuple[CacheSpec | None, ...]
    groups: tuple[CacheGroup, ...]
    group_of_layer: tuple[int, ...]
    states: tuple[CacheSpec | None, ...] = ()

    @classmethod
    def of(
        cls, layers: Sequence[CacheSpec | None], context: int, states: Sequence[CacheSpec | None] = ()
    ) -> CacheLayout:
        """Group the layers so that a request of ``context`` tokens takes the least memory.

        All groups have their blocks from one pool, so a block is as large in each: it has room for the largest group's layers.
        Layers of one window are cut into groups of equal size, that of the layers that keep every token, or another one that
        wastes less (vLLM's hybrid KV cache manager does likewise). Where groups save nothing, or layers cache different
        parts, there is one group that keeps every token. Layers of cross-attention are a group of their own, the last.
        """
        kinds: dict[tuple[CacheKind, int], list[int]] = {}
        for i, spec in enumerate(layers):
            if spec is not None and spec.shared_with is None and spec.kind is not CacheKind.CROSS:
                kinds.setdefault((spec.kind, spec.window), []).append(i)
        together = [i for each in kinds.values() for i in each]
        best = _one_group(kinds, sorted(together))
        least = _memory(best, context)
        alike = len({spec.parts for i in together if (spec := layers[i]) is not None}) == 1
        for size in sorted({len(each) for each in kinds.values()}) if alike and len(kinds) > 1 else ():
            cut = [
                CacheGroup(kind, window, tuple(each[start : start + size]))
                for (kind, window), each in kinds.items()
                for start in range(0, len(each), size)
            ]
            memory = _memory(cut, context) * (1 + GROUP_COST * len(cut))
            if len(cut) <= MOST_GROUPS and memory < least:
                best, least = cut, memory
        best += _cross_group(layers)
        group_of = {layer: number for number, group in enumerate(best) for layer in group.layers}
        for i, spec in enumerate(layers):
            if spec is not None and spec.shared_with is not None:
                group_of[i] = group_of[spec.shared_with]
        kept = tuple(states) if any(states) else ()
        return cls(tuple(layers), tuple(best), tuple(group_of.get(i, -1) for i in range(len(layers))), kept)

    def of_layers(self, own: range) -> CacheLayout:
        """The same groups, with the layers of ``own`` alone in them: other ranks have the others."""
        if len(own) == len(self.layers):
            return self
        groups = [replace(group, layers=tuple(i for i in group.layers if i in own)) for group in self.groups]
        layers = [spec if i in own else None for i, spec in enumerate(self.layers)]
        states = [spec if i in own else None for i, spec in enumerate(self.states)]
        return replace(self, layers=tuple(layers), groups=tuple(groups), states=tuple(states))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cached, so that a step takes texts whole."""
        return not self.groups and not self.has_states

    @property
    def has_states(self) -> bool:
        """Whether a layer has a state that belongs to a slot, here or in another stage."""
        return bool(self.states)

    @property
    def recurrent(self) -> list[Part]:
        """The recurrent states of all layers, without windows of convolutions."""
        return [part for spec in self.states if spec is not None for part in spec.parts if part.name == SSM]

    def peak_blocks(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """Most blocks that a request of ``num_tokens`` holds at once, in steps of up to ``step_tokens``."""
        return sum(group.peak_blocks(num_tokens, block_size, step_tokens) for group in self.groups)

    @property
    def edits_per_row(self) -> int:
        """Entries of block tables that change when a row needs one block more: each group's new one, and the one behind a
        window. At least 1."""
        growing = (group for group in self.groups if group.kind is not CacheKind.CROSS)
        return max(1, sum(2 if group.window else 1 for group in growing))

    @property
    def cross(self) -> CacheGroup | None:
        """The group of cross-attention, which is the last; None: there is none."""
        return self.groups[-1] if self.groups and self.groups[-1].kind is CacheKind.CROSS else None

    @property
    def has_latents(self) -> bool:
        """Whether a layer caches latents, which rows of few tokens and of many read in two ways (``core.latents``)."""
        return any(part.name == LATENT for spec in self.layers if spec is not None for part in spec.parts)

    @property
    def cross_tokens(self) -> int:
        """Most encoder outputs that cross-attention reads; 0 without."""
        return 0 if self.cross is None else self.cross.tokens

    @property
    def num_heads(self) -> int:
        """Most heads of any key or value; 0 without."""
        shapes = [part.shape for spec in self.layers if spec is not None for part in spec.parts]
        return max((shape[0] for shape in shapes if len(shape) > 1), default=0)

    def elements_per_token(self) -> int:
        """Over all layers that have a cache of their own."""
        own = (spec for spec in self.layers if spec is not None and spec.shared_with is None)
        return sum(part.elements for spec in own for part in spec.parts)


def _one_group(kinds: Mapping[tuple[CacheKind, int], Sequence[int]], layers: Sequence[int]) -> list[CacheGroup]:
    """All layers together: of their kind where they have the same, else of one that keeps every token."""
    if not kinds:
        return []
    kind, window = next(iter(kinds)) if len(kinds) == 1 else (CacheKind.FULL, 0)
    return [CacheGroup(kind, window, tuple(layers))]


def _cross_group(layers: Sequence[CacheSpec | None]) -> list[CacheGroup]:
    """The layers of cross-attention, if there are any."""
    cross = [i for i, spec in enumerate(layers) if spec is not None and spec.kind is CacheKind.CROSS]
    tokens = max((spec.tokens for spec in layers if spec is not None), default=0)
    return [CacheGroup(CacheKind.CROSS, 0, tuple(cross), tokens)] if cross else []


def _memory(groups: Sequence[CacheGroup], context: int) -> float:
    """Tokens times layers that a request of ``context`` tokens takes, those a block has no layer for included."""
    size = max((len(group.layers) for group in groups), default=0)
    return float(size * sum(min(group.window or context, context) for group in groups))
