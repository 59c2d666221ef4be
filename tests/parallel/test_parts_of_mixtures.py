"""A mixture cut every way in which it can be, over ranks and over replicas, gives what it gives whole: each field beside each
cut, and all that go together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headway.models.layers.mlp import MLPSpec
from headway.models.layers.moe import ExpertNames, Mixture, MixtureSpec, RouterSpec
from headway.parallel.group import Alone

HIDDEN, CPU = 24, torch.device("cpu")
ROUTER = RouterSpec(top_k=2)
SHARED = MLPSpec(size=24, activation="silu", gated=True)
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"bias": True},
    "latent": {"latent": 12},
    "latent with biases": {"latent": 12, "latent_bias": True},
    "latent and all biases": {"latent": 12, "latent_bias": True, "bias": True},
    "ungated": {"gated": False, "activation": "relu2", "names": ExpertNames(products=(("up_proj",), "down_proj"))},
    "inputs weighed": {"weigh_inputs": True, "router": RouterSpec(top_k=1, scoring="sigmoid", renormalise=False)},
    "shared": {"shared": SHARED},
    "shared behind a gate": {"shared": SHARED, "shared_gate": "shared_expert_gate"},
    "shared, latent, biases": {"shared": SHARED, "latent": 12, "latent_bias": True, "bias": True},
    "corrected and biased router": {"router": RouterSpec(top_k=3, scoring="sigmoid", correction="gate.e", bias=True)},
    "groups of experts": {"router": RouterSpec(top_k=2, scoring="sigmoid", groups=(3, 2, 1), scale=2.5)},
}
CUTS = {
    "parts of each": (2, 1, False), "three parts of each": (3, 1, False), "whole ones": (2, 1, True),
    "as many ranks as experts": (6, 1, True), "replicas": (1, 2, False), "parts of replicas": (2, 2, False),
}  # fmt: skip
"""Ranks of a layer, replicas, whether experts are dealt out whole."""


class Table:
    """Where the ranks of a group meet."""

    def __init__(self, size: int) -> None:
        self.barrier, self.laid = threading.Barrier(size, timeout=20), [torch.empty(0)] * size


@dataclass
class Seated(Alone):
    """A group of threads."""

    table: Table
    rank: int

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.table.laid)

    def _met(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.table.laid[self.rank] = x
        self.table.barrier.wait()
        found = list(self.table.laid)
        self.table.barrier.wait()
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._met(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._met(x))

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each[self.rank] for each in self._met(x)]).sum(0, dtype=torch.float32).to(x.dtype)


def at_once(works: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    found, errors = [torch.empty(0)] * len(works), list[BaseException]()

    def run(place: int) -> None:
        try:
            found[place] = works[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    if errors:
        raise errors[0]
    return found


def filled(spec: MixtureSpec, tensors: dict[str, torch.Tensor]) -> Mixture:
    """The part that ``spec`` says of a checkpoint, which grows by what it has not yet."""
    mixture, generator = spec.make(HIDDEN, dtype=torch.float32, device=CPU), torch.Generator().manual_seed(len(tensors))
    with torch.no_grad():
        for name, target in mixture.destinations("m.").items():
            if name not in tensors:
                tensors[name] = torch.empty(target.shape).normal_(0.0, 0.4, generator=generator)
            target.fill(tensors[name])
        mixture.finalize()
    return mixture


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", FIELDS)
def test_the_parts_together_are_the_whole(name: str, cut: str) -> None:
    ranks, replicas, whole_experts = CUTS[cut]
    more: dict[str, Any] = {"num_experts": 6, "size": 12, "router": ROUTER} | FIELDS[name]
    spec, tensors = MixtureSpec(**more), dict[str, torch.Tensor]()
    whole = filled(spec, tensors)
    known = set(tensors)
    rows, peers = [Table(ranks) for _ in range(replicas)], [Table(replicas) for _ in range(ranks)]
    lengths = [5, 3][:replicas]
    texts = [torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in lengths]
    lives = [torch.arange(n, dtype=torch.int32) - int(n > 3) for n in lengths]  # the first of five is padding

    def work(rank: int, replica: int) -> Callable[[], torch.Tensor]:
        group: Any = Seated(rows[replica], rank) if ranks > 1 else Alone()
        others: Any = Seated(peers[rank], replica) if replicas > 1 else Alone()
        mine = filled(spec.sharded(group, others, whole=whole_experts), tensors)
        return lambda: mine.forward(texts[replica].clone(), lives[replica], max(lengths))

    works = [work(rank, replica) for replica in range(replicas) for rank in range(ranks)]
    assert set(tensors) == known, "a part wants what the whole does not"
    found = iter(at_once(works))
    for replica in range(replicas):
        wanted = whole.forward(texts[replica].clone(), lives[replica])
        for _ in range(ranks):
            torch.testing.assert_close(next(found), wanted, atol=2e-5, rtol=2e-5)
