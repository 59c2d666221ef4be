"""The torch calls open on this thread, so that a torch warning and a driver callback inside one call count once."""

from __future__ import annotations

import threading
from typing import Any, Final

from headway.syncs.errors import SyncError
from headway.syncs.findings import Kind
from headway.syncs.frames import in_own_code, locate
from headway.syncs.places import Site

MADE_BY: Final = "LiveProbe.observed"
"""The function that runs a call: frames inside it are the call's."""


class Call:
    """One call of the user's into torch.

    Attributes:
        label: "Tensor.item".
        waited: whether some probe saw a wait inside.
        inner: sites of waits in code of the user's that it runs, and their stacks.
        driver_micros: time spent in blocking driver calls; None unless a driver probe is attached and saw one.
    """

    __slots__ = ("driver_micros", "inner", "label", "waited")

    def __init__(self, label: str) -> None:
        self.label = label
        self.waited = False
        self.inner: dict[Site, tuple[str, ...]] | None = None
        self.driver_micros: float | None = None

    def hear(self) -> None:
        """A wait was seen, on this thread and now."""
        if in_own_code(MADE_BY):
            site, stack = locate()
            self.inner = {site: stack} | (self.inner or {})
        else:
            self.waited = True


class CallStack(threading.local):
    """Per thread."""

    def __init__(self) -> None:
        self.open: list[Call] = []
        self.pending: SyncError | None = None
        """Raised inside a driver callback, from which nothing may escape: the next torch call or the region's end raises it."""

    @property
    def outermost(self) -> Call | None:
        """The user's call, if one is under way."""
        return self.open[0] if self.open else None

    def raise_pending(self) -> None:
        """Raise what a driver callback had to hold back."""
        error, self.pending = self.pending, None
        if error is not None:
            raise error


CALLS: Final = CallStack()

_PREFIXES: Final = (("TensorBase.", "Tensor."), ("_VariableFunctionsClass.", "torch."), ("_TensorBase.", "Tensor."))
_READS: Final = frozenset([
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__repr__",
    "__format__", "__str__", "__contains__", "equal", "allclose", "is_nonzero", "__array__", "storage",
])  # fmt: skip
_SIZES: Final = frozenset([
    "nonzero", "argwhere", "where", "masked_select", "unique", "unique_consecutive", "bincount",
    "repeat_interleave", "combinations", "masked_scatter", "masked_scatter_", "split", "tensor_split", "histogram",
    "multinomial",
])  # fmt: skip
_UPLOADS: Final = frozenset([
    "tensor", "as_tensor", "asarray", "cuda", "full", "scalar_tensor", "new_tensor", "from_numpy", "new_full",
    "randperm", "arange",
])  # fmt: skip


def label_of(function: Any) -> str:
    """ "Tensor.item", "torch.nonzero", "ops.aten.nonzero" for what a torch function mode is given."""
    name = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or function)
    if "<locals>" in name:  # made by a function: torch.unique by boolean_dispatch
        name = str(function.__name__)
    for prefix, better in _PREFIXES:
        if name.startswith(prefix):
            return better + name[len(prefix) :]
    module = str(getattr(function, "__module__", None) or "")
    short = name.rpartition(".")[2]
    if module.startswith("torch._ops"):
        return f"ops.{module.removeprefix('torch._ops.')}.{short}"
    if module.startswith("torch._tensor"):
        return f"Tensor.{short}"
    return f"{module}.{short}" if module.startswith("torch") else name


def kind_of(label: str, args: tuple[Any, ...]) -> Kind:
    """What kind of wait a call that waited is."""
    name = label.rpartition(".")[2]
    if name in ("__getitem__", "__setitem__"):
        return _kind_of_indexing(args)
    if name in _READS:
        return Kind.READ
    if name in _SIZES:
        return Kind.SIZE
    if name in _UPLOADS:
        return Kind.UPLOAD
    if name in ("to", "copy_", "type"):
        source = args[1] if name == "copy_" and len(args) > 1 else args[0] if args else None
        return Kind.READ if getattr(source, "is_cuda", False) else Kind.UPLOAD
    return Kind.OTHER


def _kind_of_indexing(args: tuple[Any, ...]) -> Kind:
    index = args[1] if len(args) > 1 else None
    parts = index if isinstance(index, tuple) else (index,)
    names = {str(getattr(part, "dtype", type(part).__name__)) for part in parts}
    masks = names & {"torch.bool", "torch.uint8", "bool"}
    return Kind.SIZE if masks else Kind.UPLOAD
