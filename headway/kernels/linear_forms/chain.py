"""Decoder layers one after the other on one card, with the linear layers that a search wants to see.

Kernels that start early overlap with their neighbours, so a tile is judged by the time of whole layers, attention included.
Their weights together are several times the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F

from headway.core.ints import cdiv
from headway.kernels.decode_attention import decode_attention
from headway.kernels.linear_forms.shapes import JUNCTIONS, DecoderShape
from headway.kernels.mid_linear.hopper.launch import launch as launch_mid
from headway.kernels.mid_linear.hopper.launch import launch_add
from headway.kernels.mid_linear.tile import MidTile
from headway.kernels.rms_norm import add_parts_rms_norm, add_rms_norm, norm_add, rms_norm
from headway.kernels.silu_mul import GATES, gelu_mul, silu_mul
from headway.kernels.skinny_linear.tile import Tile
from headway.kernels.skinny_linear.triton import ADD, SILU, STORE
from headway.kernels.skinny_linear.triton import launch as launch_skinny
from headway.kernels.testing import make_cos_sin, make_paged_inputs

EPS, BLOCK_SIZE, CONTEXT = 1e-6, 16, 160
WEIGHTS_BYTES, MOST_LAYERS = 500 << 20, 24
"""What all layers' weights take at least, as far as so many layers do."""

Form = tuple[str, Tile | MidTile | None]
"""An op's name and its tile; ("plain", None) for ``F.linear`` and the separate kernels."""
PLAIN: Form = ("plain", None)
Choice = dict[str, Form]
"""One of ``JUNCTIONS`` -> its form. o and down leave the same kind of stream: both linear_add, both mid_add, or both others."""


@dataclass(slots=True)
class Stream:
    """What is between two products: the residual's norm; or the residual times the norm's weight and sums of its squares; or
    nothing but the residual."""

    x: torch.Tensor | None = None
    squares: torch.Tensor | None = None


@dataclass(slots=True)
class Around:
    """What stands around a product.

    Attributes:
        residual: bf16 [rows, hidden], added to in place.
        norm: bf16 [hidden], of every norm.
    """

    residual: torch.Tensor
    norm: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.residual.shape[0]


class Chain(Around):
    """Layers with random weights and caches for decoding rows.

    Args:
        rows: how many.
        count: of layers; None: as many as it takes that none of their weights stays in the L2 cache.
        context: tokens of a row.
        cached: dtype of keys and values.

    Attributes:
        residual: bf16 [rows, hidden], added to in place.
        weights: of each layer, junction -> [N, K].
    """

    def __init__(
        self,
        shape: DecoderShape,
        rows: int,
        device: torch.device,
        *,
        count: int | None = None,
        context: int = CONTEXT,
        cached: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape, self.device, self.context, self.cached = shape, device, context, cached
        count = count or min(MOST_LAYERS, max(2, cdiv(WEIGHTS_BYTES, shape.layer_bytes())))
        self.weights = [
            {name: self.random(*shape.weight(name), scale=0.02) for name in JUNCTIONS} for _ in range(count)
        ]
        self.bias = self.random(shape.weight("qkv")[0]) if shape.qkv_bias else None
        self.norm = self.random(shape.hidden)
        self.head_norm = self.random(shape.head_dim) if shape.qk_norm else None
        self.set_rows(rows)

    def set_rows(self, rows: int) -> None:
        """Go on with as many rows."""
        shape = self.shape
        self.residual = self.random(rows, shape.hidden)
        self.inputs = make_paged_inputs(
            [(1, self.context)] * rows, num_decode_rows=rows, heads=(shape.heads, shape.kv_heads), size=shape.head_dim,
            block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=str(self.device), bound=4096, on_device=True,
            heads_first=True, cached=self.cached,
        )  # fmt: skip
        first = (self.inputs.k_cache, self.inputs.v_cache)
        others = [
            tuple(torch.randn_like(cache, dtype=torch.bfloat16).to(self.cached) for cache in first)
            for _ in self.weights[1:]
        ]
        self.caches = cycle([first, *others])  # one a layer: a cache that all share would stay in the L2
        self.positions = torch.full((rows,), self.context - 1, dtype=torch.int32, device=self.device)
        self.kv_slots = torch.arange(rows, dtype=torch.int32, device=self.device)
        self.table = make_cos_sin(4096, shape.head_dim, str(self.device))

    def random(self, *sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device=self.device) * scale

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        norm, (keys, values) = self.head_norm, next(self.caches)
        scale = self.shape.head_dim**-0.5
        more = (self.positions, self.table, norm, norm, EPS, self.kv_slots, keys, values, self.shape.heads)
        tables, numbers = self.inputs.arguments(scale)[3:8], (scale, 0, 0.0)
        attended: torch.Tensor = decode_attention(qkv, *more, *tables, *numbers, self.inputs.max_seq_len_bound)
        return attended.flatten(1)

    def run(self, choice: Choice) -> Stream:
        """All layers; returns what the last one leaves."""
        few = choice["o"][0] == "linear_add"
        stream = Stream() if few else Stream(rms_norm(self.residual, self.norm, EPS))
        for weights in self.weights:
            qkv = project_in(choice["qkv"], stream, self, weights["qkv"], self.bias)
            stream = project_out(choice["o"], self.attend(qkv), self, weights["o"])
            inner = project_in(choice["gate_up"], stream, self, weights["gate_up"], None, "silu")
            stream = project_out(choice["down"], inner, self, weights["down"])
        return stream


def project_in(
    form: Form, stream: Stream, around: Around, weight: torch.Tensor, bias: torch.Tensor | None, gate: str = ""
) -> torch.Tensor:
    """A product of the stream's norm, with ``gate``, one of ``GATES``, and product of its halves."""
    op, tile = form
    outputs = weight.shape[0] // (2 if gate else 1)
    if op == "plain":
        x = rms_norm(around.residual, around.norm, EPS) if stream.x is None else stream.x
        y = F.linear(x, weight, bias)
        result: torch.Tensor = y if not gate else silu_mul(y) if gate == "silu" else gelu_mul(y, gate == "gelu_tanh")
        return result
    out = torch.empty(around.rows, outputs, dtype=torch.bfloat16, device=weight.device)
    mode = GATES.index(gate) if gate else 0
    if isinstance(tile, Tile):
        inside = op in ("norm_linear", "norm_gate_up")
        x, norm, eps = (around.residual, around.norm, EPS) if inside else (stream.x, None, 0.0)
        assert x is not None
        launch_skinny(x, norm, eps, weight, bias, out, SILU + mode if gate else STORE, tile)
    else:
        assert tile is not None and stream.x is not None
        launch_mid(stream.x, weight, bias, out, tile, stream.squares, EPS, gate=mode + 1 if gate else 0)
    return out


def project_out(
    form: Form, x: torch.Tensor, around: Around, weight: torch.Tensor, bias: torch.Tensor | None = None,
    place: str = "added",
) -> Stream:  # fmt: skip
    """A product that is added to the residual; ``place`` as of ``Product``."""
    op, tile = form
    residual, norm, rows = around.residual, around.norm, around.rows
    if op == "linear_add":
        assert isinstance(tile, Tile)
        launch_skinny(x, None, 0.0, weight, bias, residual, ADD, tile)
        return Stream()
    if op == "mid_add":
        assert isinstance(tile, MidTile)
        out = torch.empty_like(residual)
        squares = torch.empty(tile.programs(weight.shape[0]), rows, dtype=torch.float32, device=x.device)
        launch_add(x, weight, bias, residual, norm, out, squares, tile)
        return Stream(out, squares)
    if op == "linear_parts":
        assert isinstance(tile, MidTile)
        y = torch.empty(tile.splits, rows, weight.shape[0], dtype=torch.float32, device=x.device)
        launch_mid(x, weight, bias, y, tile)
        if place == "added":
            return Stream(add_parts_rms_norm(y, residual, norm, EPS))
    elif op == "plain":
        y = F.linear(x, weight, bias)
    else:
        y = torch.empty(rows, weight.shape[0], dtype=torch.bfloat16, device=x.device)
        if isinstance(tile, Tile):
            launch_skinny(x, None, 0.0, weight, bias, y, STORE, tile)
        else:
            assert tile is not None
            launch_mid(x, weight, bias, y, tile)
    if place == "behind":
        return Stream(norm_add(y, norm, residual, norm, EPS))
    return Stream(add_rms_norm(y, residual, norm, EPS) if place == "added" else y)


def head(form: Form, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The output layer."""
    tile = form[1]
    if tile is None:
        return F.linear(x, weight)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if isinstance(tile, Tile):
        launch_skinny(x, None, 0.0, weight, None, out, STORE, tile)
    else:
        launch_mid(x, weight, None, out, tile)
    return out


class Timer:
    """Times calls as the engine runs them, in a graph."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        # The last graph keeps the pool in use: torch fails where a pool that no graph has, but tensors, is taken again.
        self._graph: torch.cuda.CUDAGraph | None = None

    def spent(self, call: Callable[[], object], times: int = 1, replays: int = 3) -> float:
        """Microseconds of a call: ``times`` of them in one graph, the best of ``replays``."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        best = float("inf")
        with torch.cuda.stream(stream):
            call()
            graph.capture_begin(pool=self._pool)
            try:
                for _ in range(times):
                    call()
            finally:
                graph.capture_end()
            self._graph = graph
            graph.replay()
            for _ in range(replays):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()  # host: a measurement
                best = min(best, start.elapsed_time(end) * 1000 / times)
        torch.cuda.current_stream().wait_stream(stream)
        return best
