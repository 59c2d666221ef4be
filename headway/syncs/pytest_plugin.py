"""A pytest plugin, loaded by its entry point: the fixture ``forbid_syncs`` and the marker ``no_syncs``.

    @pytest.mark.no_syncs                 # the test's body raises SyncError at its first wait
    def test_step(): ...

    def test_step(forbid_syncs):          # only the part inside
        warm_up()
        with forbid_syncs():
            step()

Without a CUDA device both skip the test, saying so: nothing would be watched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "no_syncs: the test fails if its host waits for the GPU (headway.syncs)")


def _forbid() -> Any:
    from headway.syncs import ProbeError, forbid, record

    try:
        with record():
            pass
    except ProbeError as error:
        pytest.skip(f"syncs: {error}")
    return forbid


@pytest.fixture
def forbid_syncs() -> Callable[..., Any]:
    """``headway.syncs.forbid``, or a skip where no probe can attach."""
    return _forbid()


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, None]:
    """Guard the bodies of marked tests."""
    if pyfuncitem.get_closest_marker("no_syncs") is None:
        yield
        return
    with _forbid()():
        outcome = yield
    outcome.get_result()
