"""Prefill on one card: attention variants, the MLP in slices, whole layers by step size, and the engine by step size.

    python bench/ops/prefill.py [--only attention mlp layers engine] [--json FILE] [--markdown FILE]

Every attention variant is first compared with the general kernel, which the op's tests compare with the reference. Figures
are the mean over a CUDA graph of many calls, the best of several replays; floors count 790 TFLOP/s and 4.44 TB/s. ``layers``
runs four layers with their own weights and says what 64 prompts of 1024 tokens would take in all layers of the model: with
separate kernels, with the residual added by the matrix product before the norm, and with wide products (``wide_linear``).
``engine`` is ``LLM.generate`` of 64 prompts of 1024 random tokens, one token each, best of four.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from limits import FLOPS_PER_US
from timing import time_calls

from headway.core.ints import cdiv
from headway.kernels.hopper import runs_gluon
from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.hopper.overlap import LONG, SHORT, OverlapTile, launch_overlapped
from headway.kernels.paged_attention.launch import launch_prefill
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.paged_attention.tiles import DecodeRows, PrefillTile
from headway.kernels.rms_norm import add_rms_norm, rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import silu_mul
from headway.kernels.testing import PagedInputs, make_cos_sin, make_paged_inputs
from headway.kernels.wide_linear import wide_gate_up, wide_qkv

EPS, BLOCK_SIZE, PROMPT, PROMPTS, LAYERS = 1e-6, 16, 1024, 64, 4
MODELS_FOLDER = Path(__file__).parents[2] / "headway/cli/bench/anchors/models"


@dataclass(frozen=True)
class Shape:
    """A model's layer."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    size: int
    qk_norm: bool


SHAPES = [
    Shape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, True),
    Shape("llama-8b", 32, 4096, 14336, 32, 8, 128, False),
]
BATCHES: dict[str, list[list[tuple[int, int]]]] = {
    "qwen3-0.6b": [[(1024, 1024)] * 8, [(1024, 1024)] * 4, [(512, 512)] * 16, [(4096, 4096)] * 2, [(1024, 2048)] * 8],
    "llama-8b": [[(1024, 1024)] * 8, [(8192, 8192)]],
}
GENERAL = {
    "general 128x32, 3 stages": PrefillTile(128, 32, 128, 8, 3, "tf32"),
    "general 128x32, 2 stages": PrefillTile(128, 32, 128, 8, 2, "tf32"),
    "general 128x64, 2 stages": PrefillTile(128, 64, 128, 8, 2, "tf32"),
}
WAYS = {"separate": "separate kernels", "in product": "residual in product", "wide": "wide products"}
OVERLAPPED = {f"overlapped, {tile.block_n} keys": tile for tile in (SHORT, LONG)}


@dataclass
class Figure:
    """One measurement: microseconds, and its floor."""

    group: str
    case: str
    variant: str
    us: float
    floor_us: float


class Report:
    """Figures as they come."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.failures: list[str] = []

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        share = f"{figure.floor_us / figure.us * 100:6.1f} %" if figure.floor_us else ""
        say(f"{figure.group:10s} {figure.case:30s} {figure.variant:28s} {figure.us:12.1f} us {share}")

    @contextmanager
    def guard(self, label: str) -> Iterator[None]:
        """A variant that fails is named and the rest goes on."""
        try:
            yield
        except Exception as error:
            line = f"{label}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.failures.append(line)
            say(f"FAILED {line}")

    def markdown(self) -> str:
        lines = ["| group | case | variant | us | % of floor |", "|---|---|---|---|---|"]
        for f in self.figures:
            share = f"{f.floor_us / f.us * 100:.0f}" if f.floor_us else ""
            lines.append(f"| {f.group} | {f.case} | {f.variant} | {f.us:,.1f} | {share} |")
        return "\n".join([*lines, "", *(f"- failed: {line}" for line in self.failures)]) + "\n"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def paged(shape: Shape, rows: list[tuple[int, int]]) -> PagedInputs:
    return make_paged_inputs(
        rows, num_decode_rows=0, heads=(shape.heads, shape.kv_heads), size=shape.size, block_size=BLOCK_SIZE,
        dtype=torch.bfloat16, device="cuda", on_device=True, heads_first=True,
    )  # fmt: skip


def attention(report: Report) -> None:
    """Each variant at each batch of each model; variants must agree with the general kernel as it is used today."""
    for shape in SHAPES:
        for rows in BATCHES[shape.name]:
            inputs, scale = paged(shape, rows), shape.size**-0.5
            case = f"{shape.name} {len(rows)} x {rows[0][0]} of {rows[0][1]}"
            seen = sum(n * (context - n) + n * (n + 1) / 2 for n, context in rows)
            floor = 4 * seen * shape.heads * shape.size / FLOPS_PER_US
            tables = (inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens)
            tensors = (inputs.q, inputs.k_cache, inputs.v_cache)
            calls: dict[str, Callable[[torch.Tensor], Any]] = {}
            for name, tile in GENERAL.items():
                if not calls or shape is SHAPES[0]:
                    calls[name] = partial(_general, tensors, tables, scale, tile)
            if runs_gluon(inputs.q.device):
                for name, wide in OVERLAPPED.items():
                    calls[name] = partial(
                        _overlapped, tensors, (tables, inputs.arrivals), scale, inputs.max_query_len, wide
                    )
            truth = torch.full_like(inputs.q, float("nan"))
            next(iter(calls.values()))(truth)
            for name, call in calls.items():
                with report.guard(f"{case} {name}"):
                    out = torch.full_like(inputs.q, float("nan"))
                    call(out)
                    agree(out, truth)
                    report.add(Figure("attention", case, name, time_calls([partial(call, out)], least=10), floor))


def _general(tensors: Any, tables: Any, scale: float, tile: PrefillTile, out: torch.Tensor) -> None:
    launch_prefill(*tensors, out, tables, ScoreRule(scale), DecodeRows(0), tile)


def _overlapped(tensors: Any, tables: Any, scale: float, most: int, tile: OverlapTile, out: torch.Tensor) -> None:
    launch_overlapped(*tensors, out, *tables, scale, DecodeRows(0), most, tile)


def agree(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Two roundings of the same sums: every element within 2 % of the largest value."""
    error, largest = float((actual.float() - expected.float()).abs().max()), float(expected.float().abs().max())
    if not error <= 0.02 * largest:
        raise ValueError(f"error {error:.3g} at values up to {largest:.3g}")


def random_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * columns**-0.5


def sliced_mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, out: torch.Tensor, step: int) -> None:
    """out = MLP of x, ``step`` tokens at a time."""
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        torch.mm(silu_mul(F.linear(x[part], up)), down.t(), out=out[part])


def mlp(report: Report) -> None:
    """gate_up, silu and down over 8192 tokens, as a whole and in slices whose middle fits the L2 cache."""
    for shape in SHAPES:
        up = random_weight(2 * shape.intermediate, shape.hidden)
        down = random_weight(shape.hidden, shape.intermediate)
        x = torch.randn(8192, shape.hidden, dtype=torch.bfloat16, device="cuda")
        floor = 6.0 * 8192 * shape.hidden * shape.intermediate / FLOPS_PER_US
        for step in (8192, 4096, 2048, 1024):
            with report.guard(f"mlp {shape.name} {step}"):
                spent = time_calls([partial(sliced_mlp, x, up, down, torch.empty_like(x), step)])
                report.add(Figure("mlp", f"{shape.name} 8192 tokens", f"slices of {step}", spent, floor))


class Chain:
    """A few layers of a model over a step of ``tokens`` tokens."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape, width = shape, (shape.heads + 2 * shape.kv_heads) * shape.size
        self.inputs = paged(shape, [(PROMPT, PROMPT)] * cdiv(tokens, PROMPT))
        self.positions = (torch.arange(tokens, device="cuda") % PROMPT).int()
        row, place = torch.arange(tokens, device="cuda") // PROMPT, self.positions.long()
        blocks = self.inputs.block_tables[self.inputs.row_slots[row].long(), place // BLOCK_SIZE]
        self.kv_slots = (blocks * BLOCK_SIZE + place % BLOCK_SIZE).int()
        self.cos_sin = make_cos_sin(PROMPT, shape.size, "cuda")
        self.residual = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")
        hidden, inner = shape.hidden, shape.intermediate
        self.weights = [
            (random_weight(width, hidden), random_weight(hidden, shape.heads * shape.size),
             random_weight(2 * inner, hidden), random_weight(hidden, inner))
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        self.head_norm = torch.ones(shape.size, dtype=torch.bfloat16, device="cuda") if shape.qk_norm else None

    def project(self, x: torch.Tensor, weight: torch.Tensor, wide: bool) -> torch.Tensor:
        """Queries, turned; keys and values are in the cache."""
        inputs, norm = self.inputs, self.head_norm
        rest = (self.positions, self.cos_sin, norm, norm, EPS, self.kv_slots, inputs.k_cache, inputs.v_cache)
        if wide:
            return wide_qkv(x, weight, *rest, self.shape.heads)
        return rope_kv_write(F.linear(x, weight), *rest, self.shape.heads)

    def run(self, way: str) -> None:
        """All layers. "in product": matrix products add to the residual; "wide": the kernels of ``wide_linear``."""
        inputs, residual, norm = self.inputs, self.residual, self.norm
        x = rms_norm(residual, norm, EPS)
        for qkv, out, up, down in self.weights:
            q = self.project(x, qkv, way == "wide")
            heads = paged_attention(q, *inputs.arguments(self.shape.size**-0.5)[1:]).flatten(1)
            for value, weight in ((heads, out), (None, down)):
                if value is None:
                    value = wide_gate_up(x, up) if way == "wide" else silu_mul(F.linear(x, up))
                if way == "in product":
                    x = rms_norm(residual.addmm_(value, weight.t()), norm, EPS)
                else:
                    x = add_rms_norm(F.linear(value, weight), residual, norm, EPS)


def layers(report: Report) -> None:
    """Whole layers at several step sizes, scaled to 64 x 1024 tokens through all layers of the model."""
    for shape in SHAPES:
        each = (
            shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.size + 3 * shape.hidden * shape.intermediate
        )
        work = 2.0 * PROMPTS * PROMPT * each + 2.0 * PROMPTS * PROMPT * (PROMPT + 1) * shape.heads * shape.size
        for tokens in (2048, 4096, 8192, 16384) if shape is SHAPES[0] else (2048, 8192):
            for way in WAYS:
                with report.guard(f"layers {shape.name} {tokens} {way}"), torch.inference_mode():
                    chain = Chain(shape, tokens)
                    spent = time_calls([partial(chain.run, way)], least=2, replays=4)
                    whole = spent * PROMPTS * PROMPT / tokens * shape.layers / LAYERS
                    case = f"{shape.name} steps of {tokens}"
                    report.add(Figure("layers", case, WAYS[way], whole, work * shape.layers / FLOPS_PER_US))
                    del chain


def generate(llm: Any, run: int, params: Any) -> float:
    """Seconds of one call."""
    rng = random.Random(run)
    prompts = [[rng.randrange(10_000) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    start = time.perf_counter()
    llm.generate(list(prompts), [params] * PROMPTS, use_tqdm=False)
    return time.perf_counter() - start


def engine(report: Report) -> None:
    """The whole engine by step size, without graphs so that it starts quickly: these steps use none."""
    from headway import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    for tokens in (8192, 4096, 2048, 16384):
        with report.guard(f"engine {tokens}"):
            llm = LLM(
                str(MODELS_FOLDER / "qwen3_06b"), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
                max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=tokens, enforce_eager=True,
                enable_prefix_caching=False,
            )  # fmt: skip
            gc.collect()
            gc.freeze()
            best = min(generate(llm, run, params) for run in range(4))
            rate = PROMPTS * PROMPT / best
            report.add(Figure("engine", f"steps of {tokens}", f"{rate:,.0f} tok/s", best * 1e6, 0.0))
            llm.close()
            del llm
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()


GROUPS = {"attention": attention, "mlp": mlp, "layers": layers, "engine": engine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    report = Report()
    for name in options.only:
        start = time.perf_counter()
        with report.guard(name):
            GROUPS[name](report)
        torch.cuda.empty_cache()
        say(f"-- {name}: {time.perf_counter() - start:.1f} s")
        if options.json:
            whole = {"figures": [asdict(figure) for figure in report.figures], "failures": report.failures}
            options.json.write_text(json.dumps(whole, indent=1))
        if options.markdown:
            options.markdown.write_text(report.markdown())
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
