"""Where the wide products are used, and their tile. Imports no Triton.

``TABLE`` holds what was measured on one H200 in bfloat16, where one kernel beat cuBLAS and the kernel behind it: with 8192
tokens, a full step, over seconds and with the clock that the card's power allows (``bench/ops/wide_linear.py``); of Qwen3-0.6B
with 384 to 4096 tokens in whole layers (``bench/ops/short_steps.py``). What lost is left to ``F.linear``; other shapes follow
``_tokens_by_rule``. Nothing is tuned while serving.

They are for steps that are replayed as graphs: launched one by one, with tensor descriptors, a layer costs the host 400 to 570
us, up to some thousand tokens more than it takes the device. A step without a graph (prompt log-probabilities, graphs off,
large models where a graph would pad by much) pays that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from headway.core.ints import cdiv

Kind = Literal["wide_gate_up", "wide_qkv", "wide_add", "wide_gelu"]
"""The op's name."""

BLOCK_M, BLOCK_K = 128, 64
"""Tokens of a tile, and inputs of a chunk of it."""
WIDE, UNEVEN, NARROW = 256, 192, 128
"""Weight rows of a tile. Only gate and up have uneven tiles."""
STAGES = MappingProxyType({WIDE: 3, UNEVEN: 5, NARROW: 6})
"""Weight rows of a tile -> chunks that there is shared memory for, beside what waits to be finished."""
TURN_STAGES = 5
"""Chunks of tiles of ``NARROW`` rows beside two that are being written."""
NARROWER = 1.08
"""What a weight row of a tile that is not the widest costs, to that of the widest: it reads more activations."""
KEPT_UP = 1024
"""Inputs from which on two warps compute GELU of a tile while the next one is multiplied."""
GROUP = 16
"""Rows of tiles that go through the weights together."""
SMS, BUSY, MOST_TILES_DOWN = 132, 0.9, 256
"""SMs of the card that was measured, and the part of them that tiles must keep busy; rows of tiles that are told apart."""
HEAD_SIZE = 128
"""Of ``wide_qkv``: a tile is two heads wide, or one."""

Counts = tuple[range, ...]
"""Numbers of tokens."""
MOST_TOKENS = 2**20

TABLE: Mapping[tuple[Kind, int, int], Counts] = MappingProxyType(
    {
        # Qwen3-0.6B
        ("wide_gate_up", 6144, 1024): (range(257, MOST_TOKENS),),
        ("wide_qkv", 4096, 1024): (range(257, 641), range(1281, MOST_TOKENS)),  # 768 tokens lost
        ("wide_add", 1024, 2048): (range(4096, MOST_TOKENS),),
        ("wide_add", 1024, 3072): (range(4096, MOST_TOKENS),),
        # Llama-3.1-8B
        ("wide_gate_up", 28672, 4096): (range(1024, MOST_TOKENS),),  # 1024 tokens were measured outside of layers
        ("wide_qkv", 6144, 4096): (range(8192, MOST_TOKENS),),
        ("wide_add", 4096, 4096): (range(8192, MOST_TOKENS),),
        ("wide_add", 4096, 14336): (),
    }
)
"""(op, N, K) -> the numbers of tokens it is used for; () where it lost."""


def wide_tokens(kind: Kind, outputs: int, inputs: int) -> Counts:
    """For which numbers of tokens ``kind`` is used for a 16-bit weight [N, K]; (): none."""
    found = TABLE.get((kind, outputs, inputs))
    return _tokens_by_rule(kind, outputs, inputs) if found is None else found


def _tokens_by_rule(kind: Kind, outputs: int, inputs: int) -> Counts:
    """Other shapes: as eight models had it on one H200 with 512, 1024, 2048 and 8192 tokens.

    Activations were always faster inside the product, the rotation from 1024 tokens on. A residual is added inside where tiles
    leave few SMs idle (cuBLAS has more shapes of tiles), up to K = 8192: Llama-8B's down projection (14336) lost when hot.
    GELU inside took 52 to 79 % of the time of both, with 2048 and 8192 tokens on an H100 (``bench/ops/wide_gelu.py``).
    """
    if inputs % BLOCK_K or outputs % 16:
        return ()
    if kind == "wide_gate_up":
        return (range(257 if inputs <= 1024 else 512, MOST_TOKENS),)
    if kind == "wide_qkv":
        return (range(1024, MOST_TOKENS),)
    if inputs > 8192:
        return ()
    return (range(2048, MOST_TOKENS),) if kind == "wide_gelu" else _balanced_tokens(outputs)


@lru_cache(maxsize=256)
def _balanced_tokens(outputs: int) -> Counts:
    """From 1024 on, those whose tiles of N columns keep most SMs busy, columns beyond N counted as idle."""
    found: list[range] = []
    across = cdiv(outputs, WIDE)
    for down in range(1024 // BLOCK_M, MOST_TILES_DOWN + 1):
        busy = down * outputs / WIDE / (SMS * cdiv(down * across, SMS))
        tokens = range((down - 1) * BLOCK_M + 1, MOST_TOKENS if down == MOST_TILES_DOWN else down * BLOCK_M + 1)
        if busy < BUSY:
            continue
        if found and found[-1].stop == tokens.start:
            tokens = range(found.pop().start, tokens.stop)
        found.append(tokens)
    return tuple(found)


def tile_width(tokens: int, outputs: int, sms: int, widths: tuple[int, ...] = (WIDE, NARROW)) -> int:
    """Weight rows of a tile of [T, K] x [N, K]^T: those that keep the busiest of ``sms`` SMs for the shortest time."""

    def longest(wide: int) -> float:
        rows = wide * cdiv(cdiv(tokens, BLOCK_M) * cdiv(outputs, wide), sms)
        return rows * (1.0 if wide == WIDE else NARROWER)

    return min(widths, key=lambda wide: (longest(wide), -wide))


def gelu_warps(tokens: int, outputs: int, inputs: int, sms: int) -> int:
    """The form of ``wide_gelu``: how many warps finish tiles of ``WIDE`` weight rows, or 0: warpgroups take turns at ``NARROW``
    ones.

    They take turns where narrower tiles leave fewer SMs idle, and where no SM has a second wide tile, beside whose products the
    first one's GELU could be computed. Two warps keep up with the products of long rows; four cost registers of the warps that
    multiply.

    Fitted to [K, N] = [384, 1536], [768, 3072] and [1024, 4096], judged by [1280, 5120], each with 2048 and 8192 tokens on an
    H100: at most 6 % above the best form of the former; what is chosen for the judge is its best (``bench/ops/wide_gelu.py``).
    """
    if cdiv(tokens, BLOCK_M) * cdiv(outputs, WIDE) <= sms or tile_width(tokens, outputs, sms) == NARROW:
        return 0
    return finishing_warps(inputs)


def finishing_warps(inputs: int) -> int:
    """As ``gelu_warps`` where they do not take turns."""
    return 2 if inputs >= KEPT_UP else 4
