"""The threads that share the native kernels' loops: many loops, callers at once, forks, changing numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from headway.kernels.cpu import ops
from headway.kernels.linear import PackedLinear
from headway.kernels.testing import make_random
from tests.kernels.native_kernel import torch_threads

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C compiler here")


def make_layer() -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    layer = PackedLinear(make_random(1000, 300, dtype=torch.float32, device="cpu", seed=1))
    x = make_random(5, 300, dtype=torch.float32, device="cpu")
    with torch_threads(1):
        return layer, x, layer(x)


def test_every_item_is_done_once_whatever_the_number_of_threads() -> None:
    layer, x, expected = make_layer()
    for threads in (2, 7, 1, 3, 16, 2):
        with torch_threads(threads):
            for _ in range(200):
                assert torch.equal(layer(x), expected)


def test_callers_at_once_do_not_disturb_each_other() -> None:
    layer, x, expected = make_layer()
    wrong: list[int] = []

    def call() -> None:
        torch.set_num_threads(3)
        wrong.extend(index for index in range(300) if not torch.equal(layer(x), expected))

    with torch_threads(3):
        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not wrong


FORK = """
import os, torch
from headway.kernels.linear import PackedLinear
torch.set_num_threads(3)
layer, x = PackedLinear(torch.randn(1000, 300)), torch.randn(5, 300)
expected = layer(x)
child = os.fork()
same = all(torch.equal(layer(x), expected) for _ in range(50))
if child == 0:
    os._exit(0 if same else 1)
print(same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.split() == ["True", "0"], done.stderr


IDLE = """
import os, threading, torch
from headway.kernels.linear import PackedLinear
torch.set_num_threads(4)
layer, x = PackedLinear(torch.randn(1000, 300)), torch.randn(5, 300)
layer(x)
mine = threading.get_native_id()
before = None
while True:
    states = {}
    for task in os.listdir("/proc/self/task"):
        name = open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()
        states[task] = name[0]
    if all(state == "S" for task, state in states.items() if int(task) != mine):
        break
print("asleep")
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux only")
def test_idle_threads_sleep() -> None:
    """Threads that went on looking for work would never all be seen asleep."""
    done = subprocess.run(
        [sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=100, check=False, env={**os.environ}
    )
    assert done.stdout.strip() == "asleep", done.stderr
