"""From a checkpoint to a model on the device: allocate once, stream tensors into place, check that nothing is amiss.

The peak of host memory is one tensor; the peak of device memory is the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from headway.core.errors import OutOfMemoryError, WeightsError
from headway.models.config import DecoderConfig, decoder_config
from headway.models.decoder import DecoderModel
from headway.models.registry import model_class
from headway.weights import Checkpoint
from headway.weights.progress import progress_bar

DUMMY_STD = 0.02
"""Standard deviation of dummy weights: small enough that activations stay finite through any depth."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LISTED = 8


def load_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, max_model_len: int, progress: bool, seed: int
) -> DecoderModel:
    """Build the model a checkpoint describes, with its weights on ``device`` in ``dtype``.

    Args:
        checkpoint: where configuration and tensors come from.
        max_model_len: positions the rotary table covers.
        progress: show a bar on stderr if that is a terminal.
        seed: of the random weights when the checkpoint is a dummy.

    Raises:
        UnsupportedModelError: the configuration asks for something not implemented; raised before any allocation.
        OutOfMemoryError: the weights do not fit the device.
        WeightsError: tensors are missing, unexpected, repeated or of the wrong shape or kind.
    """
    config = decoder_config(checkpoint.config)
    model = _allocate(config, dtype, device, max_model_len)
    if checkpoint.is_dummy:
        _fill_randomly(model, seed)
    else:
        _fill(model, _with_progress(checkpoint, show=progress))
    model.finalize()
    return model.eval()


def parameter_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes the weights take on the device."""
    model = model_class(config.architecture)(config, dtype=dtype, device=torch.device("meta"), max_model_len=1)
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


def _allocate(config: DecoderConfig, dtype: torch.dtype, device: torch.device, max_model_len: int) -> DecoderModel:
    try:
        return model_class(config.architecture)(config, dtype=dtype, device=device, max_model_len=max_model_len)
    except torch.OutOfMemoryError as error:
        need = parameter_bytes(config, dtype) / 2**30
        raise OutOfMemoryError(
            f"the weights need {need:.2f} GiB as {dtype} and do not fit {device}; use a smaller model or dtype"
        ) from error


@torch.no_grad()
def _fill(model: DecoderModel, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy every tensor into the rows it belongs to; complain about all names at once at the end."""
    destinations = model.destinations()
    waiting = set(destinations)
    unexpected: list[str] = []
    for name, tensor in tensors:
        destination = destinations.get(name)
        if destination is None:
            if not _ignorable(name, model.config):
                unexpected.append(name)
            continue
        if name not in waiting:
            raise WeightsError(f"tensor {name} is in the checkpoint twice")
        if tensor.shape != destination.shape:
            raise WeightsError(
                f"tensor {name} has shape {list(tensor.shape)}; config.json implies {list(destination.shape)}"
            )
        if tensor.dtype not in _FLOATS:
            raise WeightsError(f"tensor {name} has type {tensor.dtype}; only unquantised floating point can be loaded")
        destination.copy_(tensor)
        waiting.discard(name)
    complaints = [
        f"{_listed(names)} {what}" for names, what in ((unexpected, "not expected"), (waiting, "missing")) if names
    ]
    if complaints:
        raise WeightsError(f"the checkpoint does not fit {model.config.architecture}: {'; '.join(complaints)}")


def _ignorable(name: str, config: DecoderConfig) -> bool:
    """Tensors that old exporters wrote and that are computed, or shared, here."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


@torch.no_grad()
def _fill_randomly(model: DecoderModel, seed: int) -> None:
    """Normal weights, unit norms; made on the device, the same for the same seed and kind of device."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, destination in model.destinations().items():
        if name.endswith("norm.weight"):
            destination.fill_(1.0)
        else:
            destination.normal_(0.0, DUMMY_STD, generator=generator)


def _with_progress(checkpoint: Checkpoint, *, show: bool) -> Iterator[tuple[str, torch.Tensor]]:
    with progress_bar(checkpoint.num_bytes, "loading weights", show=show, unit="B") as advance:
        for name, tensor in checkpoint.tensors():
            yield name, tensor
            advance(tensor.numel() * tensor.itemsize)
