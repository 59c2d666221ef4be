"""What ``peer_gather_`` and ``peer_scatter_sum_`` mean, over addresses of host memory."""

from __future__ import annotations

import torch

from headway.kernels.peer_reduce.reference import CHUNK, PeerCall


def peer_gather_(
    x: torch.Tensor, out: torch.Tensor, parity: torch.Tensor, buffers: torch.Tensor, rank: int, size: int, start: int
) -> None:
    call = PeerCall(x, CHUNK, parity, buffers, rank, size, start)
    units = _units(x.view(-1))
    found = call.exchanged([[own] * size for own in units])
    for source in range(size):
        for into, parts in zip(_units(out[source].view(-1)), found, strict=True):
            into.copy_(parts[source])


def peer_scatter_sum_(
    x: torch.Tensor, out: torch.Tensor, parity: torch.Tensor, buffers: torch.Tensor, rank: int, size: int, start: int
) -> None:
    call = PeerCall(out, CHUNK, parity, buffers, rank, size, start)
    of_ranks = [_units(each.view(-1)) for each in x]
    found = call.exchanged([list(unit) for unit in zip(*of_ranks, strict=True)])
    for into, parts in zip(_units(out.view(-1)), found, strict=True):
        total = torch.zeros(len(into))
        for part in parts:
            total += part.float()
        into.copy_(total)


def _units(flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[at : at + CHUNK] for at in range(0, len(flat), CHUNK)]
