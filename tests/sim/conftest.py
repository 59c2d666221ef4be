"""A simulated device for unit tests, and the tiny model for engines on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.device.sim import SimDevice
from tests.engine.tiny_llama import save_tiny_llama


@pytest.fixture
def lazy() -> Iterator[SimDevice]:
    """A device that does nothing until somebody waits."""
    device = SimDevice(0, speeds=(0.0, 0.0))
    device.enter()
    yield device
    device.disarm()
    device.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return folder
