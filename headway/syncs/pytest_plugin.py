"""A pytest plugin, loaded by its entry point: the fixture ``forbid_syncs`` and the marker ``no_syncs``.

    @pytest.mark.no_syncs                 # the test's body raises SyncError at its first wait
    def test_step(): ...

    def test_step(forbid_syncs):          # only the part inside
        warm_up()
        with forbid_syncs():
            step()

Without a CUDA device both skip the test, saying so: nothing would be watched. With ``pytest --syncs-simulate`` the session
has a pretended one: tests for device="cuda" run on the CPU, and the waits that a card would make fail them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headway.syncs.probes import Probe


_PROBES: pytest.StashKey[tuple[Probe, ...]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--syncs-simulate``."""
    parser.addoption(
        "--syncs-simulate",
        action="store_true",
        help="pretend CUDA for the session; tests marked no_syncs fail where a card would wait (not for machines with CUDA)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known; begin the pretence, before the tests are collected."""
    config.addinivalue_line("markers", "no_syncs: the test fails if its host waits for the GPU (headway.syncs)")
    if config.getoption("syncs_simulate"):
        from headway.syncs import ProbeError
        from headway.syncs.regions import judge
        from headway.syncs.simulate import SimulationProbe

        probe = SimulationProbe()
        try:
            probe.attach(judge)
        except ProbeError as error:
            raise pytest.UsageError(f"--syncs-simulate: {error}") from error
        config.stash[_PROBES] = (probe,)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the pretence."""
    for probe in config.stash.get(_PROBES, ()):
        probe.detach()


def _forbid(config: pytest.Config) -> Any:
    from headway.syncs import ProbeError, forbid, record

    probes = config.stash.get(_PROBES, None)
    try:
        with record(probes=probes):
            pass
    except ProbeError as error:
        pytest.skip(f"syncs: {error} (or pytest --syncs-simulate)")
    return functools.partial(forbid, probes=probes) if probes else forbid


@pytest.fixture
def forbid_syncs(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``headway.syncs.forbid``, or a skip where no probe can attach."""
    return _forbid(request.config)


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, None]:
    """Guard the bodies of marked tests."""
    if pyfuncitem.get_closest_marker("no_syncs") is None:
        yield
        return
    with _forbid(pyfuncitem.config)():
        outcome = yield
    outcome.get_result()
