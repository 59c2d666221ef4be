"""``headway tune``: measures the linear layers of a model on this machine's card."""

from __future__ import annotations

import time
from typing import Annotated

import typer

DEFAULT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def tune(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file, hub name, or the built-in smollm2.")],
    rows: Annotated[list[int] | None, typer.Option("--rows", help="Numbers of decoding rows; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for all of it, compilation included.")] = 300.0,
    most: Annotated[int, typer.Option(help="Tiles of an operation that are tried for a number of rows.")] = 12,
) -> None:
    """Measure which kernels suit a model on this GPU. The fastest ones of its linear layers are kept for later starts."""
    import torch

    from headway.core.errors import ConfigError
    from headway.kernels.hopper import runs_gluon
    from headway.models.load import products
    from headway.weights import open_checkpoint

    config = open_checkpoint(model, load_format="dummy").config
    groups = products(config)
    if not groups:
        raise ConfigError("headway tune: no linear layer of this model has more than one kernel to choose from")
    if not torch.cuda.is_available():
        raise ConfigError("headway tune measures on a GPU, and torch sees none here; without one nothing is tuned")
    device = torch.device("cuda", torch.cuda.current_device())
    if not runs_gluon(device):
        raise ConfigError(
            "headway tune chooses among kernels for Hopper GPUs; this card runs F.linear and the kernels in plain Triton, "
            "for which there is nothing to choose"
        )
    from headway.kernels.compiler_process import CompilerProcess
    from headway.kernels.linear_forms.card import card_of
    from headway.kernels.linear_forms.table import save_tuned
    from headway.kernels.linear_forms.tune import tune_groups

    compiler = CompilerProcess()
    try:
        until, all_rows = time.monotonic() + seconds, sorted(set(rows or DEFAULT_ROWS))
        with torch.inference_mode():
            found = tune_groups(config, groups, all_rows, device, compiler, most=most, until=until, say=typer.echo)
    finally:
        compiler.close()
    for line in found.failed:
        typer.echo(f"failed, not used: {line}")
    for product in found.left:
        size = list(product.size)
        typer.echo(f"not measured, no time was left: {product.junction} {size}; starts choose by the rule")
    typer.echo(f"written to {save_tuned(card_of(device), found.entries)}")
