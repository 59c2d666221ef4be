"""Which operations would wait on a card: the table measured there, and what the operator database cannot reach, by hand.

By hand: operations that no sample reaches (``UNREACHED``), copies between host and device, indexing, comparisons of
whole tensors, ``isin``, and the formulas of autograd that take another way when a dispatch mode looks on (``LATE``), so that
no record made with one can hold them.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from headway.syncs import trees
from headway.syncs.copies import staged
from headway.syncs.findings import Kind
from headway.syncs.kinds import kind_of
from headway.syncs.sim import table

COPIES: Final = frozenset({"copy_", "_to_copy", "_copy_from", "_copy_from_and_resize"})
INDEXING: Final = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
)
BY_HAND: Final = COPIES | INDEXING | {"equal", "isin", "_local_scalar_dense"}
"""Not in the generated table."""
UNREACHED: Final = {
    "_coalesce": Kind.SIZE,  # SparseCUDATensor.cu: unique_by_key gives the number of values that are left
    "_to_sparse_csr": Kind.SIZE,
    "_to_sparse_csc": Kind.SIZE,
    "_to_sparse_bsr": Kind.SIZE,
    "_to_sparse_bsc": Kind.SIZE,
    "_sparse_sparse_matmul": Kind.SIZE,
    "_nested_tensor_from_mask": Kind.READ,
    "_nested_tensor_from_mask_left_aligned": Kind.READ,
    "_nested_from_padded": Kind.READ,
    "fake_quantize_per_channel_affine_cachemask": Kind.READ,  # FakeQuantPerChannelAffine.cpp: min and max of zero points
    "_fake_quantize_learnable_per_tensor_affine": Kind.READ,  # FakeQuantPerTensorAffine.cpp: scale[0].item()
    "_fake_quantize_learnable_per_channel_affine": Kind.READ,
    "quantize_per_tensor_dynamic": Kind.READ,  # QTensor.cpp: the range is computed from x.min().item()
    "_choose_qparams_per_tensor": Kind.READ,
}
"""Operations that no sample of the database reaches on a card; torch's sources say that they wait."""
LATE: Final = {"prod": Kind.SIZE, "cumprod": Kind.READ}
"""Functions whose gradient looks for zeros among the inputs on the host, unless their tensors are of a subclass."""
_SIZES: Final = frozenset({"_to_sparse", "mode", "masked_scatter_backward", "bincount", "repeat_interleave"})
_MASKS: Final = (torch.bool, torch.uint8)


def wait_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    """The wait that one aten operation is, if it is one. Copies are ``copy_wait``'s."""
    packet = func.overloadpacket.__name__
    if packet == "_local_scalar_dense":
        return Kind.READ if args[0].is_cuda else None
    if packet in INDEXING:
        return _indexing(packet, args, kwargs)
    if packet == "equal":
        return Kind.READ if args[0].numel() and args[0].shape == args[1].shape else None
    if packet in UNREACHED:
        return UNREACHED[packet] if packet != "_coalesce" or args[0]._nnz() > 1 else None
    if packet == "isin":
        return Kind.SIZE if _sorts(args) else None
    return recorded(func, args, kwargs)


def recorded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    """The wait that an operation is by the card's record, or by torch's own tags where the record does not have it.

    Takes any tensors for the device's but the CPU's, so that the engine's simulated device can ask too.
    """
    tree, kind = _rule(func)
    if tree is False:
        return None
    if tree is not True:
        kinds = {str(position): kind_of(value) for position, value in enumerate(args)}
        kinds |= {key: kind_of(value) for key, value in kwargs.items()}
        if not trees.decide(tree, kinds):
            return None
    return kind


@functools.cache
def _rule(func: Any) -> tuple[trees.Tree, Kind]:
    """Of an overload: whether it waits, and what for."""
    packet, (waits, never) = func.overloadpacket.__name__, table.load()
    name = _known(str(func), packet, waits, never)
    dynamic = torch.Tag.dynamic_output_shape in func.tags
    if name in never:
        return False, Kind.OTHER
    if name is None:  # not in the record: what torch itself says of it
        return dynamic or torch.Tag.data_dependent_output in func.tags, Kind.SIZE if dynamic else Kind.READ
    sized = (dynamic and packet != "_ctc_loss") or packet in _SIZES
    return waits[name], Kind.SIZE if sized else Kind.READ


def _known(name: str, packet: str, waits: dict[str, Any], never: frozenset[str]) -> str | None:
    """The overload in the record that answers for this one: itself, or its form that is not in place or has no out."""
    if name in waits or name in never:
        return name
    plain = name.replace(f".{packet}.", f".{packet.removesuffix('_')}.", 1)
    for candidate in (plain, plain.replace(".out", ".default"), plain.removesuffix("_out")):
        if candidate in waits or candidate in never:
            return candidate
    return None


def _indexing(packet: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    target, indices = args[0], [part for part in args[1] if isinstance(part, torch.Tensor)]
    if not target.is_cuda:
        return None
    here = [part for part in indices if part.is_cuda]
    masks = [part for part in here if part.dtype in _MASKS]
    value = args[2] if len(args) > 2 and "put" in packet else None
    number = isinstance(value, torch.Tensor) and not value.is_cuda
    accumulate = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    if number and len(indices) == 1 and masks and not accumulate:
        return None  # torch makes a masked_fill of it
    if masks:
        return Kind.SIZE
    # A mask on the host becomes rows there, and those go up from pinned memory, without a wait.
    lists = any(not part.is_cuda and part.dtype not in _MASKS for part in indices)
    return Kind.UPLOAD if lists or number else None


def _sorts(args: tuple[Any, ...]) -> bool:
    """Whether ``isin`` sorts, which finds the unique elements first: torch's own bound, at::native::isin."""
    elements, tests = args[0], args[1]
    if not isinstance(elements, torch.Tensor) or not isinstance(tests, torch.Tensor):
        return False
    return tests.numel() >= 10.0 * elements.numel() ** 0.145


def copy_wait(source: torch.Tensor, target: torch.Tensor, pinned: bool, non_blocking: bool) -> Kind | None:
    """The wait that a copy between host and device is. ``pinned``: whether the host's side is."""
    if source.is_cuda == target.is_cuda or target.numel() == 0:
        return None
    if not non_blocking:
        return Kind.UPLOAD if target.is_cuda else Kind.READ
    return None if pinned and not staged(source, target) else Kind.PAGEABLE
