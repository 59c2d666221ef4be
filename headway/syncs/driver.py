"""Which CUDA calls block the host: the names that a driver-boundary probe counts."""

from __future__ import annotations

import re
from typing import Final

from headway.syncs.findings import Kind

_BLOCKING: Final = {
    "cudaStreamSynchronize": Kind.STREAM,
    "cudaEventSynchronize": Kind.EVENT,
    "cudaDeviceSynchronize": Kind.DEVICE,
    "cudaThreadSynchronize": Kind.DEVICE,
    "cuStreamSynchronize": Kind.STREAM,
    "cuEventSynchronize": Kind.EVENT,
    "cuCtxSynchronize": Kind.DEVICE,
    "cudaMemcpy": Kind.OTHER,
    "cudaMemcpy2D": Kind.OTHER,
    "cudaMemcpy3D": Kind.OTHER,
    "cudaMemcpyToSymbol": Kind.UPLOAD,
    "cudaMemcpyFromSymbol": Kind.READ,
    "cuMemcpy": Kind.OTHER,
    "cuMemcpyDtoH": Kind.READ,
    "cuMemcpyHtoD": Kind.UPLOAD,
    "cuMemcpy2D": Kind.OTHER,
    "cuMemcpy3D": Kind.OTHER,
    "cudaFree": Kind.MEMORY,
    "cudaFreeHost": Kind.MEMORY,
    "cudaHostUnregister": Kind.MEMORY,
    "cuMemFree": Kind.MEMORY,
    "cuMemFreeHost": Kind.MEMORY,
    "cuMemHostUnregister": Kind.MEMORY,
}
ASYNC_COPIES: Final = frozenset({"cudaMemcpyAsync", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemcpyAsync"})
"""They block if the host side is pageable."""


def plain(name: str) -> str:
    """The name without the version and per-thread-stream suffixes of the driver's symbols."""
    return re.sub(r"(_v\d+|_ptsz|_ptds|_spt)+(_v\d+)?$", "", name)


def blocking(name: str) -> Kind | None:
    """The kind of wait that a call of ``name`` is, or None if it does not block."""
    return _BLOCKING.get(plain(name))


def names() -> tuple[str, ...]:
    """All names a probe has to watch."""
    return (*_BLOCKING, *sorted(ASYNC_COPIES))
