"""MobileNet-v5's encoder, which sees for Gemma 3n: convolutions with attention between them, and two of its maps fused.

The blocks are MobileNet-v4's (Qin et al. 2024); names and sizes are those of timm's ``mobilenetv5_300m_enc``. It runs step by
step: the first convolution, each block, the fusion. Shapes: [C, S, S], channels and a side, which each step gives the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from headway.core.encode import BlockCost
from headway.core.ints import cdiv
from headway.models.interface import Target
from headway.models.layers.mixer import parameter
from headway.models.vision.passes import PassBuffers

ROWS, CHANNELS = 16, 2048
"""Rows and columns that every picture becomes, and the encoder's numbers of each."""
STEM = 64
"""Channels of the first convolution."""
EPS = 1e-6
"""Of norms."""
KEPT = 2
"""The stage whose last map is kept for the fusion, beside that of the last stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec:
    """A block, or another step.

    Attributes:
        kind: "edge", "inverted" or "attention".
        channels: that it gives.
        stride: of its convolution, or of that ahead of keys and values.
        start, middle: sides of kernels ahead of the products and between them; 0: there is none.
        grows: the products between have so many times as many channels as what comes in.
        heads, head_dim: of attention, whose heads share keys and values.
    """

    kind: str
    channels: int
    stride: int = 1
    start: int = 0
    middle: int = 0
    grows: int = 0
    heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MobileSpec:
    """The encoder.

    Attributes:
        prefix: in the checkpoint.
        side: pixels on a side of every picture, a multiple of 256.
        stages: blocks of each.
    """

    prefix: str = "vision_tower.timm_model."
    side: int = 768
    stages: tuple[tuple[StepSpec, ...], ...]

    @classmethod
    def scaled(cls, multiplier: float, side: int = 768) -> MobileSpec:
        """The encoder with so many times as many channels, in eights."""

        def wide(channels: int) -> int:
            found = max(int(channels * multiplier + 4) // 8 * 8, 8)
            return found + 8 if found < 0.9 * channels * multiplier else found

        def edge(stride: int) -> StepSpec:
            return StepSpec(kind="edge", channels=wide(128), stride=stride, grows=4)

        def inverted(channels: int, grows: int, start: int = 0, middle: int = 0) -> StepSpec:
            stride = 2 if middle else 1
            return StepSpec(
                kind="inverted", channels=wide(channels), stride=stride, start=start, middle=middle, grows=grows
            )

        def mixed(channels: int, heads: int, size: int, stride: int, count: int) -> tuple[StepSpec, ...]:
            attention = StepSpec(kind="attention", channels=wide(channels), heads=heads, head_dim=size, stride=stride)
            return (attention, inverted(channels, 2)) * count

        second = tuple(inverted(256, 4, start) for start in (5, 3, 5, 3))
        third = (inverted(640, 6, 5, 5), *(inverted(640, 4, 5),) * 7, inverted(640, 1), *mixed(640, 12, 64, 2, 14))
        fourth = (inverted(1280, 6, 5, 5), *mixed(1280, 16, 96, 1, 19))
        return cls(side=side, stages=((edge(2), edge(1), edge(1)), (inverted(256, 6, 3, 5), *second), third, fourth))


class Convolution(nn.Module):
    """A convolution over [C, S, S], padded so that strides decide the side that comes out; where there are names for it, a norm
    over channels behind it, and an activation."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, names: tuple[str, str] = ("conv.", "bn."), *, stride: int = 1,
        apart: bool = False, bias: bool = False, act: bool = False, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.names, self.stride, self.groups, self.act = names, stride, inputs if apart else 1, act
        self.weight = parameter(outputs, 1 if apart else inputs, kernel, kernel, dtype=dtype, device=device)
        self.bias = parameter(outputs, dtype=dtype, device=device) if bias else None
        self.norm = parameter(outputs, dtype=dtype, device=device) if names[1] else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C, S, S] -> [outputs, S / stride, S / stride]."""
        size = x.shape[-1]
        missing = max((cdiv(size, self.stride) - 1) * self.stride + self.weight.shape[-1] - size, 0)
        if missing:
            around = (missing // 2, missing - missing // 2)
            x = F.pad(x, (*around, *around))
        x = F.conv2d(x, self.weight, self.bias, stride=self.stride, groups=self.groups)
        if self.norm is not None:
            x = normed(x, self.norm)
        return F.gelu(x, approximate="tanh") if self.act else x

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = {f"{prefix}{self.names[0]}weight": Target(self.weight)}
        if self.bias is not None:
            found[f"{prefix}{self.names[0]}bias"] = Target(self.bias)
        return found if self.norm is None else found | {f"{prefix}{self.names[1]}weight": Target(self.norm)}

    def work(self, side: int) -> int:
        """Multiply-adds for a map of ``side``."""
        return self.weight.numel() * cdiv(side, self.stride) ** 2


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[C, S, S] by the root mean square of the channels at each place, times ``weight`` [C]; computed in float32."""
    own = x.float()
    own = own * torch.rsqrt(own.square().mean(0, keepdim=True) + EPS)
    return (own * weight.float()[:, None, None]).to(x.dtype)


class ConvolutionBlock(nn.Module):
    """Convolutions behind each other, a scale of channels where the checkpoint has one, and what came in where it fits."""

    def __init__(
        self, spec: StepSpec, inputs: int, *, scaled: bool = True, adds: bool = True, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        super().__init__()
        inner, outputs = inputs * spec.grows, spec.channels

        def part(name: str, into: int, out: int, kernel: int, **more: bool | int) -> tuple[str, Convolution]:
            names = ("conv.", "bn.")
            if spec.kind == "edge":
                names = ("conv_exp.", "bn1.") if not name else ("conv_pwl.", "bn2.")
                name = ""
            return name, Convolution(into, out, kernel, names, **more, dtype=dtype, device=device)  # type: ignore[arg-type]

        if spec.kind == "edge":
            self.parts = [part("", inputs, inner, 3, stride=spec.stride, act=True), part("out", inner, outputs, 1)]
        else:
            ahead = spec.stride if not spec.middle else 1
            found = [part("dw_start.", inputs, inputs, spec.start, stride=ahead, apart=True)] if spec.start else []
            found.append(part("pw_exp.", inputs, inner, 1, act=True))
            if spec.middle:
                found.append(part("dw_mid.", inner, inner, spec.middle, stride=spec.stride, apart=True, act=True))
            self.parts = [*found, part("pw_proj.", inner, outputs, 1)]
        self.modules_ = nn.ModuleList(each for _, each in self.parts)
        self.scale = parameter(outputs, dtype=dtype, device=device) if scaled and spec.kind != "edge" else None
        self.adds = adds and inputs == outputs and spec.stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C, S, S] -> [channels, S / stride, S / stride]."""
        y = x
        for _, each in self.parts:
            y = each.forward(y)
        if self.scale is not None:
            y = y * self.scale[:, None, None]
        return x + y if self.adds else y

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = {name: target for own, each in self.parts for name, target in each.destinations(prefix + own).items()}
        return found if self.scale is None else found | {f"{prefix}layer_scale.gamma": Target(self.scale)}

    def work(self, side: int) -> int:
        """Multiply-adds for a map of ``side``."""
        total = 0
        for _, each in self.parts:
            total += each.work(side)
            side = cdiv(side, each.stride)
        return total


class AttentionBlock(nn.Module):
    """x += scale * product(attend(norm(x))), where all heads share keys and values, of a map that may be smaller."""

    def __init__(self, spec: StepSpec, inputs: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec

        def product(into: int, out: int) -> Convolution:
            return Convolution(into, out, 1, ("proj.", ""), dtype=dtype, device=device)

        def smaller() -> Convolution:
            names = ("down_conv.", "norm.")
            return Convolution(inputs, inputs, 3, names, stride=spec.stride, apart=True, dtype=dtype, device=device)

        own = spec.heads * spec.head_dim
        self.norm = parameter(inputs, dtype=dtype, device=device)
        self.query, self.out = product(inputs, own), product(own, inputs)
        self.key, self.value = product(inputs, spec.head_dim), product(inputs, spec.head_dim)
        self.ahead = nn.ModuleList(smaller() for _ in range(2)) if spec.stride > 1 else None
        self.scale = parameter(inputs, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C, S, S] -> the same."""
        spec, y = self.spec, normed(x, self.norm)
        near = [y, y] if self.ahead is None else [each(y) for each in self.ahead]
        q = self.query.forward(y).view(spec.heads, spec.head_dim, -1).transpose(1, 2)
        k, v = (each.forward(own).flatten(1).T for each, own in zip((self.key, self.value), near, strict=True))
        shape = (1, spec.heads, len(k), spec.head_dim)
        found = F.scaled_dot_product_attention(q[None], k.expand(shape), v.expand(shape))[0]
        found = self.out.forward(found.transpose(1, 2).reshape(-1, *x.shape[1:]))
        return x + found * self.scale[:, None, None]

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = {f"{prefix}norm.weight": Target(self.norm), f"{prefix}layer_scale.gamma": Target(self.scale)}
        parts = {"query": self.query, "key": self.key, "value": self.value, "output": self.out}
        for name, each in parts.items():
            found |= each.destinations(f"{prefix}attn.{name}.")
        for name, own in zip(("key", "value"), self.ahead or (), strict=False):
            assert isinstance(own, Convolution)
            found |= own.destinations(f"{prefix}attn.{name}.")
        return found

    def work(self, side: int) -> int:
        """Multiply-adds for a map of ``side``."""
        spec, small = self.spec, cdiv(side, self.spec.stride)
        total = self.query.work(side) + self.out.work(side) + self.key.work(small) + self.value.work(small)
        return total + 2 * spec.heads * spec.head_dim * side**2 * small**2


class Fusion(nn.Module):
    """Two maps side by side, the smaller one as large as the other, through products; means of squares, and a norm."""

    def __init__(self, inputs: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        spec = StepSpec(kind="inverted", channels=CHANNELS, grows=2)
        self.ffn = ConvolutionBlock(spec, inputs, scaled=False, adds=False, dtype=dtype, device=device)
        self.norm = parameter(CHANNELS, dtype=dtype, device=device)

    def forward(self, larger: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[C, S, S], [C', S / 2, S / 2] -> [CHANNELS, ROWS, ROWS]."""
        x = F.interpolate(x[None], size=larger.shape[1:], mode="nearest")[0]
        x = self.ffn.forward(torch.cat([larger, x]))
        return normed(F.avg_pool2d(x, x.shape[-1] // ROWS), self.norm)

    def destinations(self, prefix: str) -> dict[str, Target]:
        return self.ffn.destinations(f"{prefix}ffn.") | {f"{prefix}norm.weight": Target(self.norm)}


class MobileTower(nn.Module):
    """See the module.

    Attributes:
        shapes: (channels, side) of what comes in, and behind each step.
        costs: what each step computes.
    """

    def __init__(self, spec: MobileSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.stem = Convolution(3, STEM, 3, stride=2, bias=True, act=True, dtype=dtype, device=device)
        self.blocks: list[tuple[str, ConvolutionBlock | AttentionBlock]] = []
        channels, side = STEM, spec.side // 2
        self.shapes, work = [(3, spec.side), (STEM, side)], [self.stem.work(spec.side)]
        for i, stage in enumerate(spec.stages):
            for j, each in enumerate(stage):
                made: ConvolutionBlock | AttentionBlock
                if each.kind == "attention":
                    made = AttentionBlock(each, channels, dtype=dtype, device=device)
                else:
                    made = ConvolutionBlock(each, channels, dtype=dtype, device=device)
                work.append(made.work(side))
                if each.kind != "attention":
                    side = cdiv(side, each.stride)
                channels = each.channels
                self.blocks.append((f"blocks.{i}.{j}.", made))
                self.shapes.append((channels, side))
            if i == KEPT:
                self.kept = len(self.blocks)
        self.fusion = Fusion(self.shapes[self.kept + 1][0] + channels, dtype=dtype, device=device)
        work.append(self.fusion.ffn.work(self.shapes[self.kept + 1][1]))
        self.shapes.append((CHANNELS, ROWS))
        self.list = nn.ModuleList(each for _, each in self.blocks)
        self.costs = tuple(BlockCost(cdiv(each, ROWS**2), 0) for each in work)

    def pass_buffers(self, device: torch.device) -> PassBuffers:
        """What a pass has between two steps: the map, and the one that is kept."""
        most = max(channels * side**2 for channels, side in self.shapes)
        found, (channels, side) = PassBuffers.none(device), self.shapes[self.kept + 1]
        found.x = torch.zeros(most, dtype=self.dtype, device=device)
        found.deep = torch.zeros(channels, side, side, dtype=self.dtype, device=device)
        return found

    def open(self, buffers: PassBuffers, pixels: torch.Tensor) -> None:
        """One picture's pass begins; ``pixels``: f32 [3, side, side]."""
        self._map(buffers, 0).copy_(pixels)

    def run_block(self, number: int, buffers: PassBuffers) -> None:
        """The pass goes through a step."""
        x, kept = self._map(buffers, number), buffers.deep
        assert kept is not None
        if number == 0:
            y = self.stem.forward(x)
        elif number <= len(self.blocks):
            y = self.blocks[number - 1][1].forward(x)
        else:
            y = self.fusion.forward(kept, x)
        self._map(buffers, number + 1).copy_(y)
        if number == self.kept:
            kept.copy_(y)

    def close(self, buffers: PassBuffers) -> torch.Tensor:
        """[ROWS^2, CHANNELS], of a pass that has gone through all steps; scaled as embeddings of text are."""
        return self._map(buffers, len(self.shapes) - 1).flatten(1).T * CHANNELS**0.5

    def _map(self, buffers: PassBuffers, number: int) -> torch.Tensor:
        channels, side = self.shapes[number]
        return buffers.x[: channels * side**2].view(channels, side, side)

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        prefix = self.spec.prefix
        found = self.stem.destinations(f"{prefix}conv_stem.")
        for name, each in self.blocks:
            found |= each.destinations(prefix + name)
        return found | self.fusion.destinations(f"{prefix}msfa.")
