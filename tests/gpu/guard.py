"""The launching thread under guard: every launch runs inside ``syncs.forbid()`` and torch's own detector in error mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headway import syncs
from headway.device.base import DeviceError
from headway.runner.runner import ModelRunner


@contextmanager
def torch_in_error_mode() -> Iterator[None]:
    """torch raises at the syncs it knows, before it waits. Inside ``forbid()``, whose own mode is put back."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def no_waits(
    monkeypatch: pytest.MonkeyPatch, probes: tuple[Any, ...] | None = None, *, torch_too: bool = True
) -> Iterator[list[int]]:
    """Launches inside raise SyncError (or torch's error) at the first host wait; gives their number.

    Args:
        probes: what watches; by default the live probe.
        torch_too: torch's own error mode as well.
    """
    launch = ModelRunner.launch
    launches = [0]

    def guarded(self: ModelRunner, *given: Any) -> Any:
        launches[0] += 1
        with syncs.forbid(probes=probes):
            if not torch_too:
                return launch(self, *given)
            try:
                with torch_in_error_mode():
                    return launch(self, *given)
            except RuntimeError as error:
                if "synchronizing CUDA operation" not in str(error):
                    raise
                raise DeviceError(str(error)) from error  # what stops the engine, and not a request alone

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "launch", guarded)
        yield launches
    assert launches[0], "nothing was launched, so nothing was guarded"
