"""Where products of few rows without a norm of their own end, and the ones that start early begin. Imports no Triton.

Models with norms behind their products (Gemma 2 and 3, OLMo 2, GLM-4), and ranks that share a product, leave no norm to the
product that follows. So each product is a choice of its own, of ``skinny_linear`` and ``norm_gate_up`` on the one hand and
``mid_linear`` and ``mid_gate_up`` without squares on the other: by measurements of both, or by what both should take alone.

``FEW``, ``ONE`` and ``EARLY`` were fitted to the times of 16 products of Gemma3-1B, Gemma2-2B, GLM-4-9B and OLMo2-1B at 1 and 8
rows on one H100 (``bench/reports/2026-11-27-h100-few-tiles.json``). Of the 16 choices of Gemma3-4B and Gemma2-9B, which they
were not fitted to, three cost something, 3.4 % at most. On an H200, for 1 to 8 rows of four models that tuned nothing
(EXAONE-4-1.2B, OLMo2-7B, Gemma3-12B, Gemma3-270M), the choice cost .3 to 2.5 %. For 16 rows it cost 9.4 %: there the ops that
start early won 28 of 32 products, so the rule ends at ``FEW_BY_RULE``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from headway.core.ints import cdiv
from headway.kernels.linear_forms.card import Card, card_of
from headway.kernels.linear_forms.table import current_device, measured
from headway.kernels.linear_forms.winners import split
from headway.kernels.mid_linear.rule import best_tile as best_early
from headway.kernels.mid_linear.rule import residents
from headway.kernels.mid_linear.tile import Kind as EarlyKind
from headway.kernels.mid_linear.tile import MidTile
from headway.kernels.mid_linear.tiles import mid_rows
from headway.kernels.skinny_linear.rule import BUCKETS, best_tile, pair_of
from headway.kernels.skinny_linear.tile import Kind as FewKind
from headway.kernels.skinny_linear.tiles import fused_rows


@dataclass(frozen=True, slots=True)
class Few:
    """What a product of few rows takes alone.

    Attributes:
        start: microseconds of a kernel.
        memory, uneven: parts of the time of the bytes; the latter by how much more the busiest SM has than all have on average.
    """

    start: float
    memory: float
    uneven: float


@dataclass(frozen=True, slots=True)
class Early:
    """What a product that starts early takes alone.

    Attributes:
        start: microseconds of a kernel.
        memory, uneven: as of ``Few``, where SMs have several programs.
        chunk, thin: microseconds of a chunk at least, and what one of less than 32 weight rows takes longer.
        intake: bytes a microsecond that an SM takes in.
    """

    start: float
    memory: float
    uneven: float
    chunk: float
    thin: float
    intake: float


ONE = Few(start=0.5, memory=1.05, uneven=0.58)
FEW = Few(start=1.15, memory=1.01, uneven=0.48)
"""Of one row, and of two to sixteen."""
FEW_BY_RULE = 8
"""Rows, for want of measurements, for which products of few rows run at most."""
EARLY = Early(start=0.8, memory=1.055, uneven=0.124, chunk=0.161, thin=0.089, intake=62.5e3)


def handover(few: FewKind, early: EarlyKind, outputs: int, inputs: int) -> int:
    """The most rows for which ``few`` shall run and not ``early`` on a 16-bit weight [N, K], if both can.

    What was measured of ``few`` decides, else what was measured of ``early``, else the rule. For ``linear_parts``, which is
    within some percent of ``few`` alone, the rule is ``FEW_BY_RULE``.
    """
    limit, card = fused_rows(few, outputs, inputs), card_of(current_device())
    used = mid_rows(early, outputs, inputs)
    if measured(few, outputs, inputs, card) is not None or not used:
        return limit
    if early == "linear_parts":
        return min(limit, FEW_BY_RULE)
    if measured(early, outputs, inputs, card) is not None:
        return min(limit, used.start - 1)
    return min(limit, handover_by_rule(few, early, outputs, inputs, card))


@lru_cache(maxsize=1024)
def handover_by_rule(few: FewKind, early: EarlyKind, outputs: int, inputs: int, card: Card) -> int:
    """Where neither was measured: the split of 1 to 16 rows that loses least by prediction; never slower for fewer rows."""
    times = {
        "few": {rows: (few_us(few, rows, outputs, inputs, card), None) for rows in BUCKETS},
        "meet": {rows: (early_us(early, rows, outputs, inputs, card), None) for rows in BUCKETS},
    }
    few_rows = (rows for rows, way in split(times, ("few", "meet")).items() if way == "few")
    return min(max(few_rows, default=0), FEW_BY_RULE)


def few_us(kind: FewKind, rows: int, outputs: int, inputs: int, card: Card) -> float:
    """Microseconds of [rows, K] x [N, K]^T by the rule's tile, alone; N counts gate and up rows."""
    costs = ONE if rows == 1 else FEW
    programs = cdiv(outputs, best_tile(kind, rows, outputs, inputs, card).block_n * pair_of(kind))
    spread = cdiv(programs, card.sms) * card.sms / programs
    return costs.start + 2 * outputs * inputs / card.bandwidth * (costs.memory + costs.uneven * min(spread - 1, 1))


def early_us(kind: EarlyKind, rows: int, outputs: int, inputs: int, card: Card) -> float:
    """The same of a product that starts early."""
    return tile_us(best_early(kind, rows, outputs, inputs, card), outputs, inputs, card)


def tile_us(tile: MidTile, outputs: int, inputs: int, card: Card) -> float:
    """Microseconds of a product of up to 16 rows that starts early with ``tile``, alone."""
    programs = cdiv(outputs, tile.wide) * tile.splits
    each = cdiv(programs, card.sms)
    beside = min(residents(tile, inputs), each)
    spread = each * card.sms / programs if each > 1 else 1.0
    memory = 2 * outputs * inputs / card.bandwidth * (EARLY.memory + EARLY.uneven * (spread - 1))
    chunk = EARLY.chunk + EARLY.thin * (tile.wide < 32) + 2 * tile.block_k * tile.wide * beside / EARLY.intake
    return EARLY.start + max(memory, each / beside * tile.chunks(inputs) * chunk)
