"""Findings in whole programs are told a cure that removes the wait and gives the same results (``tests/syncs/cured.py``)."""

from __future__ import annotations

import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import syncs
from headway.syncs.simulate import SimulationProbe
from tests.syncs.cured import FINDINGS, Cured

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA"),
    pytest.mark.filterwarnings("ignore"),
]
PROBES = (SimulationProbe(),)
SETUP = """
import io
import statistics
import torch
import torch.nn.functional as F
import torch.nn.utils.rnn as rnn
from torch.utils.data import DataLoader, TensorDataset
from headway import syncs
host = torch.linspace(-1.5, 2.0, 8)
x, square = host.to("cuda"), (torch.arange(64.0) % 7 - 3).view(8, 8).to("cuda")
host_mask = host > 0
mask, goal, table = host_mask.to("cuda"), torch.tensor([1.0, -1.0]).to("cuda"), torch.tensor([0.1, 0.2, 0.3]).to("cuda")
labels, which, kinds = torch.arange(8).sub(3).to("cuda"), torch.arange(8).flip(0).to("cuda"), torch.arange(8).to("cuda")
ring, events = [torch.zeros(8).pin_memory() for _ in range(2)], [torch.cuda.Event() for _ in range(2)]
scaler, expert, step = torch.amp.GradScaler("cuda"), torch.nn.Linear(8, 8).to("cuda"), 0
scaler.scale(x)
any_order = rnn.pack_padded_sequence(square[:2, :, None], [2, 3], batch_first=True, enforce_sorted=False)
falling = rnn.pack_padded_sequence(square[:2].flip(0)[:, :, None], [3, 2], batch_first=True)
states, causal = square.view(2, 4, 8), torch.nn.Transformer.generate_square_subsequent_mask(4, device="cuda")
decoder = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(8, 1, 8, batch_first=True), 1).to("cuda").eval()
def body():
    global made, rows, count, total, slot, share
"""


def run(code: str, later: str, place: Path) -> tuple[Any, syncs.Log]:
    """What ``code``, and ``later`` after it, leave in ``made``; the waits of ``code`` alone."""
    after = "def ask():\n    global made\n" + textwrap.indent(later or "pass", "    ") + "\n"
    place.write_text(SETUP + textwrap.indent(code, "    ") + "\n" + after)
    with syncs.record(probes=PROBES):
        torch.manual_seed(0)
        names = runpy.run_path(str(place))
        with syncs.record(probes=PROBES) as log:
            names["body"]()
        names["ask"]()
        made = names["body"].__globals__["made"]
        return torch.as_tensor(made).cpu() if not isinstance(made, str) else made, log


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.before.partition("\n")[0][:40])
def test_the_cure_removes_the_wait_and_gives_the_same(finding: Cured, tmp_path: Path) -> None:
    made, log = run(finding.before, "", tmp_path / "before.py")
    assert finding.cure in {found.to_dict()["fix"]["name"] for found in log.findings}, log.text()
    cured, quiet = run(finding.after, finding.later, tmp_path / "after.py")
    assert quiet.count == 0, quiet.text()
    if isinstance(made, str):
        assert made == cured
    else:
        torch.testing.assert_close(made, cured, check_dtype=False)
