"""A mixture of experts in place of a feed-forward block: a router sends each token to a few of many small ones.

``MixtureSpec`` is a feed-forward kind of ``BlockSpec`` besides ``MLPSpec``: x is the block's normalised input [T, C], and

    y = sum over the chosen experts of weight * expert(x)  (+ gate(x) * shared(x))

Which are chosen and what they weigh is ``RouterSpec``'s; ``kernels.route_experts`` and ``kernels.expert_mlp`` do the work.

Weights of all experts lie in one tensor each, expert by expert: [E, N, C] and [E, C, I]. Where ranks share a layer each has a
part of every expert's inner width, or some experts whole (``ExpertShard``). It routes with the whole router, and what the
ranks' parts give is added up. Ranks that share experts but not their tokens, replicas, gather all tokens before the experts,
and each adds up what all have made of its own, in the order of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.kernels.expert_mlp import ACTS, add_experts, expert_mlp
from headway.kernels.expert_mlp.packing import MOST_SCALE, packed
from headway.kernels.expert_mlp.tiles import is_few
from headway.kernels.route_experts import FEW_TOKENS, norm_route_experts, route_experts
from headway.models.interface import Stack, Target
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import parameter
from headway.models.layers.mlp import MLP, MLPSpec
from headway.models.layers.norm import RMSNorm
from headway.parallel.group import Group
from headway.parallel.shard import ExpertShard, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """Which experts a token goes to.

    Attributes:
        top_k: how many.
        scoring: of the router's logits: softmax over all experts, the sigmoid of each, or sparsemixer, see ``route_experts``.
        renormalise: weights of a token are divided by their sum. A softmax over the chosen experts alone is this, too.
        scale: of the weights, behind that.
        bias: whether the router's product has one.
        groups: (how many groups experts form, how many of them may be chosen from, how many of a group's best scores are
            summed to tell which): DeepSeek's limit; None: there are no groups.
        name: of the product in the checkpoint.
        correction: of what is added to the scores where experts are chosen; "": nothing is.
        margin: of sparsemixer.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    bias: bool = False
    groups: tuple[int, int, int] | None = None
    name: str = "gate"
    correction: str = ""
    margin: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """What experts are called in the checkpoint.

    Attributes:
        each: of one expert's module; ``{}`` is its number.
        products: in it, those in, and the one out.
        stacks: names, with their endings, of tensors that hold the products in, and the one out, of all experts, which
            exporters may write instead. "": there is none.
        stacked_biases: the same of biases.
        transposed: matrices in stacks are [inputs, outputs].
        interleaved: rows of gate and up alternate in stacks.
    """

    each: str = "experts.{}"
    products: tuple[tuple[str, ...], str] = (("gate_proj", "up_proj"), "down_proj")
    stacks: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    stacked_biases: tuple[str, str] = ("", "")
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSpec:
    """A mixture of experts.

    Attributes:
        num_experts: E.
        size: I, the inner width of an expert.
        router: which experts a token goes to.
        activation: one of ``ACTIVATIONS``' values, or clamped_swiglu.
        gated: as in ``MLPSpec``.
        bias: of the experts' products.
        limit, alpha: of clamped_swiglu, see ``expert_mlp``.
        fp4: the experts' matrices are in MXFP4, in the checkpoint and in memory: stacks of blocks, and of scales.
        weigh_inputs: weights are those of what goes into the experts, not of what comes out.
        shared: a feed-forward block that every token passes besides; its result is added.
        shared_name: of its module in the checkpoint.
        shared_gate: of a product with one output whose sigmoid weighs the shared block; "": it has none.
        zero_experts: of so many further experts, which the router knows behind the others, each gives what goes in.
        latent: width of what the experts read and give, between a product before them and one behind; 0: C, without these.
        latent_names, latent_bias: of these products.
        names: of the experts in the checkpoint.
        shard: this part of it is here; None: all.
    """

    num_experts: int
    size: int
    router: RouterSpec
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    limit: float = 0.0
    alpha: float = 1.0
    fp4: bool = False
    weigh_inputs: bool = False
    shared: MLPSpec | None = None
    shared_name: str = "shared_expert"
    shared_gate: str = ""
    zero_experts: int = 0
    latent: int = 0
    latent_names: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    latent_bias: bool = False
    names: ExpertNames = ExpertNames()
    shard: ExpertShard | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTS:
            raise UnsupportedModelError(
                f"config.json: {self.activation!r} (hidden_act, or hidden_activation) is not implemented in mixtures"
            )

    def sharded(self, group: Group, peers: Group, *, whole: bool) -> MixtureSpec:
        """What this rank has of it; see ``ExpertShard``. Blocks of 4-bit floats are not cut: such experts are dealt out whole.

        Raises:
            UnsupportedModelError: there are fewer experts than ranks, or some that only hand on what goes in.
        """
        if group.size == peers.size == 1:
            return self
        if self.zero_experts:
            if whole or peers.size > 1:
                raise UnsupportedModelError(
                    "experts that return their input unchanged cannot be dealt out over ranks; leave out enable_expert_parallel"
                )
            return self  # whole on every rank
        shard = ExpertShard(group, self.num_experts, self.size, whole or self.fp4 or peers.size > 1, peers)
        if shard.whole and group.size * peers.size > self.num_experts:
            raise UnsupportedModelError(
                f"{self.num_experts} experts cannot be dealt out over {group.size * peers.size} ranks; take fewer ranks"
            )
        shared = self.shared.sharded(group) if self.shared is not None and group.size > 1 else self.shared
        return replace(self, shared=shared, shard=shard)

    def make(self, hidden: int, *, dtype: torch.dtype, device: torch.device) -> Mixture:
        """The module, for hidden states of size ``hidden``."""
        return Mixture(self, hidden, dtype=dtype, device=device)


MOST_SHARED = 256
"""Tokens up to which shared blocks run among the experts. Of more, plain products should be faster; estimated, not measured."""


def shared_experts(spec: MixtureSpec, device: torch.device) -> int:
    """As how many experts that every token goes to the shared block lies on ``device``; 0: as a block of its own.

    As experts it has no launches of its own, which on a GPU are the most of it in a step of few tokens.
    """
    shared = spec.shared
    if device.type != "cuda" or shared is None or spec.shared_gate or spec.shard is not None or spec.fp4 or spec.latent:
        return 0
    alike = shared.activation == spec.activation and shared.gated == spec.gated and shared.multipliers == (1.0, 1.0)
    biased = spec.bias or shared.bias or bool(shared.down_bias)
    others = spec.weigh_inputs or spec.zero_experts or shared.shard is not None
    return 0 if biased or others or not alike or shared.size % spec.size else shared.size // spec.size


class Mixture(nn.Module):
    """A mixture of ``spec``, for hidden states of size C.

    Attributes:
        router: [E, C]; router_bias: [E] or None; E with ``spec.zero_experts``, here and in the next line.
        correction: f32 [E] or None.
        experts: those that are here, of which are the next; I is their inner width here.
        always: so many experts lie behind the others: what ``shared_experts`` says, and 0 if the shared block stays.
        gate_up: [E, N, C'], N = 2 I, or I where not gated; C' is C, or ``spec.latent``; gate_up_bias: [E, N] or None.
        down: [E, C', I]; down_bias: [E, C'] or None.
        gate_up_scales, down_scales: with ``spec.fp4``, see ``expert_mlp``; the matrices are uint8 then. Else None.
        latent_in, latent_out: products before the experts and behind them, or None.
        shared: the block that every token passes; None once it is experts.
    """

    def __init__(self, spec: MixtureSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        shard = spec.shard
        self.experts = range(spec.num_experts) if shard is None else shard.experts
        part = None if shard is None else shard.part
        size = spec.size if part is None else len(part.own)
        self.always = shared_experts(spec, device)
        experts, inner = len(self.experts) + self.always, size * (2 if spec.gated else 1)

        def made(*shape: int, there: bool = True, kind: torch.dtype = dtype) -> nn.Parameter | None:
            return parameter(*shape, dtype=kind, device=device) if there else None

        known = spec.num_experts + spec.zero_experts
        self.router = parameter(known, hidden, dtype=dtype, device=device)
        self.router_bias = made(known, there=spec.router.bias)
        self.correction = made(known, there=bool(spec.router.correction), kind=torch.float32)
        width = spec.latent or hidden
        kind, share = (torch.uint8, 2) if spec.fp4 else (dtype, 1)
        self.gate_up = parameter(experts, inner, width // share, dtype=kind, device=device)
        self.gate_up_scales = made(experts, inner, width // 32, there=spec.fp4, kind=torch.uint8)
        self.gate_up_bias = made(experts, inner, there=spec.bias)
        self.down = parameter(experts, width, size // share, dtype=kind, device=device)
        self.down_scales = made(experts, width, size // 32, there=spec.fp4, kind=torch.uint8)
        self.down_bias = made(experts, width, there=spec.bias)
        self.latent_in = self.latent_out = None
        if spec.latent:
            bias, (name_in, name_out) = spec.latent_bias, spec.latent_names
            self.latent_in = Linear(hidden, {name_in: width}, bias=bias, dtype=dtype, device=device)
            self.latent_out = Linear(width, {name_out: hidden}, bias=bias, dtype=dtype, device=device)
        self.shared = None if spec.shared is None else spec.shared.make(hidden, dtype=dtype, device=device)
        self.shared_gate = None
        if spec.shared_gate:
            self.shared_gate = Linear(hidden, {spec.shared_gate: 1}, bias=False, dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, live: torch.Tensor, most: int = 0, routed_by: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, C] -> [T, C]; arguments as of ``partial``."""
        y, group = self.partial(x, live, most, routed_by)
        return y if group is None else group.all_reduce(y)

    def partial(
        self, x: torch.Tensor, live: torch.Tensor, most: int = 0, routed_by: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Group | None]:
        """[T, C] -> [T, C], and the ranks over which that is to be added up; None: it is the whole.

        Args:
            live: int32 [T], negative for tokens that go to no expert.
            most: tokens that any of the replicas that share the experts may have, the same on all; 0: as many as here.
            routed_by: [T, C], what the router reads in place of x.
        """
        shard = self.spec.shard
        if shard is None or shard.peers.size == 1:
            y = self._experts(x, live, routed_by)
        else:
            y = self._of_all(x, live, most or len(x), shard.peers, routed_by)
        if self.shared is not None:  # of both parts one sum
            y += self._shared(self.shared, x)
        elif self.always and len(x) > MOST_SHARED:
            self._add_always(y, x)
        return y, None if shard is None or shard.group.size == 1 else shard.group

    def _of_all(
        self, x: torch.Tensor, live: torch.Tensor, most: int, peers: Group, routed_by: torch.Tensor | None
    ) -> torch.Tensor:
        """Gather the tokens of all replicas, at most ``most`` each, and take back what all ranks' experts make of ours."""
        tokens, width = x.shape
        assert tokens <= most, f"{tokens} tokens in a step of {most}"
        if tokens < most:
            x = torch.cat([x, x.new_zeros(most - tokens, width)])
            routed_by = None if routed_by is None else torch.cat([routed_by, x.new_zeros(most - tokens, width)])
            live = torch.cat([live, live.new_full((most - tokens,), -1)])
        read = None if routed_by is None else peers.all_gather(routed_by).flatten(0, 1)
        y = self._experts(peers.all_gather(x).flatten(0, 1), peers.all_gather(live).flatten(), read)
        return peers.scatter_sum(y.unflatten(0, (peers.size, most)))[:tokens]

    def _experts(self, x: torch.Tensor, live: torch.Tensor, routed_by: torch.Tensor | None = None) -> torch.Tensor:
        """What the experts that are here make of x."""
        spec, router = self.spec, self.spec.router
        groups = router.groups or (1, 1, 1)
        gate_up: torch.Tensor = self.gate_up
        down: torch.Tensor = self.down
        always = self.always
        if always and len(x) > MOST_SHARED:
            gate_up, down, always = gate_up[: len(self.experts)], down[: len(self.experts)], 0
        ids, weights = route_experts(
            x if routed_by is None else routed_by,
            self.router, self.router_bias, self.correction, live, router.top_k, router.scoring, router.renormalise,
            router.scale, *groups, router.margin, always,
        )  # fmt: skip
        if self.experts.start:
            ids = ids - self.experts.start
        inputs = x if self.latent_in is None else self.latent_in.forward(x)
        y = expert_mlp(
            inputs, ids, weights, gate_up, self.gate_up_bias, self.gate_up_scales, down, self.down_bias, self.down_scales,
            spec.activation, spec.gated, spec.limit, spec.alpha, spec.weigh_inputs,
        )  # fmt: skip
        if spec.zero_experts:  # numbers behind the experts' are none of ``expert_mlp``'s
            y += x * weights.masked_fill(ids < spec.num_experts, 0.0).sum(1, keepdim=True).to(x.dtype)
        return cast(torch.Tensor, y if self.latent_out is None else self.latent_out.forward(y))

    @property
    def few_tokens(self) -> int:
        """Tokens up to which ``add`` can stand in for ``forward``; 0: never."""
        spec, here = self.spec, len(self.gate_up)
        parts = self.shared is not None or spec.shard is not None or spec.zero_experts or spec.latent
        most, chosen = 0, spec.router.top_k + self.always
        while not parts and most < FEW_TOKENS and is_few(most + 1, chosen, here):
            most += 1
        return most

    def add(self, residual: torch.Tensor, norm: RMSNorm, live: torch.Tensor) -> None:
        """residual [T, C] += forward(norm(residual)), for ``few_tokens`` at most."""
        spec, router = self.spec, self.spec.router
        ids, weights, x = norm_route_experts(
            residual, norm.weight, norm.eps, self.router, self.router_bias, self.correction, live, router.top_k, router.scoring,
            router.renormalise, router.scale, *(router.groups or (1, 1, 1)), router.margin, self.always,
        )  # fmt: skip
        add_experts(
            x, ids, weights, self.gate_up, self.gate_up_bias, self.gate_up_scales, self.down, self.down_bias, self.down_scales,
            spec.activation, spec.gated, spec.limit, spec.alpha, spec.weigh_inputs, residual,
        )  # fmt: skip

    def _shared(self, shared: MLP, x: torch.Tensor) -> torch.Tensor:
        y = shared.down.partial(shared.act(shared.gate_up.forward(x)))
        return y if self.shared_gate is None else y.mul_(torch.sigmoid(self.shared_gate.forward(x)))

    def finalize(self) -> None:
        """Called once, after loading: bytes that hold elements 2 i and 2 i + 1 become ``expert_mlp``'s words. Of biases that
        all parts of a sum have one adds its own.

        Raises:
            WeightsError: the kernels cannot hold a block's scale.
        """
        shard = self.spec.shard
        if shard is not None and shard.part is not None and shard.group.rank and self.down_bias is not None:
            self.down_bias.zero_()
        out = self.latent_out
        if shard is not None and out is not None and out.bias is not None and (shard.group.rank or shard.peers.rank):
            out.bias.zero_()
        if self.always:
            self._share()
        if self.spec.fp4:
            for weight, scales in ((self.gate_up, self.gate_up_scales), (self.down, self.down_scales)):
                most = 0 if scales is None or scales.is_meta else int(scales.max())  # host: once, at loading
                if most > MOST_SCALE:
                    raise WeightsError(
                        f"an expert has a block of MXFP4 with the scale {most}; {MOST_SCALE} is the most"
                    )
                for expert in weight:
                    expert.copy_(packed(torch.stack((expert & 15, expert >> 4), dim=-1).flatten(-2)))

    def _share(self) -> None:
        """The shared block becomes experts: each has some of its inner width."""
        shared, count = cast(MLP, self.shared), len(self.experts)
        ins, out = shared.gate_up.dense, shared.down.dense
        if ins is None or out is None:  # its weights lie in another form
            self.always = 0
            self.gate_up, self.down = (
                nn.Parameter(each[:count].clone(), requires_grad=False) for each in (self.gate_up, self.down)
            )
            return
        halves = 2 if self.spec.gated else 1
        parts = ins.unflatten(0, (halves, self.always, -1)).transpose(0, 1)  # [experts, gate and up, I, C]
        self.gate_up[count:].copy_(parts.flatten(1, 2))
        self.down[count:].copy_(out.unflatten(1, (self.always, -1)).transpose(0, 1))
        self._act, self.shared = shared.act, None

    def _add_always(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add what the experts that every token goes to make of x, in products of all tokens."""
        count = len(self.experts)
        both = F.linear(x, self.gate_up[count:].flatten(0, 1)).flatten()
        inner = self._act(both.view(-1, self.gate_up.shape[1])).view(len(x), self.always, -1)
        for nth in range(self.always):
            y.addmm_(inner[:, nth], self.down[count + nth].T)

    @property
    def token_weights(self) -> int:
        """Weights that a token meets."""
        experts = sum(each.numel() * (2 if each.dtype == torch.uint8 else 1) for each in (self.gate_up, self.down))
        others = [each for each in (self.shared, self.shared_gate, self.latent_in, self.latent_out) if each is not None]
        rest = sum(parameter.numel() for each in others for parameter in each.parameters()) + self.router.numel()
        return experts * self.spec.router.top_k // max(len(self.gate_up), 1) + rest

    def destinations(self, prefix: str) -> dict[str, Target]:
        """Checkpoint tensor name, beginning with prefix -> where it goes; experts one by one."""
        spec = self.spec
        found = {f"{prefix}{spec.router.name}.weight": Target(self.router)}
        if self.router_bias is not None:
            found[f"{prefix}{spec.router.name}.bias"] = Target(self.router_bias)
        if self.correction is not None:
            found[f"{prefix}{spec.router.correction}"] = Target(self.correction)
        matrices = (
            (self.gate_up, self.gate_up_bias, self.gate_up_scales), (self.down, self.down_bias, self.down_scales)
        )  # fmt: skip
        part = None if spec.shard is None else spec.shard.part
        for out, ((weight, bias, scales), names) in enumerate(zip(matrices, self._names(prefix), strict=True)):
            whole = {"weight": weight, "bias": bias}
            if scales is not None:
                whole = {"blocks": weight.unflatten(2, (-1, 16)), "scales": scales, "bias": bias}
            for ending, tensor in whole.items():
                for at, expert in enumerate(self.experts if tensor is not None else ()):
                    slices = zip(names[expert], cast(torch.Tensor, tensor)[at].chunk(len(names[expert])), strict=True)
                    found |= {
                        f"{name}.{ending}": _target(own, part, out, len(names[expert]), spec) for name, own in slices
                    }
        if self.shared is not None:
            found |= self.shared.destinations(f"{prefix}{spec.shared_name}.")
        for product in (self.shared_gate, self.latent_in, self.latent_out):
            if product is not None:
                found |= product.destinations(prefix)
        return found

    def stacks(self, prefix: str) -> dict[str, Stack]:
        """Names of tensors, beginning with prefix, that hold all experts' -> which of ``destinations`` they are."""
        own, found = self.spec.names, {}
        for weights, biases, names in zip(own.stacks, own.stacked_biases, self._names(prefix), strict=True):
            interleaved = own.interleaved and len(names[0]) > 1
            whole = {weights: ("weight", own.transposed), biases: ("bias", False)}
            if self.spec.fp4:
                whole = {f"{weights}_{kind}": (kind, False) for kind in ("blocks", "scales")} | {
                    biases: ("bias", False)
                }
            for at, name in enumerate(names[0]):  # and, of each product for itself, as GGUF files have them
                stacked = name.replace(own.each.format(0), own.each.removesuffix(".{}"), 1)
                found[f"{stacked}.weight"] = Stack(tuple((f"{parts[at]}.weight",) for parts in names))
            for name, (ending, transposed) in whole.items():
                if name:
                    each = tuple(tuple(f"{part}.{ending}" for part in parts) for parts in names)
                    found[f"{prefix}{name}"] = Stack(each, transposed, interleaved)
        return found

    def elsewhere(self, prefix: str) -> list[str]:
        """Beginnings of the names of experts that other ranks have."""
        each = self.spec.names.each
        return [f"{prefix}{each.format(n)}." for n in range(self.spec.num_experts) if n not in self.experts]

    def _names(self, prefix: str) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Per expert the names of its products in, and of the one out."""
        spec, (ins, out) = self.spec.names, self.spec.names.products
        modules = [f"{prefix}{spec.each.format(expert)}" for expert in range(self.spec.num_experts)]
        return [tuple(f"{own}.{name}" for name in ins) for own in modules], [(f"{own}.{out}",) for own in modules]


def _target(tensor: torch.Tensor, part: Part | None, out: int, names: int, spec: MixtureSpec) -> Target:
    """Where an expert's matrix or bias goes; ``out``: of the product out. Of those in there are ``names`` tensors."""
    if part is None:
        return Target(tensor)
    if out:
        return Target(tensor, columns=part.columns()) if tensor.dim() == 2 else Target(tensor)
    taken = part.taken(("",) * names, 2 if spec.gated else 1)
    return Target(tensor, *taken[""])
