"""From a checkpoint to a model on the device: allocate once, stream tensors into place, check that nothing is amiss.

The peak of host memory is one tensor; the peak of device memory is the model itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from headway.core.errors import OutOfMemoryError, WeightsError
from headway.core.log import logger
from headway.kernels.linear_forms.provenance import describe as describe_forms
from headway.kernels.linear_forms.shapes import Group
from headway.kernels.quant_linear.formats import BLOCK_TYPES
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.interface import Model, ModelConfig, ModelSpec, WeightMap
from headway.models.layers.form_walk import decided, groups
from headway.models.quantized_weights import BlockKeeper, BlockUse, told
from headway.models.registry import model_class, read_config
from headway.weights import Checkpoint
from headway.weights.gguf import BlockTensor
from headway.weights.progress import progress_bar

DUMMY_STD = 0.02
"""Standard deviation of dummy weights: small enough that activations stay finite through any depth."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LISTED = 8


class Fillable(Protocol):
    """What weights go into: a model, or a layer beside it."""

    @property
    def spec(self) -> ModelSpec:
        """What it declares."""

    @property
    def device(self) -> torch.device:
        """Of its weights."""

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes."""


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: bool,
    seed: int,
    blocks: BlockUse = BlockUse.DEQUANTIZED,
    config: ModelConfig | None = None,
) -> Model:
    """Build the model a checkpoint describes, with its weights on ``device`` in ``dtype``.

    Args:
        checkpoint: where configuration and tensors come from.
        max_model_len: positions the rotary table covers.
        progress: show a bar on stderr if that is a terminal.
        seed: of the random weights when the checkpoint is a dummy.
        config: of the model, where it is not as its architecture says.
        blocks: what becomes of matrices of a GGUF file for which there are kernels (``kernels.quant_linear``).

    Raises:
        UnsupportedModelError: the configuration asks for something not implemented; raised before any allocation.
        OutOfMemoryError: the weights do not fit the device.
        WeightsError: tensors are missing, unexpected, repeated or of the wrong shape or kind.
    """
    config = config or read_config(checkpoint.config)
    model = _allocate(config, dtype, device, max_model_len)
    if checkpoint.is_dummy:
        fill_randomly(model, seed)
    else:
        keeper = None if blocks is BlockUse.DEQUANTIZED else BlockKeeper(model, exact=blocks is BlockUse.EXACT)
        fill(model, _with_progress(checkpoint, BLOCK_TYPES if keeper else (), show=progress), keeper)
        if keeper is not None:
            logger.info("%s", told(*keeper.finish(), checkpoint.quantized, exact=keeper.exact))
    model.finalize()
    tiles = describe_forms(partial(decided, model.forms), device) if isinstance(model, DecoderModel) else ""
    if tiles:
        logger.info("%s", tiles)
    return model.eval()


def admitting(config: ModelConfig, longest: int) -> ModelConfig:
    """The model of an engine whose longest sequence has so many tokens."""
    return replace(config, longest=longest) if isinstance(config, DecoderConfig) else config


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """What the model of a config.json declares, without its weights.

    Raises:
        UnsupportedModelError: as for ``load_model``.
    """
    found = read_config(config)
    nowhere = torch.device("meta")
    return model_class(found.architecture)(found, dtype=torch.bfloat16, device=nowhere, max_model_len=1).spec


def products(config: Mapping[str, Any]) -> list[Group]:
    """The linear layers whose forms a start of the model chooses, as ``layers.form_walk`` groups them; of one rank.

    Raises:
        UnsupportedModelError: as for ``load_model``.
    """
    found = read_config(config)
    model = model_class(found.architecture)(found, dtype=torch.bfloat16, device=torch.device("meta"), max_model_len=1)
    if not isinstance(model, DecoderModel):
        return []
    model.finalize()
    return groups(model.forms)


def parameter_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes the weights take on the device."""
    model = model_class(config.architecture)(config, dtype=dtype, device=torch.device("meta"), max_model_len=1)
    return sum(target.tensor.numel() * target.tensor.itemsize for target in model.weights().targets.values())


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int) -> Model:
    try:
        return model_class(config.architecture)(config, dtype=dtype, device=device, max_model_len=max_model_len)
    except torch.OutOfMemoryError as error:
        need = parameter_bytes(config, dtype) / 2**30
        raise OutOfMemoryError(
            f"the weights need {need:.2f} GiB as {dtype} and do not fit {device}; use a smaller model or dtype"
        ) from error


@torch.no_grad()
def fill(
    model: Fillable, tensors: Iterable[tuple[str, torch.Tensor | BlockTensor]], keeper: BlockKeeper | None = None
) -> None:
    """Copy every tensor into the rows it belongs to; complain about all names at once at the end."""
    weights = model.weights()
    waiting = set(weights.targets)
    unexpected: list[str] = []
    for name, tensor in _unstacked(weights, tensors):
        found = weights.find(name)
        if found is None:
            if tensor.shape.numel() and not weights.leaves_out(name):  # a shared block of no experts has empty ones
                unexpected.append(name)
            continue
        name, target = found
        if name not in waiting:
            raise WeightsError(f"tensor {name} is in the checkpoint twice")
        if tuple(tensor.shape) != target.shape:
            raise WeightsError(
                f"tensor {name} has shape {list(tensor.shape)}; config.json implies {list(target.shape)}"
            )
        if isinstance(tensor, BlockTensor):
            if keeper is not None and keeper.take(target, tensor):
                waiting.discard(name)
                continue
            tensor = tensor.dequantized()
        if tensor.dtype not in _FLOATS and tensor.dtype != target.tensor.dtype:
            raise WeightsError(f"tensor {name} has type {tensor.dtype}; only unquantised floating point can be loaded")
        target.fill(tensor)
        waiting.discard(name)
    complaints = [
        f"{_listed(names)} {what}" for names, what in ((unexpected, "not expected"), (waiting, "missing")) if names
    ]
    if complaints:
        raise WeightsError(f"the checkpoint does not fit {model.spec.architecture}: {'; '.join(complaints)}")


def _unstacked(
    weights: WeightMap, tensors: Iterable[tuple[str, torch.Tensor | BlockTensor]]
) -> Iterator[tuple[str, torch.Tensor | BlockTensor]]:
    """Tensors that hold several of the model's, in pieces, among the others."""
    for name, tensor in tensors:
        stack = weights.stack(name) if weights.stacks else None
        if stack is None:
            yield name, tensor
        else:
            yield from stack.pieces(name, tensor.dequantized() if isinstance(tensor, BlockTensor) else tensor)


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


@torch.no_grad()
def fill_randomly(model: Fillable, seed: int) -> None:
    """Normal weights, unit norms; made on the device, the same for the same seed and kind of device."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, target in model.weights().targets.items():
        tensor = target.tensor
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif tensor.dtype == torch.uint8:  # of 4-bit floats: blocks, and scales that give them about the same deviation
            tensor.fill_(120) if name.endswith("scales") else tensor.random_(0, 256, generator=generator)
        elif target.rows is not None or target.columns is not None:  # a part, of what one rank alone would have
            whole = torch.empty(target.shape, dtype=tensor.dtype, device=model.device)
            target.fill(whole.normal_(0.0, DUMMY_STD, generator=generator))
        else:
            tensor.normal_(0.0, DUMMY_STD, generator=generator)


def _with_progress(
    checkpoint: Checkpoint, in_blocks: Collection[int], *, show: bool
) -> Iterator[tuple[str, torch.Tensor | BlockTensor]]:
    with progress_bar(checkpoint.num_bytes, "loading weights", show=show, unit="B") as advance:
        for name, tensor in checkpoint.stored(in_blocks):
            yield name, tensor
            item = 4 if isinstance(tensor, BlockTensor) else tensor.itemsize  # the bar counts float32 for all blocks
            advance(tensor.shape.numel() * item)
