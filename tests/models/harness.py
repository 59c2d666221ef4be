"""Runs a model step by step without scheduler or runner: batches, block tables and KV pool made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headway.core.chunks import CHUNKS_AT, chunk_table, most_chunks
from headway.core.latents import short_row
from headway.models.decoder import DecoderModel
from headway.models.interface import ALL_TOKENS, LAST_TOKENS
from headway.state.batch import GroupBatch, StepBatch
from headway.state.cache_pool import CachePool, StateStorage
from headway.state.packed_step import ROWS_AT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Row:
    """Tokens of one request in one step; ``start`` is the position of the first. Not alive: a zombie row."""

    slot: int
    tokens: Sequence[int]
    start: int = 0
    alive: bool = True


class Machine:
    """A model with a KV cache whose blocks are dealt out in random order, so that no layout is right by luck."""

    def __init__(self, model: DecoderModel, *, num_slots: int = 5, block_size: int = 8, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        per_slot = -(-model.max_model_len // block_size)
        num_groups = len(model.spec.cache.groups)
        num_blocks = num_groups * num_slots * per_slot + 1
        order = np.random.default_rng(seed).permutation(np.arange(1, num_blocks, dtype=np.int32))
        self.tables = order.reshape(num_groups, num_slots, per_slot)  # [G, S, MB]
        self.caches = CachePool(
            model.spec.cache, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device,
            states=StateStorage(num_slots, model.dtype),
        )  # fmt: skip
        for state in self.states:
            state.fill_(float("nan"))  # what a slot holds before its row has started means nothing

    def owned(self, slot: int) -> torch.Tensor:
        """int64, all blocks of a slot."""
        return torch.from_numpy(self.tables[:, slot].reshape(-1)).long()

    @property
    def states(self) -> list[torch.Tensor]:
        """States of all layers, [S, ...] each."""
        return [part for layer in self.caches.states for part in layer]

    @property
    def cached(self) -> list[torch.Tensor]:
        """Keys and values, or latents, of all layers, [NB, bs, ...] each."""
        specs = self.model.spec.cache.layers
        return [
            part
            for spec, layer in zip(specs, self.caches.layers, strict=True)
            for part in layer[: len(spec.parts) if spec is not None else 0]
        ]

    def batch(self, rows: Sequence[Row], *, pad_rows: int = 0, pad_tokens: int = 0) -> StepBatch:
        """What ``step_unpack`` would make of these rows."""
        ids: list[int] = []
        positions: list[int] = []
        kv_slots: list[list[int]] = [[] for _ in self.tables]
        starts, seq_lens, lasts = [0], [], []
        for row in rows:
            for i, token in enumerate(row.tokens):
                position = row.start + i
                ids.append(token if row.alive else 0)
                positions.append(position if row.alive else 0)
                for written, table in zip(kv_slots, self.tables, strict=True):
                    block = int(table[row.slot, position // self.block_size])
                    written.append(block * self.block_size + position % self.block_size if row.alive else -1)
            starts.append(len(ids))
            seq_lens.append(row.start + len(row.tokens) if row.alive else 0)
            lasts.append(len(ids) - 1)
        lens = _ints(seq_lens + [0] * pad_rows)
        groups = [
            GroupBatch(torch.from_numpy(table).to(DEVICE), _ints(written + [-1] * pad_tokens), lens)
            for table, written in zip(self.tables, kv_slots, strict=True)
        ]
        query_lens = [len(row.tokens) for row in rows]
        table = chunk_table(np.array(query_lens, np.int32))
        packed = np.zeros(ROWS_AT + len(table), np.int32)
        packed[CHUNKS_AT : CHUNKS_AT + 2] = ROWS_AT, len(table) // 2
        packed[ROWS_AT:] = table
        longest = max(query_lens)
        prefixes = [row.start for row in rows if len(row.tokens) > short_row(1)]
        num_decode_rows = next((r for r, n in enumerate(query_lens) if n != 1), len(rows))
        return StepBatch(
            input_ids=_ints(ids + [0] * pad_tokens),
            positions=_ints(positions + [0] * pad_tokens),
            query_start=_ints(starts + [starts[-1]] * pad_rows),
            seq_lens=lens,
            row_slots=_ints([row.slot for row in rows] + [-1] * pad_rows),
            logit_indices=_ints(lasts + [0] * pad_rows),
            groups=tuple(groups),
            arrivals=torch.zeros(
                len(rows) + pad_rows, self.model.spec.cache.num_heads, dtype=torch.int32, device=DEVICE
            ),
            num_decode_rows=num_decode_rows,
            max_query_len=longest,
            max_seq_len_bound=self.model.max_model_len,
            chunks=torch.from_numpy(packed).to(DEVICE) if self.model.spec.cache.has_states else None,
            prefix_bound=sum(prefixes),
            max_chunks=most_chunks(len(ids) + pad_tokens, len(rows) + pad_rows, longest),
        )

    def step(self, rows: Sequence[Row], *, pad_rows: int = 0, pad_tokens: int = 0) -> list[torch.Tensor]:
        """Run one step; per row, logits [its tokens, V] on the CPU."""
        batch = self.batch(rows, pad_rows=pad_rows, pad_tokens=pad_tokens)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, self.caches, ALL_TOKENS).hidden).float().cpu()
        assert logits.shape == (len(batch.input_ids), self.model.config.vocab_size)
        return list(logits[: len(logits) - pad_tokens].split([len(row.tokens) for row in rows]))

    def last_step(self, rows: Sequence[Row], *, pad_rows: int = 0, pad_tokens: int = 0) -> torch.Tensor:
        """As ``step``, but logits [rows, V] of the rows' last tokens alone."""
        batch = self.batch(rows, pad_rows=pad_rows, pad_tokens=pad_tokens)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, self.caches, LAST_TOKENS).hidden).float().cpu()
        assert logits.shape == (len(rows) + pad_rows, self.model.config.vocab_size)
        return logits[: len(rows)]

    def in_chunks(self, tokens: Sequence[int], sizes: Sequence[int], *, slot: int = 1) -> torch.Tensor:
        """Logits [sum(sizes), V] of one sequence run in steps of these sizes."""
        found, start = [], 0
        for size in sizes:
            found += self.step([Row(slot, tokens[start : start + size], start)])
            start += size
        return torch.cat(found)


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
