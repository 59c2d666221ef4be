"""Where Gluon kernels are used: on Hopper, with a Triton they were run with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from headway.kernels import hopper


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    hopper.runs_gluon.cache_clear()
    yield
    hopper.runs_gluon.cache_clear()


@pytest.mark.parametrize(
    ("capability", "triton", "runs"),
    [
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.6.1+git", True),
        ((9, 0), "3.7.0", False),
        ((9, 0), "3.60.0", False),
        ((9, 0), None, False),
        ((8, 0), "3.6.0", False),
        ((10, 0), "3.6.0", False),
    ],
)
def test_hopper_with_a_known_triton(
    capability: tuple[int, int], triton: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if triton is None:
            raise PackageNotFoundError(name)
        return triton

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(hopper, "version", version)
    assert hopper.runs_gluon(torch.device("cuda", 0)) is runs


def test_never_on_the_cpu() -> None:
    assert not hopper.runs_gluon(torch.device("cpu"))
