"""Launchers: every rank is watched by itself, the report is one, and a rank that was not heard of is said."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.syncs import Kind, Log, Site, Wait, launchers, ranks
from headway.syncs.cli import FAILED
from headway.syncs.report import Run, to_dict
from headway.syncs.target import UsageError

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
ACCELERATE = importlib.util.find_spec("accelerate") is not None

PROGRAM = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "0.1"], sys.argv
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = DistributedDataParallel(torch.nn.Linear(4, 2).cuda(), device_ids=[rank])
x = torch.full((2, 4), float(rank), device="cuda")
assert x.device == torch.device("cuda", rank) and torch.cuda.device_count() == 2 and dist.get_backend() == "nccl"
model(x).sum().backward()
total = torch.ones((), device="cuda")
dist.all_reduce(total)
assert total.item() == 2
if rank == 1:
    x.tolist()
dist.barrier(device_ids=[rank])
dist.destroy_process_group()
"""
WITH_ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
assert accelerator.num_processes == 2 and accelerator.device == torch.device("cuda", accelerator.local_process_index)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(loss.item())
accelerator.end_training()
"""


def run(tmp_path: Path, code: str, *words: str) -> tuple[int, dict[str, Any], str]:
    script, out = tmp_path / "train.py", tmp_path / "o.json"
    script.write_text(code)
    command = [sys.executable, "-m", "headway.syncs", "--simulate", "--json", str(out), "--fail-on", "1", "--", *words]
    done = subprocess.run(
        [*command, str(script), "--lr", "0.1"], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, json.loads(out.read_text()) if out.exists() else {}, done.stderr


def lines(data: dict[str, Any]) -> dict[str, tuple[int, list[str]]]:
    """Text of a line -> its waits and the threads that waited."""
    found: dict[str, tuple[int, list[str]]] = {}
    for finding in data["findings"]:
        count, threads = found.get(finding["source"], (0, []))
        found[finding["source"]] = count + finding["count"], sorted({*threads, *finding["threads"]})
    return found


@no_cuda
@pytest.mark.slow
def test_torchrun_is_followed_into_each_rank(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    status, data, text = run(tmp_path, PROGRAM, *launcher)
    assert status == FAILED, text
    found = lines(data)
    assert found["assert total.item() == 2"] == (2, ["rank 0 MainThread", "rank 1 MainThread"])
    assert found["x.tolist()"] == (1, ["rank 1 MainThread"])
    assert found["dist.barrier(device_ids=[rank])"][0] == 2 and "dist.all_reduce(total)" not in found
    assert data["unproven"] == [] and data["exit_status"] == 0 and "2 ranks of 2 watched" in text
    assert {row["name"] for row in data["timeline"]["threads"]} == {"rank 0 MainThread", "rank 1 MainThread"}


@no_cuda
@pytest.mark.slow
@pytest.mark.skipif(not ACCELERATE, reason="accelerate is not installed")
def test_accelerate_is_followed_into_each_rank(tmp_path: Path) -> None:
    status, data, text = run(tmp_path, WITH_ACCELERATE, "accelerate", "launch", "--num_processes", "2")
    assert status == FAILED, text
    assert lines(data)["accelerator.print(loss.item())"] == (4, ["rank 0 MainThread", "rank 1 MainThread"])
    assert data["unproven"] == []


def test_where_a_launchers_options_end() -> None:
    made = launchers.find(["torchrun", "--nproc-per-node=2", "train.py", "--nproc-per-node", "x"], True)
    assert made is not None and made.options == ("--nproc-per-node=2",)
    assert made.program == ("train.py", "--nproc-per-node", "x")
    command = made.command(["--simulate"])
    assert command[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    assert command[6:10] == ["-m", "headway.syncs", "--simulate", "--"]
    module = launchers.find(["python", "-m", "torch.distributed.run", "--nnodes", "1", "-m", "pkg.train", "-v"], False)
    assert module is not None and module.program == ("-m", "pkg.train", "-v") and module.options == ("--nnodes", "1")
    assert launchers.find(["python", "train.py"], True) is None and launchers.find(["-m", "accelerate"], True) is None
    for words in (["torchrun", "--no-python", "bash"], ["torchrun", "--no-such-option", "train.py"], ["torchrun"]):
        with pytest.raises(UsageError):
            launchers.find(words, True)


@pytest.mark.skipif(not ACCELERATE, reason="accelerate is not installed")
def test_accelerate_needs_no_cards_to_start_ranks_that_pretend_them() -> None:
    def options(*given: str, simulate: bool = True) -> tuple[str, ...]:
        made = launchers.find(["accelerate", "launch", *given, "train.py"], simulate)
        assert made is not None and made.program == ("train.py",)
        return made.options

    assert options("--num_processes", "2") == ("--num_processes", "2", "--multi_gpu")
    assert options() == ("--num_processes", "1")
    assert options("--multi_gpu", "--num_processes", "2") == ("--multi_gpu", "--num_processes", "2")
    assert options("--num_processes", "2", simulate=False) == ("--num_processes", "2")


def one_rank(folder: Path, rank: int, monkeypatch: pytest.MonkeyPatch, *waits: Wait) -> None:
    log = Log(["simulation: reads"])
    for wait in waits:
        log.add(wait)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "3")
    run = Run(
        ["python", "t.py"], "simulation", log, 100.0 + rank, {}, 1000.0 + rank, notes=["everywhere", f"only {rank}"]
    )
    ranks.write(run, folder)


def test_waits_of_several_logs_are_those_of_one() -> None:
    """Whatever is counted of a finding, where some have it and others not: times, steps, threads."""
    rng = random.Random(3)
    for _ in range(40):
        waits = [
            Wait(
                Site("/p/a.py", rng.randrange(1, 4), "f"),
                Kind.READ,
                "Tensor.item",
                rng.choice([None, 4.0, 8.0]),
                thread=rng.choice("ab"),
                step=rng.choice([None, 1, 2]),
            )
            for _ in range(rng.randrange(1, 12))
        ]
        one, logs = Log(), [Log(), Log(), Log()]
        for wait in waits:
            one.add(wait)
            rng.choice(logs).add(wait)
        joined = logs[0]
        for log in logs[1:]:
            for finding in log.findings:
                joined.join(finding)
        assert [each.to_dict() for each in joined.findings] == [each.to_dict() for each in one.findings]
        assert [each.timed for each in joined.findings] == [each.timed for each in one.findings]
        assert (joined.count, joined.lines) == (one.count, one.lines)


def test_findings_of_all_ranks_are_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Wait(
        Site("t.py", 3, "step"), Kind.READ, "Tensor.item", 5.0, 1_010_000, step=2, stack=("lib.py:1 f", "t.py:3 step")
    )
    other = Wait(Site("t.py", 9, "end"), Kind.SIZE, "torch.nonzero", None, 1_020_000, reason="once")
    one_rank(tmp_path, 0, monkeypatch, read, read, other)
    one_rank(tmp_path, 2, monkeypatch, read)
    files = [json.loads(file.read_text()) for file in tmp_path.glob("rank-*.json")]
    run = ranks.merged(files, ["torchrun", "t.py"], 0)
    data = to_dict(run)
    first, second = data["findings"]
    assert (first["line"], first["count"], first["micros"], first["steps"]) == (3, 3, 15.0, {"2": 3})
    assert first["threads"] == ["rank 0 MainThread", "rank 2 MainThread"] and first["via"].startswith("lib.py:1")
    assert (second["count"], second["reason"]) == (1, "once")
    assert data["wall_micros"] == 104.0 and [len(row["spans"]) for row in data["timeline"]["threads"]] == [3, 1]
    assert data["unproven"] == ["of 3 ranks these left no report: 1"]
    assert "everywhere" in data["notes"] and not any("only" in note for note in data["notes"])
