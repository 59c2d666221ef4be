"""How layers are dealt out to groups, and where their caches lie: for random models, by what each number is said to mean."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest
import torch

from headway.core.cache import (
    LATENT,
    MOST_GROUPS,
    SSM,
    CacheGroup,
    CacheKind,
    CacheLayout,
    CacheSpec,
    Part,
    keys_and_values,
    latents,
)
from headway.core.ints import cdiv
from headway.state.cache_pool import CachePool, StateStorage, bytes_per_block

CONTEXT, CPU = 256, torch.device("cpu")


def drawn(rng: random.Random) -> CacheLayout:
    """Layers of some of all kinds; some read an earlier one's cache, some cache nothing, some have states beside it."""
    kinds = rng.sample(["full", "w8", "w32", "c16"], k=rng.randrange(1, 4))
    layers, states = list[CacheSpec | None](), list[CacheSpec | None]()
    with_states, heads = rng.random() < 0.4, rng.choice([1, 2])
    for number in range(rng.randrange(1, 13)):
        kind, spec = rng.choice(kinds), None
        if rng.random() < 0.85:
            spec = keys_and_values(
                heads, 4, window=int(kind[1:]) if kind[0] == "w" else 0, chunk=int(kind[1:]) if kind[0] == "c" else 0
            )
            alike = [n for n in range(number) if layers[n] == spec]
            if alike and rng.random() < 0.2:
                spec = replace(spec, shared_with=rng.choice(alike))
        layers.append(spec)
        parts = Part("conv", (3, 5)), Part(SSM, (2, 3), "float32", inputs=4)
        states.append(CacheSpec(CacheKind.STATE, parts) if with_states and rng.random() < 0.5 else None)
    for tokens in [rng.randrange(1, 40) for _ in range(rng.choice([0, 0, 2]))]:
        layers.append(CacheSpec(CacheKind.CROSS, (Part("k", (heads, 4)), Part("v", (heads, 4))), tokens=tokens))
        states.append(None)
    return CacheLayout.of(layers, CONTEXT, states if with_states else ())


@pytest.mark.parametrize("seed", range(40))
def test_every_layer_is_in_the_group_that_keeps_what_it_needs(seed: int) -> None:
    layout = drawn(random.Random(seed))
    own = [spec for spec in layout.layers if spec is not None and spec.shared_with is None]
    assert sorted(n for group in layout.groups for n in group.layers) == [
        n for n, spec in enumerate(layout.layers) if spec is not None and spec.shared_with is None
    ]
    for n, spec in enumerate(layout.layers):
        if spec is None:
            assert layout.group_of_layer[n] == -1
            continue
        group = layout.groups[layout.group_of_layer[n]]
        assert n in group.layers or layout.group_of_layer[n] == layout.group_of_layer[spec.shared_with or 0]
        assert (group.kind, group.window) in ((spec.kind, spec.window), (CacheKind.FULL, 0))
        assert (group.kind is CacheKind.CROSS) == (spec.kind is CacheKind.CROSS)
    plain = [group for group in layout.groups if group.kind is not CacheKind.CROSS]
    assert all(list(group.layers) == sorted(group.layers) for group in layout.groups) and len(plain) <= MOST_GROUPS
    crossing = [spec.tokens for spec in own if spec.kind is CacheKind.CROSS]
    assert layout.cross_tokens == max(crossing, default=0) == (layout.cross.tokens if layout.cross is not None else 0)
    assert (layout.cross is None) == (not crossing) and (layout.cross is None or layout.groups[-1] is layout.cross)
    assert layout.elements_per_token() == sum(part.elements for spec in own for part in spec.parts)
    assert layout.num_heads == max((spec.parts[0].shape[0] for spec in layout.layers if spec is not None), default=0)
    assert layout.edits_per_row == max(1, sum(1 + bool(group.window) for group in plain))
    assert layout.has_states == any(layout.states) and layout.is_empty == (not own and not any(layout.states))
    assert [part.name for part in layout.recurrent] == [SSM] * sum(spec is not None for spec in layout.states)
    if len(plain) > 1:  # else nothing is saved
        size = max(len(group.layers) for group in plain)
        cost = size * sum(min(group.window or CONTEXT, CONTEXT) for group in plain)
        assert cost < sum(len(group.layers) for group in plain) * CONTEXT


@pytest.mark.parametrize("seed", range(20))
def test_stages_have_their_layers_in_the_same_groups(seed: int) -> None:
    rng = random.Random(100 + seed)
    layout = drawn(rng)
    count = len(layout.layers)
    assert layout.of_layers(range(count)) is layout
    cut = rng.randrange(1, count + 1)
    first, second = layout.of_layers(range(cut)), layout.of_layers(range(cut, count))
    for stage, own in ((first, range(cut)), (second, range(cut, count))):
        assert stage.group_of_layer == layout.group_of_layer and len(stage.groups) == len(layout.groups)
        assert stage.layers == tuple(spec if n in own else None for n, spec in enumerate(layout.layers))
        assert stage.has_states == layout.has_states, "all stages plan chunks and checkpoints, or none does"
        for mine, whole in zip(stage.groups, layout.groups, strict=True):
            assert (mine.kind, mine.window, mine.tokens) == (whole.kind, whole.window, whole.tokens)
            assert mine.layers == tuple(n for n in whole.layers if n in own)
    assert first.elements_per_token() + second.elements_per_token() == layout.elements_per_token()


@pytest.mark.parametrize("kind", [CacheKind.WINDOW, CacheKind.CHUNK])
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_a_group_never_holds_more_blocks_than_its_peak(kind: CacheKind, block_size: int) -> None:
    """Rows of any length up to a step's, from any position on; and the peak is nearly met."""
    for window in (1, 4, 6, 9):
        group = CacheGroup(kind, window)
        for step in (1, 3, 8):
            for total in (1, 7, 30, 61):
                most = 0
                for start in range(total):
                    behind = max(0, start - window + 1) if kind is CacheKind.WINDOW else start // window * window
                    end = min(start + step, total)
                    most = max(most, cdiv(end, block_size) - behind // block_size)
                peak = group.peak_blocks(total, block_size, step)
                assert most <= peak <= most + 2, (window, step, total)


@pytest.mark.parametrize("seed", range(20))
def test_where_caches_lie(seed: int) -> None:
    """Layers of one group never share memory; the n-th layers of all groups do; who reads another's cache has that cache."""
    layout = drawn(random.Random(200 + seed))
    states = StateStorage(3, torch.float32, checkpoints=1) if layout.has_states else None
    pool = CachePool(layout, num_blocks=5, block_size=8, dtype=torch.float32, device=CPU, states=states)
    place = {n: nth for group in layout.groups for nth, n in enumerate(group.layers)}
    for n, spec in enumerate(layout.layers):
        if spec is None:
            assert pool.layers[n] == () or layout.states, "nothing but states"
            continue
        of = spec.shared_with if spec.shared_with is not None else n
        mine = pool.layers[n][: len(spec.parts)]
        assert [tuple(part.shape) for part in mine] == [(5, 8, *part.shape) for part in spec.parts]
        for other, nth in place.items():
            shares = mine[0].data_ptr() == pool.layers[other][0].data_ptr()
            assert shares == (nth == place[of]), (n, other)
    if not layout.states:
        stored = [part.untyped_storage() for n in place for part in pool.layers[n]]
        held = {storage.data_ptr(): storage.nbytes() for storage in stored}
        assert sum(held.values()) == 5 * bytes_per_block(layout, 8, torch.float32)


@pytest.mark.parametrize("seed", range(20))
def test_what_states_take_is_what_they_are_said_to_take(seed: int) -> None:
    """For every way to store them: memory is planned by ``bytes`` before anything is made."""
    rng = random.Random(300 + seed)
    layout = drawn(rng)
    while not layout.has_states:
        layout = drawn(rng)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    slots = rng.randrange(2, 7)
    storage = StateStorage(
        slots, dtype, rng.choice([None, torch.float16]), rng.randrange(slots), rng.randrange(3), rng.choice([0, 3])
    )
    words = torch.zeros(slots, storage.words(layout), dtype=torch.int32)
    rings = [ring for layer in storage.rings(layout, CPU) for ring in layer]
    assert storage.bytes(layout) == words.nbytes + sum(ring.nbytes for ring in rings)
    assert len(rings) == (len(layout.recurrent) if storage.replays else 0)
    for number, layer in enumerate(storage.views(layout, words), 1):
        for part in layer:
            assert not part.count_nonzero(), "parts share no memory"
            part.fill_(number)
    own = [part for spec in layout.states if spec is not None for part in spec.parts]
    assert (words[:, :4] == 0).all() or not storage.replays
    for part in (part for layer in storage.views(layout, words) for part in layer):
        assert (part.data_ptr() - words.data_ptr()) % 64 == part.stride(0) % 16 == 0, (
            "kernels are compiled for multiples of 16"
        )
    shapes = [part.shape if part.name == SSM else (part.shape[0] + storage.drafts, *part.shape[1:]) for part in own]
    sizes = [storage.part_dtype(part).itemsize * prod(shape) for part, shape in zip(own, shapes, strict=True)]
    assert 4 * storage.words(layout) == sum(-(-size // 64) * 64 for size in sizes) + 64 * bool(storage.replays)
    assert [tuple(part.shape[1:]) for layer in storage.views(layout, words) for part in layer] == shapes


def test_latents_are_known_as_such() -> None:
    for spec, known in ((latents(16), True), (latents(16, 4), True), (keys_and_values(1, 16), False), (None, False)):
        layout = CacheLayout.of([spec, None], CONTEXT)
        assert layout.has_latents == known
        if known:
            assert spec is not None and spec.parts[0].name == LATENT and layout.num_heads == 0
