"""Where a CPU decode step of a SmolLM2-135M-shaped model goes, beside the floors of the machine it runs on.

    python bench/cpu_decode.py [--rows 1 16] [--context 256] [--dtypes bfloat16 float32] [--threads N]

Random weights, every layer its own, so caches are as cold as in serving. A figure is the sum over the layers of each
layer's shortest time, layers taken in turn: other processes only ever add. The memory floor is bytes (weights and KV
read once) over the measured read bandwidth; the arithmetic floor is operations over the fastest matrix product here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from headway.kernels.cpu import ops
from headway.kernels.linear import PackedLinear
from headway.kernels.paged_attention import paged_attention
from headway.kernels.rms_norm import add_rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import silu_mul
from headway.kernels.testing import make_cos_sin, make_paged_inputs

LAYERS, HIDDEN, HEADS, KV_HEADS, SIZE, INTER, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
BLOCK_SIZE, EPS = 16, 1e-5
SHAPES = {
    "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE),
    "o": (HEADS * SIZE, HIDDEN),
    "gate_up": (HIDDEN, 2 * INTER),
    "down": (INTER, HIDDEN),
}


@dataclass(slots=True)
class Model:
    """Weights, caches and one step's inputs for R decode rows."""

    rows: int
    dtype: torch.dtype
    layers: list[dict[str, PackedLinear]] = field(default_factory=list)
    paged: list[tuple[object, ...]] = field(default_factory=list)

    def build(self, context: int) -> None:
        def linear(inputs: int, outputs: int) -> PackedLinear:
            return PackedLinear(torch.randn(outputs, inputs, dtype=self.dtype) / inputs**0.5)

        self.layers = [{name: linear(*shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
        self.layers.append({"head": linear(HIDDEN, VOCAB)})
        for _ in range(LAYERS):
            inputs = make_paged_inputs(
                [(1, context)] * self.rows, num_decode_rows=self.rows, heads=(HEADS, KV_HEADS), size=SIZE,
                block_size=BLOCK_SIZE, dtype=self.dtype, device="cpu", on_device=True,
            )  # fmt: skip
            self.paged.append(inputs.arguments(SIZE**-0.5))

    @property
    def bytes_read(self) -> int:
        weights = sum(layer.in_features * layer.out_features for group in self.layers for layer in group.values())
        keys_and_values = 2 * int(self.paged[0][6].sum()) * KV_HEADS * SIZE * LAYERS  # type: ignore[attr-defined]
        return (weights + keys_and_values) * self.dtype.itemsize

    @property
    def operations(self) -> int:
        weights = sum(layer.in_features * layer.out_features for group in self.layers for layer in group.values())
        scores = int(self.paged[0][6].sum()) * HEADS * SIZE * LAYERS  # type: ignore[attr-defined]
        return 2 * self.rows * weights + 4 * scores


Calls = list[Callable[[], object]]


def part_calls(model: Model, context: int) -> dict[str, Calls]:
    """The parts of one step, one call per layer (and kind)."""
    rows, dtype = model.rows, model.dtype
    inputs = {n: torch.randn(rows, shape[0], dtype=dtype) for n, shape in SHAPES.items()}
    qkv, gate_up = (torch.randn(rows, SHAPES[n][1], dtype=dtype) for n in ("qkv", "gate_up"))
    weight, residual = torch.ones(HIDDEN, dtype=dtype), torch.randn(rows, HIDDEN, dtype=dtype)
    decoder, head = model.layers[:-1], model.layers[-1]["head"]
    rope = make_rope(model, context)
    return {
        "linear": [partial(layer[name], inputs[name]) for layer in decoder for name in SHAPES],
        "lm head": [partial(head, inputs["qkv"])],
        "attention": [partial(paged_attention, *arguments) for arguments in model.paged],
        "norms": [partial(add_rms_norm, inputs["qkv"], residual, weight, EPS) for _ in range(2 * LAYERS + 1)],
        "rope": [partial(rope, index, qkv) for index in range(LAYERS)],
        "silu_mul": [partial(silu_mul, gate_up) for _ in range(LAYERS)],
    }


def make_rope(model: Model, context: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """(layer, qkv) -> q, writing every row's new keys and values."""
    table = make_cos_sin(context + 1, SIZE, "cpu")
    positions = torch.full((model.rows,), context - 1, dtype=torch.int32)
    slots = torch.arange(model.rows, dtype=torch.int32) + BLOCK_SIZE

    def rope(layer: int, x: torch.Tensor) -> torch.Tensor:
        keys, values = model.paged[layer][1:3]
        result: torch.Tensor = rope_kv_write(x, positions, table, None, None, EPS, slots, keys, values, HEADS)
        return result

    return rope


def step_calls(model: Model, context: int) -> Calls:
    """A whole step in order, one call per layer, then the head."""
    weight, rope = torch.ones(HIDDEN, dtype=model.dtype), make_rope(model, context)
    stream = torch.randn(model.rows, HIDDEN, dtype=model.dtype)
    state = {"x": torch.randn(model.rows, HIDDEN, dtype=model.dtype)}

    def layer(index: int) -> None:
        linear = model.layers[index]
        q = rope(index, linear["qkv"](state["x"]))
        x = linear["o"](paged_attention(q, *model.paged[index][1:]).flatten(1))
        x = linear["gate_up"](add_rms_norm(x, stream, weight, EPS))
        state["x"] = add_rms_norm(linear["down"](silu_mul(x)), stream, weight, EPS)

    return [*(partial(layer, index) for index in range(LAYERS)), lambda: model.layers[-1]["head"](state["x"])]


def best_ms(calls: Calls, seconds: float) -> float:
    """Sum over the calls of each one's shortest time, in ms; made in turn for ``seconds``, at least 5 rounds."""
    best, end, rounds = [float("inf")] * len(calls), time.perf_counter() + seconds, 0
    while rounds < 5 or time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
        rounds += 1
    return sum(best) * 1e3


def read_bandwidth(seconds: float) -> float:
    """Bytes per second that all threads together read from memory (512 MiB, larger than any cache)."""
    data = torch.ones(128 << 20)
    return data.nbytes / best_ms([part.sum for part in data.chunk(32)], seconds) * 1e3


def peak_rate(dtype: torch.dtype, seconds: float) -> float:
    """Operations per second of the fastest matrix product at hand, on data that stays in cache."""
    rows, inputs, outputs = 384, 576, 1536
    x, weight = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    packed = PackedLinear(weight)
    best = min(best_ms([call], seconds) for call in (partial(packed, x), partial(F.linear, x, weight)))
    return 2 * rows * inputs * outputs / best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.5, help="spent on each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bandwidth, steps = read_bandwidth(options.seconds), dict[tuple[str, int], float]()
    print(f"native kernels: {ops.available()}; {options.threads} threads; read bandwidth {bandwidth / 1e9:.0f} GB/s")
    with torch.inference_mode():
        for name in options.dtypes:
            dtype: torch.dtype = getattr(torch, name)
            peak = peak_rate(dtype, options.seconds)
            print(f"\n{name}: peak {peak / 1e9:.0f} GFLOP/s, ms per step at context {options.context}")
            for rows in options.rows:
                model = Model(rows, dtype)
                model.build(options.context)
                parts = part_calls(model, options.context) | {"step": step_calls(model, options.context)}
                times = {part: best_ms(calls, options.seconds) for part, calls in parts.items()}
                steps[name, rows] = times["step"]
                floors = {"memory": model.bytes_read / bandwidth * 1e3, "arithmetic": model.operations / peak * 1e3}
                print(f"  {rows:3d} rows: " + "  ".join(f"{part} {ms:.2f}" for part, ms in times.items()))
                print(f"            {rows / times['step'] * 1e3:.0f} tokens/s; floors: "
                      + ", ".join(f"{floor} {ms:.2f}" for floor, ms in floors.items()))  # fmt: skip
    verdict(steps, options.rows)


def verdict(steps: dict[tuple[str, int], float], rows: list[int]) -> None:
    """Which dtype is faster here, and what the engine's dtype="auto" takes."""
    chosen = str(ops.preferred_dtype()).removeprefix("torch.")
    print(f'\ndtype="auto" takes {chosen} on this CPU')
    for count in rows:
        if ("bfloat16", count) in steps and ("float32", count) in steps:
            ratio = steps["float32", count] / steps["bfloat16", count]
            faster, times = ("bfloat16", ratio) if ratio > 1 else ("float32", 1 / ratio)
            print(f"  {count} rows: {faster} is {times:.2f}x faster (bfloat16 reads half the bytes per weight)")


if __name__ == "__main__":
    main()
