"""Kernels by name: what people read, and which part of a step they are. Imports nothing that draws or runs."""

from __future__ import annotations

KINDS = ("attention", "products", "sampler", "rest")
ATTENTION = ("early_decode", "decode_kernel", "prefill_kernel", "short_kernel")
PRODUCTS = ("linear", "add_kernel", "gate_up", "qkv", "nvjet", "gemm", "splitK", "cutlass")
SAMPLER = ("race", "finish", "bound", "narrow", "wide_race")


def short(name: str) -> str:
    """A kernel's name without its types."""
    bare = name.removeprefix("void ").split("<")[0].split("(")[0]
    return bare.split("::")[-1][:40]


def kind_of(kernel: str) -> str:
    """One of ``KINDS`` for a name that ``short`` gave."""
    if kernel.startswith("step_unpack"):  # it unpacks decode rows
        return "rest"
    if any(part in kernel for part in ATTENTION):
        return "attention"
    if any(part in kernel for part in PRODUCTS):
        return "products"
    return "sampler" if kernel.startswith(SAMPLER) else "rest"
