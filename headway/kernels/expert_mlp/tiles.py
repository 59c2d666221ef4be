"""How ``expert_mlp`` is cut into programs: by the tokens an expert gets on average, and the sizes of its products.

Grids come from bounds. T tokens go to K of E experts each; nothing on the host knows to which.

    few       one token, or so few that most experts are read for one of them alone: a program multiplies one pair's vector by
              some rows of its expert. Pairs are neighbours in the grid, so what two read of one expert the second finds in
              the L2 cache.
    grouped   pairs are sorted by expert, and each expert's are cut into tiles of ``rows``. At most T K // rows + min(E, T K)
              tiles come of that: for each expert one that is not full. Programs beyond the last one end at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.core.ints import cdiv, next_power_of_2

READ_TWICE = 1.2
"""Pairs for each distinct expert, on average, up to which sorting them costs more than it saves."""
PROGRAMS = 1024
"""That many keep the memory of any card busy."""


@dataclass(frozen=True, slots=True)
class FewTile:
    """A program of the products of one vector: ``block_n`` outputs, ``block_k`` inputs a pass."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class GroupTile:
    """A program of the grouped products.

    Attributes:
        rows: pairs of one expert.
        block_n: outputs; of gate and up so many each.
        block_k: inputs a pass.
        together: gates and their ups are one factor of the products. Tensor cores read less for wide ones.
        group: rows of tiles that go through their weights together.
    """

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    together: bool = False
    group: int = 1


def is_few(tokens: int, top_k: int, experts: int) -> bool:
    """Whether each pair reads its expert for itself."""
    return tokens == 1 or tokens * top_k <= READ_TWICE * distinct_experts(tokens, top_k, experts)


def distinct_experts(tokens: int, top_k: int, experts: int) -> float:
    """How many experts tokens go to together, on average, if each chooses for itself and all are equally likely."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def few_tile(vectors: int, outputs: int, inputs: int, *, fp4: bool) -> FewTile:
    """The tile for ``vectors`` products of a vector with [outputs, inputs]; ``fp4``: each word holds four inputs."""
    block_n = 8
    while block_n > 2 and vectors * cdiv(outputs, block_n) < PROGRAMS:
        block_n //= 2
    columns = inputs // 4 if fp4 else inputs
    sizes = (1024,) if columns > 8192 else (512, 256, 128)  # passes are unrolled
    block_k = next(size for size in sizes if cdiv(columns, size) * size * 8 <= columns * 9 or size == sizes[-1])
    return FewTile(block_n, block_k, 4)


@dataclass(frozen=True, slots=True)
class WordTile:
    """A program of the products of words of 4-bit weights for few pairs, see ``hopper.triton_few``.

    Attributes:
        parts: warps that share the inputs of the same 16 outputs.
        rows: columns of the products: experts of one token.
        unroll: steps whose weights are loaded together.
    """

    parts: int
    rows: int
    unroll: int


@dataclass(frozen=True, slots=True)
class SharedTile:
    """A program of the products of words of 4-bit weights by warpgroups.

    Attributes:
        rows: pairs of one expert.
        height: rows of weights: outputs, or gates and as many ups.
        stages: steps of 128 inputs that have room in shared memory, three or more.
    """

    rows: int
    height: int
    num_warps: int
    stages: int


SHARED_ROWS = 128
"""Pairs of the highest tile."""


def few_word_tile(programs: int, inputs: int, columns: int) -> WordTile:
    """The tile for so many programs of 16 outputs, before their inputs are shared out."""
    parts, steps = 1, cdiv(inputs, 128)
    while parts < 8 and programs * parts < PROGRAMS and 2 * parts <= steps:
        parts *= 2
    return WordTile(parts, max(8, next_power_of_2(columns)), 3 if cdiv(steps, parts) == 3 else 2)


def group_word_tile(pairs: int, experts: int) -> SharedTile:
    """The tile for ``pairs`` pairs. Few rows wait for the bytes of the experts: more programs of fewer outputs are faster."""
    rows = min(max(8, next_power_of_2(int(pairs / experts * 1.5) or 1)), SHARED_ROWS)
    if rows == SHARED_ROWS:
        return SharedTile(rows, 128, 8, 4)
    return SharedTile(rows, 64, 4, 6 if rows == 8 else 4) if rows <= 16 else SharedTile(rows, 128, 4, 4)


WIDE_ROOM = 4 * (128 + 256) * 64 * 2 + 8192
"""Shared memory for the widest products' four stages, 256 weights by 128 pairs: Hopper's tensor cores read least for them."""


def tile_count(pairs: int, experts: int, rows: int) -> int:
    """Tiles that ``pairs`` pairs come to at most, however they are spread over the experts."""
    return pairs // rows + min(experts, pairs)


def group_tile(
    pairs: int, experts: int, outputs: int, inputs: int, *, item: int, paired: bool, fp4: bool, room: int
) -> GroupTile:
    """The tile for ``pairs`` pairs.

    Args:
        item: bytes of an activation.
        paired: outputs are gates, with as many ups.
        fp4: weights are in MXFP4.
        room: bytes of shared memory.
    """
    mean = pairs / experts
    rows = min(max(16, next_power_of_2(int(mean * 1.5) or 1)), 128)
    if item == 4:
        tile = GroupTile(min(rows, 32), 32, 32, 4, 2)
    elif rows <= 32:  # bound by the bytes of the experts: many loads in flight
        tile = GroupTile(rows, 64, 128, 4, 4)
    elif rows == 64:
        tile = GroupTile(64, 64 if paired else 128, 64, 4, 4)
    elif not fp4 and room >= WIDE_ROOM:
        tile = GroupTile(128, 128 if paired else 256, 64, 8, 4, paired)
    else:
        tile = GroupTile(128, 64 if paired else 128, 64, 8, 4)
    large = outputs * (2 if paired else 1) * inputs * item > LARGE_WEIGHTS
    stages, group = tile.num_stages, MANY_GROUP if large and tile.rows == MANY_ROWS else 1
    wide = tile.block_n * (2 if paired else 1)
    while stages > 1 and stages * (tile.rows + wide) * tile.block_k * item > room - 8192:
        stages -= 1
    return replace(tile, num_stages=stages, group=group)


MANY_ROWS, MANY_WIDE, MANY_CHUNK, MANY_STAGES = 128, 256, 64, 3
"""A tile of the products of ``hopper.triton_many``: pairs of one expert, outputs; inputs of a chunk, and chunks that have room
in shared memory."""
MANY_GROUP = 16
LARGE_WEIGHTS = 32 << 20
"""Rows of tiles that go through their weights together, and bytes of an expert's matrix from which those of plain kernels do:
each by itself would read it from memory again where the L2 cache does not hold it. On an H100 Mixtral's products in of 8,192
tokens took 11.3 ms by themselves and 6.2 together, those of Qwen3-30B, DeepSeek-V2-Lite and OLMoE (6 to 12 MB) 5 to 9 % longer
together."""
MANY_PAIRS = 192
"""Pairs of an expert, on average, from which the products out are those of ``hopper.triton_many``. Both limits were set by four
shapes of 2,048 and 8,192 tokens on an H100; no other shape has judged them."""


def out_is_many(pairs: int, experts: int, inner: int) -> bool:
    """Whether ``pairs`` pairs are enough for those products, and rows lie as copies need them."""
    return pairs >= MANY_PAIRS * experts and inner % 8 == 0


def sort_parts(pairs: int) -> int:
    """Parts in which pairs are sorted, of which 32 are read at once each."""
    return min(256, max(4, next_power_of_2(cdiv(pairs, 32))))
