"""Slot tables: everything the device knows about the requests it serves, one row per slot.

All tables live in one int32 arena, so that any host edit of any table (a new request's parameters, its prompt, a KV block id)
is a (position, values) pair and one kernel applies all edits of a step. Float tables hold their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from headway.core.errors import ConfigError
from headway.core.ints import round_up

ENCODER_LEN: Final = "encoder_len"
"""Slot table of models with cross-attention: encoder outputs of the slot's request. Written by admissions."""
DRAFT_SCOPE: Final = "draft_scope"
"""Slot table of engines that draft: where guesses for the slot's request may come from, as of ``suffix_draft``."""
_ALIGN = 4
"""Tables start at multiples of four ints, so that kernels may load 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the arena: [num_slots, width] of ``dtype`` (int32 or float32); width 1 is viewed as [num_slots]. With
    ``copies`` there are so many of it, one behind the other."""

    name: str
    width: int = 1
    dtype: torch.dtype = torch.int32
    copies: int = 1


def core_tables(
    max_model_len: int, max_blocks_per_seq: int, max_stop_ids: int, num_drafts: int = 0, num_groups: int = 1
) -> list[Table]:
    """The tables every request needs. Written by admissions and block edits (host) and by ``slot_advance`` (device).

    Args:
        max_model_len: most tokens of a slot, drafts behind the last one included.
        num_drafts: tokens that a drafter guesses per slot; with any there are the tables drafts, which it alone writes, and
            ``DRAFT_SCOPE``, which admissions write.
        num_groups: of layers with a block table of their own.

    history: token ids, prompt then generated. num_tokens: how many of them are known. num_computed: how many have their KV.
    alive: 0 once a stop condition was met. min_total, max_total: bounds on num_tokens. stop_counts: (eos ids, all stop ids).
    """
    drafts = [Table("drafts", num_drafts), Table(DRAFT_SCOPE)] if num_drafts else []
    return [
        *drafts,
        Table("history", max(2, max_model_len)),
        # Two-dimensional even when one block is enough; one for each group of layers.
        Table("block_table", max(2, max_blocks_per_seq), copies=num_groups),
        Table("num_tokens"),
        Table("num_computed"),
        Table("prompt_len"),
        Table("alive"),
        Table("min_total"),
        Table("max_total"),
        Table("stop_counts", 2),
        Table("stop_ids", max(2, max_stop_ids)),
    ]


class SlotArena:
    """Device memory of all slot tables.

    Args:
        tables: distinct names.
        num_slots: rows of each.

    Attributes:
        ints: int32 [A], the whole arena.
    """

    def __init__(self, tables: Sequence[Table], num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._tables = {table.name: table for table in tables}
        assert len(self._tables) == len(tables), "table names must be distinct"
        self._base: dict[str, int] = {}
        total = 0
        for table in tables:
            self._base[table.name] = total
            total += round_up(table.copies * num_slots * table.width, _ALIGN)
        if total >= 2**31:
            raise ConfigError(
                f"slot tables would take {total * 4 / 2**30:.1f} GiB (limit 8); lower max_num_seqs={num_slots} or max_model_len"
            )
        self.ints = torch.zeros(total, dtype=torch.int32, device=device)

    def view(self, name: str) -> torch.Tensor:
        """[num_slots, width] view of a table, [num_slots] when the width is 1, in the table's dtype; [copies, num_slots, width]
        where there are several."""
        table = self._tables[name]
        base = self._base[name]
        flat = self.ints[base : base + table.copies * self.num_slots * table.width]
        typed = flat if table.dtype == torch.int32 else flat.view(table.dtype)
        if table.copies > 1:
            return typed.view(table.copies, self.num_slots, table.width)
        return typed if table.width == 1 else typed.view(self.num_slots, table.width)

    def has(self, name: str) -> bool:
        """Whether there is a table of that name."""
        return name in self._tables

    def position(self, name: str, slot: int, column: int = 0) -> int:
        """Arena position of table[slot, column]; copy c of a slot counts as slot c * num_slots + slot."""
        return self._base[name] + slot * self._tables[name].width + column

    def stride(self, name: str) -> int:
        """Arena distance between two slots of a table."""
        return self._tables[name].width
