"""R3, R5, R9 where they must hold: right before and after each operation runs, on the values the device really has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from headway.core.plan import Finish
from headway.device.sim.cross_invariants import CrossWatch
from headway.device.sim.errors import need, same
from headway.device.sim.key_invariants import KeyWatch
from headway.device.sim.latent_invariants import LATENT_CHECKS
from headway.device.sim.media_invariants import MediaWatch
from headway.device.sim.state_invariants import STATE_OPS, StateWatch

After = Callable[[], None] | None
Check = Callable[[Any], After]
"""Takes the operation's arguments, by their names in its schema."""


def step_invariants() -> list[tuple[str, Callable[[tuple[Any, ...]], After]]]:
    """What every step of an engine obeys, by operation."""
    checks: list[tuple[str, Check]] = [
        ("apply_edits", check_edits),
        ("step_unpack", check_unpack),
        ("rope_kv_write", check_kv_write),
        ("paged_attention", check_attention),
        ("decode_attention", check_decode_attention),
        ("slot_advance", check_advance),
        ("grammar_advance", check_advance),
        ("count_tokens", check_counts),
    ]
    checks += LATENT_CHECKS
    cross = CrossWatch()
    checks += [(name, cross.check_tokens) for name in ("rope_kv_write", "decode_attention")]
    checks += [("cross_kv_write", cross.check_write), ("cross_attention", cross.check_attention)]
    media = MediaWatch()
    checks += [("store_rows", media.check_store), ("place_rows", media.check_place)]
    watch = StateWatch()
    checks += [(name, partial(watch.check, name)) for name in STATE_OPS]
    checks += [("copy_states", watch.check_copies), ("replay_rows", watch.check_replays)]
    keys = KeyWatch()
    checks += [("step_unpack", keys.begin), ("chain_unpack", keys.begin), ("embed", keys.embed)]
    checks += [("rope_kv_write", keys.note), ("decode_attention", keys.decode), ("paged_attention", keys.check)]
    return [(name, partial(_check_named, name, check)) for name, check in checks]


def arguments(name: str, args: tuple[Any, ...]) -> Any:
    """The arguments of operation ``name`` by the names in its schema, defaults filled in."""
    schema = getattr(torch.ops.headway, name).default._schema
    found = {each.name: each.default_value for each in schema.arguments}
    return SimpleNamespace(**found | {each.name: arg for each, arg in zip(schema.arguments, args, strict=False)})


def _check_named(name: str, check: Check, args: tuple[Any, ...]) -> After:
    return check(arguments(name, args))


def check_edits(args: Any) -> After:
    """Every edit is applied (the grid is large enough), lies inside the arena and overlaps no other."""
    arena, packed, max_edits = args.arena, args.packed, args.max_edits
    number, at = int(packed[0]), int(packed[1])
    need(number <= max_edits, f"apply_edits: {number} edits, but max_edits={max_edits}")
    if not number:
        return None
    edits = packed[at : at + 3 * number].view(-1, 3)
    dst, src, length = edits.long().unbind(1)
    need(bool((length >= 0).all() and (length <= 1024).all()), "apply_edits: an edit is longer than 1024")
    need(bool((dst >= 0).all() and (dst + length <= len(arena)).all()), "apply_edits: an edit lies outside the arena")
    need(bool((src >= 0).all() and (src + length <= len(packed)).all()), "apply_edits: an edit's source lies outside")
    order = dst.argsort()
    need(bool((dst[order][1:] >= (dst + length)[order][:-1]).all()), "apply_edits: two edits of a step overlap")
    return None


def check_unpack(args: Any) -> After:
    """max_query_len bounds the rows; live rows get real blocks; zombies and padding write nowhere."""
    packed, num_computed, alive, input_ids = args.packed, args.num_computed, args.alive, args.input_ids
    query_start, seq_lens, row_slots = args.query_start, args.seq_lens, args.row_slots
    kv_slots = args.kv_slots.reshape(-1, len(input_ids))  # one row for each group of layers
    rows, tokens, at = int(packed[2]), int(packed[3]), int(packed[4])
    need(rows <= len(seq_lens) and tokens <= len(input_ids), "step_unpack: more rows or tokens than the batch holds")
    records = packed[at : at + 4 * rows].view(-1, 4)
    slots, lens = records[:, 0].long(), records[:, 1].long()
    need(bool(((slots >= 0) & (slots < len(alive))).all()), "step_unpack: a slot outside the tables")
    need(len(set(slots.tolist())) == rows, "step_unpack: a slot has two rows in one step")
    need(not rows or int(lens.max()) <= args.max_query_len, "step_unpack: max_query_len too small")
    need(int(lens.sum()) == tokens, "step_unpack: the rows' tokens do not add up")
    caches = bool(args.block_tables.any())  # a model that caches nothing has no block in any slot, ever

    def after() -> None:
        live = alive[slots] != 0
        for row in range(rows):
            slot, span = int(slots[row]), slice(int(query_start[row]), int(query_start[row + 1]))
            if not live[row]:
                need(
                    bool((kv_slots[:, span] == -1).all()) and int(seq_lens[row]) == 0, f"zombie row {row} is not silent"
                )
                continue
            end = int(num_computed[slot]) + int(lens[row])
            need(int(seq_lens[row]) == end, f"row {row}: seq_len {int(seq_lens[row])}, truth {end}")
            stored = bool((kv_slots[:, span] >= args.block_size).all()) or not caches
            need(stored, f"row {row}: a live token has no KV slot (null block)")
        written = kv_slots[kv_slots >= 0]
        need(len(written.unique()) == len(written), "two tokens of a step write the same KV slot")
        need(bool((kv_slots[:, tokens:] == -1).all() and (row_slots[rows:] == -1).all()), "padding is not silent")
        need(bool((seq_lens[rows:] == 0).all()), "a padding row has a length")

    return after


def check_kv_write(args: Any) -> After:
    """Only the cache places named by kv_slots change (R5), and none of them lies outside."""
    kv_slots, caches = args.kv_slots, (args.k_cache, args.v_cache)
    places = caches[0].shape[0] * caches[0].shape[1]
    need(bool((kv_slots < places).all() and (kv_slots >= -1).all()), "rope_kv_write: a KV slot outside the cache")
    before = [cache.clone() for cache in caches]

    def after() -> None:
        silent = torch.ones(places, dtype=torch.bool)
        silent[kv_slots[kv_slots >= 0].long()] = False
        for cache, old in zip(caches, before, strict=True):
            kept = same(cache.reshape(places, -1)[silent], old.reshape(places, -1)[silent])
            need(kept, "rope_kv_write: changed KV that no token of the step owns")

    return after


def check_attention(args: Any) -> After:
    """R3: host bounds cover the device's truth. Blocks that a row can see are real ones, none that was given back."""
    cache, tables, row_slots, query_start, seq_lens = (
        args.k_cache, args.block_tables, args.row_slots, args.query_start, args.seq_lens
    )  # fmt: skip
    decode_rows, max_query, bound = args.num_decode_rows, args.max_query_len, args.max_seq_len_bound
    count = args.decode_rows
    need(not bool(args.arrivals.any()), "paged_attention: counters of shared rows are not zero")
    longest = int(seq_lens.max())
    need(longest <= bound, f"paged_attention: max_seq_len_bound={bound}, but a row has {longest} tokens")
    spans = query_start[1:] - query_start[:-1]
    need(int(spans.max()) <= max_query, f"paged_attention: max_query_len={max_query}, but a row has {int(spans.max())}")
    need(
        args.width == 1
        or (
            decode_rows == 0 and int(spans.max()) <= args.width and len(row_slots) * args.width >= int(query_start[-1])
        ),
        f"paged_attention: rows of up to {int(spans.max())} tokens where width={args.width} was said",
    )
    used = decode_rows if count is None else min(int(count[0]), decode_rows)
    need(bool((spans[:used] <= 1).all()), "paged_attention: a decode row has several tokens")
    others = int((spans[used:] > 0).sum())
    need(
        count is None or others <= len(spans) - decode_rows, f"paged_attention: {others} rows behind {used} decode rows"
    )
    block_size = cache.shape[1]
    for row in range(len(seq_lens)):
        length, slot = int(seq_lens[row]), int(row_slots[row])
        if length:
            need(0 <= slot < len(tables), f"paged_attention: row {row} has tokens and slot {slot}")
            start = length - int(spans[row])  # the row's first query
            first = max(start - args.window + 1, 0) if args.window else 0
            first = start // args.chunk * args.chunk if args.chunk else first
            blocks = tables[slot, first // block_size : -(-length // block_size)]
            need(bool(((blocks > 0) & (blocks < cache.shape[0])).all()), f"paged_attention: row {row} reads bad blocks")
    return None


def check_decode_attention(args: Any) -> After:
    """What its two halves obey. A layer that shares keys reads the newest where its tokens' blocks say, and writes nothing."""
    decodes = len(args.qkv) if args.width == 1 else 0
    alone = {"num_decode_rows": decodes, "max_query_len": args.width, "decode_rows": None}
    check_attention(SimpleNamespace(**vars(args) | alone))
    if not args.shares:
        return check_kv_write(args)
    size, starts = args.k_cache.shape[1], args.query_start.tolist()
    for row, (length, slot) in enumerate(zip(args.seq_lens.tolist(), args.row_slots.tolist(), strict=True)):
        first, behind = starts[row], starts[row + 1]
        if length:
            position = torch.arange(length - (behind - first), length)
            place = args.block_tables[slot, position // size] * size + position % size
            need(
                torch.equal(args.kv_slots[first:behind], place),
                f"decode_attention: row {row} reads its tokens' keys elsewhere",
            )
    return check_kv_write(SimpleNamespace(**vars(args) | {"kv_slots": torch.full_like(args.kv_slots, -1)}))


def check_advance(args: Any) -> After:
    """R5: slots without a live row in the step keep their state; R9: a live row's token is in the vocabulary, or there was
    none to draw (-1), which ends the request and is written nowhere.
    """
    row_slots, token_ids, history, num_tokens = args.row_slots, args.token_ids, args.history, args.num_tokens
    num_computed, alive, counts = args.num_computed, args.alive, args.counts
    results, offset = args.results, args.offset
    seen = row_slots[row_slots >= 0].long()
    live = seen[alive[seen] != 0]
    tokens = token_ids[(row_slots >= 0) & (alive[row_slots.long().clamp(0)] != 0)]
    need(bool(((tokens >= -1) & (tokens < counts.shape[1])).all()), "slot_advance: a token outside the vocabulary")
    others = torch.ones(len(alive), dtype=torch.bool)
    others[live] = False
    tables = (history, num_tokens, num_computed, alive, counts)
    before = [table[others].clone() for table in tables]
    past = history.clone(), num_tokens.clone()
    ring = int(args.packed[5])
    rest = torch.ones(len(results), dtype=torch.bool)
    rest[ring] = False
    old_results = results[rest].clone()

    def after() -> None:
        for name, table, old in zip(
            ("history", "num_tokens", "num_computed", "alive", "counts"), tables, before, strict=True
        ):
            need(torch.equal(table[others], old), f"slot_advance: changed {name} of a slot without a live row")
        known = torch.arange(history.shape[1]) < past[1][:, None]
        need(torch.equal(history[known], past[0][known]), "slot_advance: rewrote known history")
        need(bool((num_computed[live] <= num_tokens[live]).all()), "slot_advance: more tokens computed than known")
        need(torch.equal(results[rest], old_results), "slot_advance: wrote another step's results")
        found = results[ring, : len(row_slots)]
        sampled, finish = found[:, 0] == offset + 1, found[:, 2]
        written, finish = found[:, 3 + offset if offset else 1], torch.where(sampled, finish, 0)
        need(bool((written >= 0).all()), "slot_advance: wrote a token outside the vocabulary")
        starved = (token_ids < 0) & sampled
        need(bool((finish[starved] == Finish.NO_TOKEN).all()), "slot_advance: a row without a token goes on")
        ended = row_slots[finish != 0].long()
        need(bool((alive[ended] == 0).all()), "slot_advance: a request that ended is still alive")

    return after


def check_counts(args: Any) -> After:
    """The bound covers the histories that are recounted; slots are not listed twice."""
    slots, num_tokens, bound = args.slots, args.num_tokens, args.max_tokens_bound
    real = slots[slots >= 0].long()
    longest = int(num_tokens[real].max()) if len(real) else 0
    need(longest <= bound, f"count_tokens: max_tokens_bound={bound}, but a slot has {longest} tokens")
    return None
