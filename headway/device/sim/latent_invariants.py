"""What operations on latents obey: only places of the step's tokens are written, bounds cover the device's truth (R3), and the
pieces of contexts go as far as the contexts do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headway.device.sim.errors import need, same

After = Callable[[], None] | None


def check_write(name: str, cache: torch.Tensor, kv_slots: torch.Tensor) -> After:
    """Only the places named by ``kv_slots`` change (R5), and none of them lies outside."""
    places = cache.shape[0] * cache.shape[1]
    need(bool((kv_slots < places).all() and (kv_slots >= -1).all()), f"{name}: a slot outside the cache")
    before = cache.clone()

    def after() -> None:
        silent = torch.ones(places, dtype=torch.bool)
        silent[kv_slots[kv_slots >= 0].long()] = False
        kept = same(cache.reshape(places, -1)[silent], before.reshape(places, -1)[silent])
        need(kept, f"{name}: changed what no token of the step owns")

    return after


def check_latent_write(args: Any) -> After:
    """See ``check_write``."""
    return check_write("mla_write", args.latents, args.kv_slots)


def check_latent_decode(args: Any) -> After:
    """Bounds cover the lengths; blocks that a row can see are real ones; selected positions are ones that tokens may see."""
    check_spans("mla_decode", args, args.max_query_len)
    longest = int(args.seq_lens.max()) if len(args.seq_lens) else 0
    bound = args.max_seq_len_bound
    need(longest <= bound, f"mla_decode: max_seq_len_bound={bound}, but a row has {longest} tokens")
    if args.selected is not None:
        starts, lens = args.query_start.tolist(), args.seq_lens.tolist()
        for row, length in enumerate(lens):
            first, end = starts[row], starts[row + 1]
            if length and end > first:
                newest = torch.arange(length - (end - first), length)
                chosen = args.selected[first:end]
                need(bool((chosen[:, 0] >= 0).all()), f"mla_decode: a token of row {row} attends to nothing")
                need(bool((chosen <= newest[:, None]).all()), f"mla_decode: a token of row {row} sees a later one")
    return None


def check_latent_gather(args: Any) -> After:
    """Blocks of contexts are real ones."""
    check_spans("mla_gather", args, None)
    return None


def check_latent_prefill(args: Any) -> After:
    """The pieces of contexts that the host counts on cover them."""
    counts = args.query_start[1:] - args.query_start[:-1]
    long = (counts > args.most_queries) & (args.seq_lens > 0)
    total = int(torch.where(long, args.seq_lens - counts, 0).sum())
    need(total <= args.prefix_bound, f"mla_prefill: prefix_bound={args.prefix_bound}, but contexts have {total} tokens")
    return None


def check_spans(name: str, args: Any, most: int | None, cache: torch.Tensor | None = None) -> None:
    """Rows with tokens have slots and real blocks; no row has more tokens than ``most``."""
    counts = (args.query_start[1:] - args.query_start[:-1]).tolist()
    tables = args.block_tables
    cache = args.latents if cache is None else cache
    for row, (slot, length) in enumerate(zip(args.row_slots.tolist(), args.seq_lens.tolist(), strict=True)):
        need(most is None or counts[row] <= most, f"{name}: max_query_len={most}, but a row has {counts[row]}")
        if length:
            need(0 <= slot < len(tables), f"{name}: row {row} has tokens and slot {slot}")
            blocks = tables[slot, : -(-length // cache.shape[1])]
            need(bool(((blocks > 0) & (blocks < cache.shape[0])).all()), f"{name}: row {row} reads bad blocks")


def check_index_write(args: Any) -> After:
    """See ``check_write``."""
    return check_write("index_write", args.keys, args.kv_slots)


def check_index_scores(args: Any) -> After:
    """The bound covers the lengths, and blocks are real ones."""
    check_spans("index_scores", args, None, args.keys)
    longest, bound = int(args.seq_lens.max()), args.max_seq_len_bound
    need(longest <= bound, f"index_scores: max_seq_len_bound={bound}, but a row has {longest} tokens")
    return None


LATENT_CHECKS: list[tuple[str, Callable[[Any], After]]] = [
    ("index_scores", check_index_scores),
    ("index_write", check_index_write),
    ("mla_write", check_latent_write),
    ("mla_decode", check_latent_decode),
    ("mla_gather", check_latent_gather),
    ("mla_prefill", check_latent_prefill),
]
