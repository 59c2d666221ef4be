"""``VisionTower``: patches to rows of a decoder's input, each tile (or window) attending to itself.

Shapes: N patches of all tiles, n of one, C the tower's width, P numbers of a patch, M = N / group^2 rows that come out. What
depends on the picture is told in integers of the host (``layout``), so nothing is read back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from headway.kernels.dense_attention import dense_attention
from headway.kernels.dense_rope import dense_rope
from headway.models.interface import Target
from headway.models.layers.activation import activation
from headway.models.layers.linear import Linear
from headway.models.layers.mlp import MLP
from headway.models.layers.norm import Norm
from headway.models.vision.passes import PassBuffers, PassShape, exact_shape
from headway.models.vision.sandwich import SandwichBlock
from headway.models.vision.spec import ProjectorSpec, VisionSpec
from headway.multimodal.layout import Layout


class Projector(nn.Module):
    """See ``ProjectorSpec``.

    Args:
        hidden: C.
        group: side of the squares that become one row.
    """

    def __init__(
        self, spec: ProjectorSpec, hidden: int, group: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec, self._square, self._hidden = spec, group * group, hidden
        merged = hidden * self._square if spec.merges == "beside" else hidden
        norm_width = merged if spec.norm_behind else hidden
        self.norm = spec.norm_spec.make(norm_width, dtype=dtype, device=device) if spec.norm else None
        if self.norm is not None and not spec.norm_stored:
            self.norm.weight.fill_(1.0)
        self.standard: torch.Tensor | None = None
        if spec.standard is not None:
            self.standard = torch.empty(2, hidden, dtype=torch.float32, device=device)
        self.first = (
            Linear(merged, {spec.first: hidden}, bias=False, dtype=dtype, device=device) if spec.first else None
        )
        widths = [hidden if spec.first else merged, *spec.widths]
        self.products = nn.ModuleList(
            Linear(widths[i], {name: widths[i + 1]}, bias=spec.bias, dtype=dtype, device=device)
            for i, name in enumerate(spec.products)
        )
        self.act = activation(spec.activation, gated=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C], square by square -> [M, width]."""
        spec = self.spec
        if self.norm is not None and not spec.norm_behind:
            x = self.norm.forward(x)
        square = self._square
        x = x.view(-1, square * self._hidden) if spec.merges == "beside" else x.view(-1, square, self._hidden).mean(1)
        if spec.multiplier != 1.0:
            x = self._standardised(x.float() * spec.multiplier).to(x.dtype)
        if self.norm is not None and spec.norm_behind:
            x = self.norm.forward(x)
        if self.first is not None:
            x = self.first.forward(x)
        for i, product in enumerate(self.products):
            x = product(x if i == 0 else self.act(x))
        return x if spec.divisor == 1.0 else x / spec.divisor

    def _standardised(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.standard is None else (x - self.standard[0]) * self.standard[1]

    def destinations(self, prefix: str) -> dict[str, Target]:
        spec = self.spec
        found: dict[str, Target] = {}
        if self.norm is not None and spec.norm_stored:
            found = self.norm.destinations(f"{prefix}{spec.norm}.")
        if spec.standard is not None and self.standard is not None:
            found |= {name: Target(row) for name, row in zip(spec.standard, self.standard.unbind(), strict=True)}
        for product in self.products:
            assert isinstance(product, Linear)
            if spec.transposed:
                found[f"{prefix}{spec.products[0]}"] = Target(product.weight.T)
            else:
                found |= product.destinations(prefix)
        return found | ({} if self.first is None else self.first.destinations(prefix))

    def finalize(self) -> None:
        """Called once, when the weights are in place and before the products are packed."""
        if self.first is not None:  # its columns: channel by channel -> patch by patch
            weight = self.first.weight
            weight.copy_(weight.view(len(weight), self._hidden, self._square).transpose(1, 2).flatten(1).clone())


class VisionBlock(nn.Module):
    """A block: x += attend(norm(x)); x += ffn(norm(x))."""

    def __init__(self, spec: VisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, names = spec.hidden_size, spec.names
        parts, out = names.attention
        self.spec = spec
        rows = {name: 3 * hidden // len(parts) for name in parts}
        self.qkv = Linear(hidden, rows, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.out = Linear(hidden, {out: hidden}, bias=spec.out_bias, dtype=dtype, device=device)
        self.ffn = MLP(spec.mlp, hidden, dtype=dtype, device=device)
        self.norm_1, self.norm_2 = (spec.norm.make(hidden, dtype=dtype, device=device) for _ in range(2))
        self.scales: list[torch.Tensor] | None = None
        if names.scales is not None:
            self.scales = [torch.empty(hidden, dtype=dtype, device=device) for _ in range(2)]

    def forward(
        self, x: torch.Tensor, starts: torch.Tensor, longest: int, positions: torch.Tensor, table: torch.Tensor | None
    ) -> None:
        """x [N, C], overwritten; ``starts``: int32, of the segments that attend to themselves, of up to ``longest`` patches;
        ``table``: f32 [N, D] rotations, at int32 ``positions``; None: none."""
        heads = self.spec.num_heads
        qkv = self.qkv.forward(self.norm_1.forward(x))
        if table is not None:
            dense_rope(qkv, positions, table, None, None, 0.0, heads, heads)
        mixed = dense_attention(qkv, starts, None, heads, heads, self.spec.head_dim**-0.5, -1, 0.0, longest)
        x += self.out.forward(mixed)
        ffn = self.ffn
        x += ffn.down.forward(ffn.act(ffn.gate_up.forward(self.norm_2.forward(x))))

    def destinations(self, prefix: str) -> dict[str, Target]:
        names = self.spec.names
        found = self.qkv.destinations(prefix) | self.out.destinations(prefix)
        found |= self.ffn.destinations(f"{prefix}{names.ffn}")
        for name, norm in zip(names.norms, (self.norm_1, self.norm_2), strict=True):
            found |= norm.destinations(f"{prefix}{name}.")
        if self.scales is not None and names.scales is not None:
            found |= {f"{prefix}{name}": Target(scale) for name, scale in zip(names.scales, self.scales, strict=True)}
        return found

    def finalize(self) -> None:
        """Called once, when the weights are in place and before the products are packed."""
        if self.scales is not None:
            for product, scale in zip((self.out, self.ffn.down), self.scales, strict=True):
                product.weight.mul_(scale[:, None])
                if product.bias is not None:
                    product.bias.mul_(scale)
            self.scales = None


class VisionTower(nn.Module):
    """See ``VisionSpec``. Its weights are uninitialised until ``finalize``."""

    def __init__(self, spec: VisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        hidden, names = spec.hidden_size, spec.names

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        frames = (spec.frames,) if spec.frames > 1 else ()
        shape = (spec.patch_values,) if spec.pixels_last else (spec.channels, *frames, spec.patch, spec.patch)
        self.stored_patch = made(hidden, *shape)
        self.patch_weight: torch.Tensor | None = None
        self.frames_weight: torch.Tensor | None = None
        self.patch_bias = made(hidden) if spec.patch_bias else None
        self.cls = made(hidden) if names.cls else None
        entries = (2, spec.positions) if spec.by_axis else (spec.positions**2 + bool(names.cls),)
        self.position = made(*entries, hidden) if spec.positions else None
        self.before = spec.norm.make(hidden, dtype=dtype, device=device) if names.before else None
        self.after = spec.norm.make(hidden, dtype=dtype, device=device) if spec.last_norm and names.after else None
        block = VisionBlock if names.behind is None else SandwichBlock
        self._blocks = [block(spec, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        self.blocks = nn.ModuleList(self._blocks)
        self.projector = Projector(spec.projector, hidden, spec.group, dtype=dtype, device=device)
        self.deepstack = nn.ModuleList(
            Projector(each, hidden, spec.group, dtype=dtype, device=device) for _, _, each in spec.deepstack
        )
        self._deepstack_of = {layer: number for number, (layer, _, _) in enumerate(spec.deepstack)}
        frequencies = _frequencies(spec)
        self._frequencies = None if frequencies is None else frequencies.to(device)

    def open(
        self, buffers: PassBuffers, shape: PassShape, patches: torch.Tensor, ints: torch.Tensor, layout: Layout
    ) -> None:
        """One picture's pass begins.

        Args:
            shape: one that holds the picture.
            patches: f32 [N, P], normalised, each (channel, row, column); of a video's part [N, frames * P].
            ints: int32, ``layout.ints`` on the device.
        """
        spec, grid, group = self.spec, layout.grid, self.spec.group
        tile, num_patches = grid.height * grid.width, grid.patches
        row, column, place, rest = ints.split([tile, tile, tile, len(ints) - 3 * tile])
        weight = self.patch_weight if layout.frames == 1 else self.frames_weight
        assert weight is not None
        x = F.linear(patches.to(self.dtype), weight, self.patch_bias)
        if self.position is not None:
            x = x.view(grid.tiles, tile, -1) + self._positions(place, row, column, grid.height, grid.width)
            x = x.view(num_patches, -1)
        table = self._table(row, column, grid.tiles)
        if spec.window:
            assert buffers.windows is not None and buffers.inverse is not None
            merged = tile // group**2
            order, inverse, windows, rest = rest.split(
                [merged, merged, layout.num_windows + 1, len(rest) - 2 * merged - layout.num_windows - 1]
            )
            assert grid.tiles == 1, "windows are of pictures of one tile"
            x, table = _in_order(x, order, group), None if table is None else _in_order(table, order, group)
            _fill(buffers.windows[: shape.windows + 1], windows, num_patches)
            buffers.inverse[:merged].copy_(inverse)
        segment = tile
        if self.cls is not None:
            x, segment = self._with_cls(x, grid.tiles), tile + 1
        if self.before is not None:
            x = self.before.forward(x)
        buffers.x[: len(x)].copy_(x)
        buffers.x[len(x) : shape.units].zero_()
        if table is not None:
            assert buffers.table is not None
            buffers.table[: len(table)].copy_(table)
        _fill(
            buffers.starts[: shape.tiles + 1],
            rest if segment == tile else buffers.numbers[: grid.tiles + 1] * segment,
            len(x),
        )

    def run_block(self, number: int, buffers: PassBuffers, shape: PassShape) -> None:
        """The pass goes through a block; the same work, whatever picture of ``shape`` it is."""
        block, units = self._blocks[number], shape.units
        x, numbers = buffers.x[:units], buffers.numbers[:units]
        table = None if buffers.table is None else buffers.table[:units]
        if buffers.windows is not None and number not in self.spec.full_layers:
            block.forward(x, buffers.windows[: shape.windows + 1], shape.longest_window, numbers, table)
        else:
            block.forward(x, buffers.starts[: shape.tiles + 1], shape.tile, numbers, table)
        nth = self._deepstack_of.get(number)
        if nth is not None:
            assert buffers.deep is not None
            found = self.deepstack[nth](x)
            buffers.deep[nth, : len(found)].copy_(found)

    def close(self, buffers: PassBuffers, layout: Layout) -> torch.Tensor:
        """The rows of a pass that has gone through all blocks: [M, width] in the model's dtype; behind the decoder's row those
        for its first layers, where there are such."""
        spec, grid, num_patches = self.spec, layout.grid, layout.grid.patches
        merged = num_patches // spec.group**2
        x = buffers.x[: exact_shape(layout, has_first=self.cls is not None).units]
        if self.after is not None:
            x = self.after.forward(x)
        if self.cls is not None:
            x = x.view(grid.tiles, -1, spec.hidden_size)[:, 1:].reshape(num_patches, -1)
        found = self.projector.forward(x)
        if buffers.deep is not None:
            found = torch.cat([found, *buffers.deep[:, :merged].unbind()], dim=1)
        return found if buffers.inverse is None else found.index_select(0, buffers.inverse[:merged])

    def _positions(
        self, place: torch.Tensor, row: torch.Tensor, column: torch.Tensor, height: int, width: int
    ) -> torch.Tensor:
        """[n, C] of a tile's patches."""
        assert self.position is not None
        side = self.spec.positions
        if self.spec.by_axis:
            columns, rows = (each.clamp(max=side - 1) for each in (column, row))
            return self.position[0].index_select(0, columns) + self.position[1].index_select(0, rows)
        table = self.position[1:] if self.cls is not None else self.position
        if not self.spec.interpolates:
            return table.index_select(0, place)
        y, x = (each.float() * ((side - 1) / max(count - 1, 1)) for each, count in ((row, height), (column, width)))
        top, left = y.floor(), x.floor()
        down, right = (y - top)[:, None], (x - left)[:, None]
        found = torch.zeros(len(row), self.spec.hidden_size, dtype=torch.float32, device=row.device)
        for dy, vertical in ((0, 1 - down), (1, down)):
            for dx, horizontal in ((0, 1 - right), (1, right)):
                index = (top + dy).clamp(max=side - 1) * side + (left + dx).clamp(max=side - 1)
                found += table.index_select(0, index.int()).float() * vertical * horizontal
        return found.to(self.dtype)

    def _table(self, row: torch.Tensor, column: torch.Tensor, tiles: int) -> torch.Tensor | None:
        """f32 [N, D]: cosines and sines of each patch's rotation."""
        if self._frequencies is None:
            return None
        both = torch.stack([row, column], dim=1).float()  # [n, 2]
        angles = (both[:, :, None] * self._frequencies).flatten(1)
        return torch.cat([angles.cos(), angles.sin()], dim=1).repeat(tiles, 1)

    def _with_cls(self, x: torch.Tensor, tiles: int) -> torch.Tensor:
        """Each tile with its first vector."""
        assert self.cls is not None
        first = self.cls if self.position is None else self.cls + self.position[0]
        return torch.cat([first.expand(tiles, 1, -1), x.view(tiles, -1, x.shape[1])], dim=1).flatten(0, 1)

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        spec, names = self.spec, self.spec.names
        prefix = spec.prefix
        found: dict[str, Target] = {f"{prefix}{names.patch}.weight": Target(self.stored_patch)}
        if self.patch_bias is not None:
            found[f"{prefix}{names.patch}.bias"] = Target(self.patch_bias)
        if self.cls is not None:
            found[f"{prefix}{names.cls}"] = Target(self.cls[None, None] if names.batched else self.cls)
        if self.position is not None:
            found[f"{prefix}{names.position}"] = Target(self.position[None] if names.batched else self.position)
        norms: tuple[tuple[str, Norm | None], ...] = ((names.before, self.before), (names.after, self.after))
        for name, norm in norms:
            if norm is not None:
                found |= norm.destinations(f"{prefix}{name}.")
        for i, block in enumerate(self._blocks):
            found |= block.destinations(f"{prefix}{names.layers}.{i}.")
        found |= self.projector.destinations(spec.projector_prefix)
        for (_, own, _), projector in zip(spec.deepstack, self.deepstack, strict=True):
            assert isinstance(projector, Projector)
            found |= projector.destinations(own)
        return found

    def unused(self) -> tuple[str, ...]:
        """Beginnings of names of the checkpoint that are not needed."""
        spec, names = self.spec, self.spec.names
        layers = range(spec.num_layers, spec.stored_layers)
        after = (f"{spec.prefix}{names.after}.",) if names.after and self.after is None else ()
        trained = (f"{spec.prefix}head.", f"{spec.prefix}embeddings.mask_token")
        return (*(f"{spec.prefix}{names.layers}.{i}." for i in layers), *after, *trained)

    def finalize(self) -> None:
        """Called once, when the weights are in place, ahead of ``Linear.finalize``."""
        spec, stored = self.spec, self.stored_patch.data
        if spec.pixels_last:
            stored = stored.view(-1, spec.patch, spec.patch, spec.channels).permute(0, 3, 1, 2)
        if spec.frames > 1:
            self.frames_weight = stored.transpose(1, 2).flatten(1)
        self.patch_weight = (stored.float().sum(2).to(stored.dtype) if spec.frames > 1 else stored).flatten(1)
        del self.stored_patch
        for block in self._blocks:
            if isinstance(block, VisionBlock):
                block.finalize()
        for projector in (self.projector, *self.deepstack):
            assert isinstance(projector, Projector)
            projector.finalize()


def _frequencies(spec: VisionSpec) -> torch.Tensor | None:
    """f32 [2, D / 4] of rows and columns."""
    if spec.rotation is None:
        return None
    size, theta = spec.head_dim, spec.rotation.theta
    if spec.rotation.alternating:
        both = 1.0 / torch.pow(theta, torch.arange(0, size, 2, dtype=torch.float32) / size)
        return torch.stack([both[::2], both[1::2]])
    half = 1.0 / torch.pow(theta, torch.arange(0, size // 2, 2, dtype=torch.float32) / (size // 2))
    return torch.stack([half, half])


def _fill(buffer: torch.Tensor, starts: torch.Tensor, total: int) -> None:
    """``starts`` into the longer ``buffer``; what there are more of are empty, behind ``total`` units."""
    buffer[: len(starts)].copy_(starts)
    buffer[len(starts) :].fill_(total)


def _in_order(x: torch.Tensor, order: torch.Tensor, group: int) -> torch.Tensor:
    """[N, C] with its squares of patches in ``order``, int32 [M]."""
    return x.view(len(order), group * group, -1).index_select(0, order).view(len(x), -1)
