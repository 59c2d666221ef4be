"""Every cure has a snippet before and after in docs/syncs.md, and they do what the page says."""

from __future__ import annotations

import re
import runpy
import textwrap
from pathlib import Path

import pytest
import torch

from headway import syncs
from headway.syncs.fixes import fix_for
from headway.syncs.simulate import SimulationProbe
from tests.house.source import ROOT

SETUP = """
import torch
from headway import syncs
x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
mask = torch.zeros(8, dtype=torch.bool, device="cuda")
lengths = torch.arange(4, device="cuda")
index = torch.arange(3, device="cuda")
table = torch.ones(3, device="cuda")
ring = [torch.zeros(8).pin_memory() for _ in range(2)]
events = [torch.cuda.Event() for _ in range(2)]
staging, pinned_grid = torch.zeros(8).pin_memory(), torch.zeros(4, 4).pin_memory()
side = torch.cuda.Stream()
step, longest_bound, total_tokens, debug = 0, 8, 6, False
def body():
    global total, longest
"""
DRIVER_ONLY = {"allocate once"}
ONLY_WHEN_SLOW = {"poll between work"}
"""An event that has passed by its first query was no wait: on a real GPU the snippet's work is too short to tell."""


def snippets() -> dict[str, tuple[str, str]]:
    """Name of a cure -> its snippets."""
    text = (ROOT / "docs" / "syncs.md").read_text(encoding="utf-8").partition("\n## Cures")[2]
    pattern = r"### (.+)\n\n(?:.+\n)+\n```python\n# before\n([\s\S]+?)```\n```python\n# after\n([\s\S]+?)```"
    return {name: (before, after) for name, before, after in re.findall(pattern, text)}


def test_every_cure_is_on_the_page() -> None:
    assert list(snippets()) == [fix.name for fix in syncs.FIXES]


@pytest.mark.parametrize("name", [fix.name for fix in syncs.FIXES])
def test_before_waits_and_after_does_not(name: str, tmp_path: Path) -> None:
    probes = None if torch.cuda.is_available() else (SimulationProbe(),)
    counts = []
    for number, snippet in enumerate(snippets()[name]):
        path = tmp_path / f"snippet{number}.py"
        path.write_text(SETUP + textwrap.indent(snippet, "    "), encoding="utf-8")
        with syncs.record(probes=probes):  # the set-up, under the pretence too
            body = runpy.run_path(str(path))["body"]
            with syncs.record(probes=probes) as log:
                body()
        counts.append(log.count)
    assert counts[1] == 0
    quick = torch.cuda.is_available() and name in ONLY_WHEN_SLOW
    assert counts[0] > 0 or name in DRIVER_ONLY or quick


@pytest.mark.parametrize("kind", list(syncs.Kind))
def test_every_kind_has_a_cure(kind: syncs.Kind) -> None:
    assert fix_for(kind, "anything.at_all") in syncs.FIXES
    assert fix_for("size", "torch.repeat_interleave").name == "repeat_interleave output_size"
    assert fix_for("size", "index_put", source="loss.backward()").name == "torch.where"
    started = fix_for("read", "copy_", "nn.parallel.distributed.DistributedDataParallel.__init__")
    assert started.name == "once at start-up"


LINES = [
    ("x[x > 0].sum()", "masked reduction"),
    ("print('loss', x.mean().item())", "log every k steps"),
    ("assert x.isfinite().all()", "assert on the device"),
    ("torch.zeros(3).to('cuda')", "create on the device"),
    ("torch.distributions.Normal(x, y)", "validate_args=False"),
    ("torch.linalg.inv(torch.eye(3, device='cuda'))", "linalg without checks"),
    ("torch.nn.functional.one_hot(lengths)", "one_hot num_classes"),
    ("torch.bincount(lengths, minlength=4)", "count by scatter_add_"),
    ("torch.histc(x, 4)", "histc with bounds"),
    ("torch.normal(x, y)", "noise that is scaled"),
    ("torch.repeat_interleave(lengths)", "repeat_interleave output_size"),
    ("x[3] = 1.0", "slice assignment"),
    ("x[index] = y[:3].cpu()[0]", "index_fill_"),
    ("x[index] = 0.0", "index_fill_"),
    ("x[[0, 1]] = 0.0", "slice assignment"),
    ("x[mask] = y[mask]", "torch.where"),
    ("z = table[index[1]]", "index on the device"),
    ("table[index[1]] += 1", "index on the device"),
    ("z = [1, 2, 3][int(x.argmax())]", "index on the device"),
    ("while not (x > 0).all(): pass", "end a loop late"),
    ("for _ in range(2):\n    if (x > 0).all():\n        break", "end a loop late"),
    ("if (x < 0).any():\n    raise ValueError", "assert on the device"),
    ("if (x < 0).any():\n    x.add_(1)", "torch.where"),
    ("z = min([x.sum(), y.sum()])", "reduce on the device"),
    ("z = sorted([x.sum(), y.sum()])", "reduce on the device"),
    ("z = torch.min(x, y).sum().item()", "readback ring"),
    ("z = x.log().sum().item()", "readback ring"),
    ("z = 0\nz += x.sum().item()", "log every k steps"),
    ("z = f'{x.sum():.2f}'", "log every k steps"),
    ("for n in lengths.tolist():\n    x.add_(n)", "upper bound on the host"),
    ("z = torch.tensor([0.5, 1.0], device='cuda')", "precomputed tables"),
    ("z = torch.tensor([n for n in range(3)], device='cuda')", "pinned staging"),
    ("torch.unique(lengths)", "fixed-size compaction"),
    ("torch.linalg.svd(torch.eye(3, device='cuda'))", "wait inside an operation"),
    ("torch.nn.Linear(3, 2).to('cuda')", "create on the device"),
    ("torch.nn.BatchNorm1d(3, device='cuda')", "once at start-up"),
    (
        "z = torch.nn.Linear(3, 2).state_dict()\ntorch.nn.Linear(3, 2, device='cuda').load_state_dict(z)",
        "once at start-up",
    ),
    ("torch.distributions.Normal(x, y, validate_args=False).sample()", "noise that is scaled"),
    ("z = torch.amp.GradScaler('cuda')\nz.scale(x)\nz.get_scale()", "log every k steps"),
    (
        "torch.nn.utils.rnn.pack_padded_sequence(x.view(4, 2, 1), [2, 4], enforce_sorted=False)",
        "rows sorted by the host",
    ),
    ("n = int(lengths.max())", "upper bound on the host"),
    ("z = x.cpu()", "readback ring"),
    ("z = int(torch.randint(0, 4, (), device='cuda'))", "draw on the host"),
    ("z = torch.rand((), device='cuda').item()", "draw on the host"),
    ("if torch.rand((), device='cuda') < 0.5:\n    x.add_(1)", "draw on the host"),
    ("if torch.rand((), device='cuda').log() < x.sum():\n    x.add_(1)", "torch.where"),
    ("longest = lengths.max().item()", "upper bound on the host"),
    ("norm = x.norm().item()", "readback ring"),
    ("z = torch.masked.softmax(x, 0, mask=mask)", "wait inside an operation"),
    ("z = x.clone().requires_grad_()\nz.prod().backward()", "wait inside an operation"),
    ("torch.cuda.empty_cache()", "allocate once"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
@pytest.mark.parametrize(("line", "cure"), LINES)
def test_each_line_is_told_its_own_cure(line: str, cure: str, tmp_path: Path) -> None:
    probes = (SimulationProbe(),)
    path = tmp_path / "line.py"
    path.write_text(SETUP + textwrap.indent(line, "    ") + "\n", encoding="utf-8")
    with syncs.record(probes=probes):
        body = runpy.run_path(str(path))["body"]
        with syncs.record(probes=probes) as log:
            body()
    assert cure in {finding.to_dict()["fix"]["name"] for finding in log.findings}, log.text()
