"""What a decode step must move: weights, of mixtures those of the experts it goes to, keys and values, and states."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from headway.cli.bench.anchors.context import Bench, Scale, free_memory, spec_of
from headway.cli.bench.anchors.generation import itl_name, short_name
from headway.cli.bench.anchors.table import NOT_SERVED, known_bandwidth

if TYPE_CHECKING:
    from headway.models.interface import ModelSpec
    from headway.models.layers.moe import MixtureSpec

READ_BYTES, READS = 2**32, 8
"""Of a card whose bandwidth nobody wrote down: a plain reduction of so many bytes, the best of so many."""


@functools.cache
def bandwidth(card: str) -> float | None:
    """Bytes per second that the card's memory can be read at: what is written down of it, else measured now; None on a CPU."""
    import torch

    known = known_bandwidth(card)
    if known is not None or not torch.cuda.is_available() or card != torch.cuda.get_device_name():
        return known
    numbers, best = torch.ones(READ_BYTES // 4, device="cuda"), float("inf")
    for _ in range(READS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        numbers.sum()
        end.record()
        end.synchronize()  # host: a benchmark
        best = min(best, begin.elapsed_time(end) / 1e3)
    del numbers
    free_memory()
    return READ_BYTES / best


def mixtures(spec: ModelSpec) -> list[MixtureSpec]:
    """Of each layer that has one."""
    from headway.models.blocks import BlockSpec
    from headway.models.layers.moe import MixtureSpec

    blocks = [kind[0] for kind in spec.layer_kinds if isinstance(kind, tuple)]
    found = [block.ffn for block in blocks if isinstance(block, BlockSpec)]
    return [ffn for ffn in found if isinstance(ffn, MixtureSpec)]


def expert_bytes(mixture: MixtureSpec, hidden: int) -> float:
    """Of one expert's matrices, in 16 bits or in MXFP4."""
    weights = (3 if mixture.gated else 2) * mixture.size * (mixture.latent or hidden)
    return weights * (0.5 + 1 / 32 if mixture.fp4 else 2.0)


def more_bytes(spec: ModelSpec, rows: int, counted: float | None = None) -> float:
    """What a step of ``rows`` rows reads beyond ``spec.layer_weights`` in 16 bits.

    Args:
        counted: distinct experts of a layer; None: as many as equally likely ones would be.
    """
    from headway.kernels.expert_mlp.tiles import distinct_experts

    total = 0.0
    for mixture in mixtures(spec):
        top_k, size = mixture.router.top_k, expert_bytes(mixture, spec.hidden_size)
        read = distinct_experts(rows, top_k, mixture.num_experts) if counted is None else counted
        total += read * size - 2.0 * top_k * (3 if mixture.gated else 2) * mixture.size * (
            mixture.latent or spec.hidden_size
        )
    return total


def state_bytes(bench: Bench, spec: ModelSpec) -> float:
    """What a row's step moves of its states: read and written whole, and of a convolution's window what is read and the one
    place that is written. With a ring of inputs a state is written once in L tokens, and half of the ring is read."""
    import torch

    from headway.core.config import EngineArgs
    from headway.engine.states import state_storage

    if not spec.cache.has_states:
        return 0.0
    drafts = int(bench.engine.get("speculative_config", {}).get("num_speculative_tokens", 0))
    named = {key: bench.engine[key] for key in ("mamba_ssm_cache_dtype", "replayssm_buffer_len") if key in bench.engine}
    storage = state_storage(EngineArgs(model=str(bench.folder), **named), spec, torch.bfloat16, drafts)
    parts = [part for state in spec.cache.states if state is not None for part in state.parts]
    recurrent = sum(part.elements * storage.part_dtype(part).itemsize for part in spec.cache.recurrent)
    windows = sum(part.elements * storage.part_dtype(part).itemsize for part in parts) - recurrent
    if not storage.replays:
        return 2.0 * recurrent + windows
    between = storage.replays - 2 * drafts
    inputs = storage.ring_bytes(spec.cache) / storage.replays
    return recurrent * (1 + accepted(bench) / between) + windows + inputs * ((between + 1) / 2 + drafts)


def accepted(bench: Bench) -> float:
    """Tokens that a row's step brings on average: 1 without drafts, and with real ones at least."""
    return float(bench.engine.get("speculative_config", {}).get("synthetic_acceptance_length", 1.0))


def step_bytes(bench: Bench, rows: int, length: int, counted: float | None = None) -> float:
    """Bytes a decode step must move: all weights, of experts as many as were ``counted`` or as equally likely ones would be,
    keys and values of ``rows`` sequences of ``length`` in 16 bits, and states. A drafter's weights are left out."""
    spec = spec_of(bench)
    each = length * kv_bytes_per_token(spec) + state_bytes(bench, spec)
    return 2.0 * num_weights(spec) + more_bytes(spec, rows, counted) + rows * each


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Of a token's keys and values in all layers, in 16 bits."""
    return 2 * spec.cache.elements_per_token()


def num_weights(spec: ModelSpec) -> int:
    """Elements of the parameters that every step reads whole: of all layers, and of the output head."""
    return spec.layer_weights + spec.head_weights


def step_ms(bench: Bench, rows: int, length: int, speed: float, counted: float | None = None) -> float:
    """Milliseconds that these bytes take, for each token that a row's step brings."""
    return step_bytes(bench, rows, length, counted) / speed * 1e3 / accepted(bench)


def short_length(scale: Scale) -> int:
    """The mean length of the short figures."""
    return scale.row_prompt + (scale.variant_short + scale.variant_long) // 2


def of_steps(bench: Bench, speed: float) -> dict[str, float]:
    """Figure -> floor, of the figures of plain decode steps."""
    scale, mean = bench.scale, bench.scale.row_prompt + (bench.scale.short + bench.scale.long) // 2
    names = ((itl_name, mean), (short_name, short_length(scale)))
    return {name(rows): step_ms(bench, rows, length, speed) for name, length in names for rows in scale.rows}


def announce(bench: Bench) -> list[str]:
    """The figures of this module; none for models without states."""
    names = [f"floor_ms_with_states_bs{rows}" for rows in bench.scale.rows if spec_of(bench).cache.has_states]
    bench.table.announce(names, "ms")
    return names


def measure(bench: Bench, card: str) -> None:
    """What the bytes of a short figure's step take, states read and written among them: known floors say less of states."""
    names, speed = announce(bench), bandwidth(card)
    if speed is None:
        bench.table.mark(names, NOT_SERVED, "this card's bandwidth is not known")
        return
    for name, rows in zip(names, bench.scale.rows):
        if bench.table.wants(name):
            bench.table.add(name, step_ms(bench, rows, short_length(bench.scale), speed))
