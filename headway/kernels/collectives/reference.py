"""Collectives by the transport of their group: gloo on a CPU, NCCL on CUDA."""

from __future__ import annotations

import torch

from headway.kernels.registry import TRANSPORTS


def all_reduce_(x: torch.Tensor, group: int) -> None:
    TRANSPORTS[group].all_reduce(x)


def all_gather_(x: torch.Tensor, out: torch.Tensor, group: int) -> None:
    TRANSPORTS[group].all_gather(x, out)


def all_to_all_(x: torch.Tensor, out: torch.Tensor, group: int) -> None:
    TRANSPORTS[group].all_to_all(x, out)


def send_to(x: torch.Tensor, group: int, peer: int) -> None:
    TRANSPORTS[group].send(x.contiguous(), peer)


def receive_(x: torch.Tensor, group: int, peer: int) -> None:
    TRANSPORTS[group].receive(x, peer)


def post_(x: torch.Tensor, group: int, peer: int) -> None:
    TRANSPORTS[group].post(x, peer)


def finish_(x: torch.Tensor, group: int) -> None:
    TRANSPORTS[group].finish()
