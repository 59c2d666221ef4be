"""Which part of a layer's weights and of the vocabulary a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.core.errors import UnsupportedModelError
from headway.core.ints import cdiv
from headway.parallel.group import Group
from headway.parallel.mesh import share

Taken = tuple[torch.Tensor, int]
"""int64 [rows], rows of a checkpoint's tensor, and how many it has."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the inner width of a feed-forward block.

    Attributes:
        group: ranks that have the parts.
        whole: the width.
    """

    group: Group
    whole: int

    def __post_init__(self) -> None:
        if self.group.size > self.whole:
            raise UnsupportedModelError(
                f"tensor_parallel_size={self.group.size} cannot deal out feed-forward blocks that are {self.whole} wide "
                f"(intermediate_size); at most {self.whole} is possible"
            )

    @property
    def own(self) -> range:
        """This rank's."""
        return share(self.whole, self.group.rank, self.group.size)

    def taken(self, names: Sequence[str], products: int) -> dict[str, Taken]:
        """Rows of the tensors ``names``: of ``products`` products of this width, in one tensor or in one each."""
        own = torch.arange(self.own.start, self.own.stop)
        each = products // len(names)
        rows = torch.cat([own + nth * self.whole for nth in range(each)])
        return dict.fromkeys(names, (rows, each * self.whole))

    def columns(self) -> tuple[int, int, int]:
        """Of the product out."""
        return self.own.start, self.own.stop, self.whole


@dataclass(frozen=True, slots=True)
class HeadShard:
    """A part of the heads of an attention layer. Where there are fewer key and value heads than ranks, several ranks have the
    same ones.

    Attributes:
        group: ranks that have the parts.
        num_heads, num_kv_heads: of the layer.
    """

    group: Group
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        size, heads, kv_heads = self.group.size, self.num_heads, self.num_kv_heads
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        if size not in possible:
            raise UnsupportedModelError(
                f"tensor_parallel_size={size} cannot deal out {heads} heads with {kv_heads} heads of keys and values "
                f"evenly; possible: {', '.join(map(str, possible))}"
            )

    @property
    def heads(self) -> range:
        """Query heads of this rank."""
        return share(self.num_heads, self.group.rank, self.group.size)

    @property
    def kv_heads(self) -> range:
        """Key and value heads of this rank: those that its queries attend to."""
        each = self.num_heads // self.num_kv_heads
        return range(self.heads.start // each, (self.heads.stop - 1) // each + 1)

    @property
    def copies(self) -> int:
        """Ranks that have one and the same head of keys."""
        return max(1, self.group.size // self.num_kv_heads)

    def taken(self, names: Sequence[str], size: int, *, gated: bool, sections: int = 3) -> dict[str, Taken]:
        """Rows of the tensors ``names`` (query, key, value, or all in one) for heads of ``size``; with ``gated`` a gate stands
        behind each head's query. ``sections``: 2 where values are no product of their own, 1 where there are queries alone."""
        wide = 2 * size if gated else size
        own = [_rows(self.heads, wide), _rows(self.kv_heads, size), _rows(self.kv_heads, size)][:sections]
        whole = [self.num_heads * wide, self.num_kv_heads * size, self.num_kv_heads * size][:sections]
        if len(names) > 1:
            return dict(zip(names, zip(own, whole, strict=True), strict=True))
        rows = [each + sum(whole[:nth]) for nth, each in enumerate(own)]
        return {names[0]: (torch.cat(rows), sum(whole))}

    def taken_by_head(self, name: str, size: int) -> dict[str, Taken]:
        """The same where one tensor has, for each key head, its queries, the key and the value: in the order queries, keys,
        values."""
        each = self.num_heads // self.num_kv_heads
        queries = [head // each * (each + 2) + head % each for head in self.heads]
        keys = [head * (each + 2) + each for head in self.kv_heads]
        heads = torch.tensor([*queries, *keys, *(key + 1 for key in keys)])
        return {name: ((heads[:, None] * size + torch.arange(size)).flatten(), self.num_kv_heads * (each + 2) * size)}

    def head_rows(self, size: int = 1) -> Taken:
        """Rows of what has ``size`` for each query head."""
        return _rows(self.heads, size), self.num_heads * size

    def columns(self, size: int) -> tuple[int, int, int]:
        """Of the product out."""
        return self.heads.start * size, self.heads.stop * size, self.num_heads * size

    def norm_rows(self, size: int, *, queries: bool) -> Taken:
        """Weights of a norm over all heads."""
        if queries:
            return _rows(self.heads, size), self.num_heads * size
        return _rows(self.kv_heads, size), self.num_kv_heads * size

    def normalised(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMS norms over the heads of all ranks: q [T, H * D] and k [T, KH * D] of this one, each with its weights."""
        wide = q.float(), k.float()
        squares = torch.stack([each.square().sum(1) for each in wide], dim=1)  # [T, 2]
        squares = self.group.all_reduce(squares)
        size = q.shape[1] // len(self.heads)
        counts = (self.num_heads * size, self.num_kv_heads * size * self.copies)
        found = []
        for nth, (x, weight) in enumerate(zip(wide, (q_weight, k_weight), strict=True)):
            scale = torch.rsqrt(squares[:, nth : nth + 1] / counts[nth] + eps)
            found.append(((x * scale).to(q.dtype) * weight).to(q.dtype))
        return found[0], found[1]


@dataclass(frozen=True, slots=True)
class EvenShard:
    """Equal parts of channels or heads, of which each is on its own.

    Attributes:
        group: ranks that have the parts.
    """

    group: Group

    def rows(self, *sizes: int, whole: int = 0) -> Taken:
        """Of sections of so many rows here, one behind the other, of which other ranks have as many; then of one of ``whole``
        rows that all have."""
        ranks, found, start = self.group.size, list[torch.Tensor](), 0
        for size in sizes:
            found.append(start + self.group.rank * size + torch.arange(size))
            start += ranks * size
        return torch.cat([*found, start + torch.arange(whole)]), start + whole

    def columns(self, size: int) -> tuple[int, int, int]:
        """Of the product out, whose inputs here are ``size``."""
        rank = self.group.rank
        return rank * size, (rank + 1) * size, self.group.size * size


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """A part of a mixture: of each expert a part of its inner width, or whole experts. Each rank gives a part of the sum.

    Attributes:
        group: ranks that share each layer.
        num_experts, size: of the mixture, and the inner width of an expert.
        whole: experts are dealt out whole.
        peers: replicas of the layer that share the experts, each with tokens of its own; a group of one where there are none.
    """

    group: Group
    num_experts: int
    size: int
    whole: bool
    peers: Group

    @property
    def experts(self) -> range:
        """Of this rank."""
        if not self.whole:
            return range(self.num_experts)
        rank = self.peers.rank * self.group.size + self.group.rank
        return share(self.num_experts, rank, self.peers.size * self.group.size)

    @property
    def part(self) -> Part | None:
        """Of the inner width of each; None: all."""
        return None if self.whole else Part(self.group, self.size)


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """A part of the vocabulary: as many tokens on every rank, but for those that there are not.

    Attributes:
        group: ranks that have the parts.
        whole: V.
    """

    group: Group
    whole: int

    @property
    def rows(self) -> int:
        """Rows of each rank's tables."""
        return cdiv(self.whole, self.group.size)

    @property
    def first(self) -> int:
        """The first token of this rank."""
        return min(self.rows * self.group.rank, self.whole)

    @property
    def own(self) -> int:
        """Tokens of this rank."""
        return min(self.rows, self.whole - self.first)

    @property
    def taken(self) -> Taken:
        """Rows of the checkpoint's tables."""
        return torch.arange(self.first, self.first + self.own), self.whole


def _rows(heads: range, size: int) -> torch.Tensor:
    return torch.arange(heads.start * size, heads.stop * size)
