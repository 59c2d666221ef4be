"""``headway env``: what this machine has, and what works on it."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex

import typer

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "gguf", "msgspec", "pyzmq", "transformers")


def env() -> None:
    """Show versions and devices, for bug reports."""
    for name, value in facts().items():
        typer.echo(f"{name + ':':<20} {value}")


def facts() -> dict[str, str]:
    """Label -> finding, in the order to show them."""
    from headway import __version__

    found = {"headway": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | _devices() | _compiler()


def _devices() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = f"torch is built for CUDA {built} but sees no GPU" if built else "a CPU build of torch"
        return {
            "device": f"cpu, {torch.get_num_threads()} threads ({reason})",
            "pinned memory": "no: there is no device to copy to",
            "run-ahead": "no: the CPU runs each step as it is launched",
            "CUDA graphs": "no",
        }
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    cards = "; ".join(
        f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}" for card in names
    )
    try:
        pinned = "yes" if torch.empty(1).pin_memory().is_pinned() else "no"
    except RuntimeError as error:
        pinned = f"no: {str(error).splitlines()[0]}"
    return {
        "device": f"cuda {torch.version.cuda}: {cards}",
        "pinned memory": pinned if pinned == "yes" else f"{pinned} (copies to the device will block)",
        "run-ahead": "yes",
        "CUDA graphs": "yes",
    }


def _compiler() -> dict[str, str]:
    from headway.kernels.cpu import loader

    try:
        compiler = shlex.join(loader.find_compiler())
    except RuntimeError as error:
        compiler = f"none: {error}"
    native = "yes" if loader.library() is not None else "no: torch's operations are used on CPU"
    return {"C compiler": compiler, "native CPU kernels": native}
