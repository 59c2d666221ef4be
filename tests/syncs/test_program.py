"""Whole programs: the command, its files, allow lists, threads, children, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.syncs import AllowListError, Kind, Log, Site, Wait
from headway.syncs.allowlist import AllowList
from headway.syncs.cli import FAILED, main
from headway.syncs.report import Run, to_dict, write_html
from headway.syncs.target import UsageError, parse

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
PROGRAM = """
import subprocess, sys, threading, torch
assert __name__ == "__main__" and sys.argv[1:] == ["a", "--b"], sys.argv
x = torch.ones(8, device="cuda")
def work():
    for _ in range(3):
        x.sum().item()
thread = threading.Thread(target=work, name="worker"); thread.start(); thread.join()
y = x[x > 0]
subprocess.run([sys.executable, "-c", ""])
sys.exit(int(x.sum() > 100))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(*words: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "headway.syncs", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


@no_cuda
def test_a_program_with_threads_and_children(program: Path, tmp_path: Path) -> None:
    out, page, allow = tmp_path / "o.json", tmp_path / "o.html", tmp_path / "allow.toml"
    allow.write_text(
        '[[allow]]\nat = "program.py:work"\nreason = "logged"\n[[allow]]\nat = "gone.py"\nreason = "old"\n'
    )
    options = ("--simulate", "--json", out, "--html", page, "--allow", allow)
    status, text = run(*options, "--", "python", program, "a", "--b")
    assert status == 0, text
    data = json.loads(out.read_text())
    found = {(f["function"], f["kind"], f["count"], f["sanctioned"], tuple(f["threads"])) for f in data["findings"]}
    assert ("work", "read", 3, True, ("worker",)) in found
    assert ("<module>", "size", 1, False, ("MainThread",)) in found
    assert data["totals"] == {
        "unsanctioned": 2,
        "lines": 2,
        "sanctioned": 3,
        "micros_lost": None,
        "micros_sanctioned": None,
    }
    assert len(data["subprocesses"]) == 1 and "NOT watched: 1 child" in text
    assert any("gone.py" in note for note in data["notes"])
    assert "program.py:9" in text and "cure:" in text and page.stat().st_size > 5000
    assert run("--simulate", "--fail-on", 3, "--", program, "a", "--b")[0] == FAILED


@no_cuda
def test_a_second_run_knows_nothing_of_the_first(tmp_path: Path) -> None:
    """In one process: its steps, waits and streams are its own."""
    script, found = tmp_path / "steps.py", []
    script.write_text(
        "import torch\nfrom headway import syncs\nx = torch.ones(2, device='cuda')\nx.tolist()\n"
        "for _ in range(3):\n    syncs.step()\n    x.sum().item()\n"
    )
    for number in range(3):
        report = tmp_path / f"{number}.json"
        assert main(["--simulate", "--json", str(report), "--", str(script)]) == 0
        data = json.loads(report.read_text())
        told = [(each["line"], each["count"], each["steps"], each["when"]) for each in data["findings"]]
        found.append((data["steps"], sorted(told), data["totals"]))
    assert found[0][0] == 3 and found[0] == found[1] == found[2]


@no_cuda
def test_without_cuda_the_command_fails_rather_than_reporting_nothing(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--", str(program)]) == 2
    assert "nothing to watch" in capsys.readouterr().err


@no_cuda
def test_what_the_simulation_cannot_serve_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "graph.py"
    script.write_text("import torch\ntorch.cuda.CUDAPluggableAllocator('a.so', 'a', 'b')\n")
    assert main(["--simulate", "--", str(script)]) == 2
    assert "does not serve torch.cuda.CUDAPluggableAllocator" in capsys.readouterr().err


@no_cuda
def test_a_program_that_fails_still_gets_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "fails.py"
    script.write_text('import torch\ntorch.ones(2, device="cuda").tolist()\nraise RuntimeError("its own")\n')
    assert main(["--simulate", "--", str(script)]) == 1
    text = capsys.readouterr().err
    assert "its own" in text and "fails.py:2" in text


@no_cuda
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = torch.ones(3)", "no tensor reached the pretended device"),
        (
            "x = torch.ones(3, device='cuda')\ntry:\n    torch.cuda.caching_allocator_alloc(5)\nexcept RuntimeError:\n    pass",
            "does not serve torch.cuda.caching_allocator_alloc",
        ),
        ("torch.ones(3, device='cuda')\nimport os\nos._exit(0)", "os._exit(0)"),
        ("torch.ones(3, device='cuda')\nimport os, sys\nos.execv(sys.executable, ['python', '-c', ''])", "os.exec"),
        (
            "torch.ones(3, device='cuda')\nfrom torch.overrides import _pop_mode\n_pop_mode()",
            "took the pretence off this thread",
        ),
    ],
    ids=["no tensor", "swallowed", "_exit", "exec", "mode taken"],
)
def test_silence_that_proves_nothing_is_not_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, says: str
) -> None:
    script, out = tmp_path / "quiet.py", tmp_path / "o.json"
    script.write_text(f"import torch\n{code}\n")
    assert main(["--simulate", "--json", str(out), "--", str(script)]) == 2
    assert says in capsys.readouterr().err
    assert any(says in reason for reason in json.loads(out.read_text())["unproven"])


@no_cuda
def test_what_a_probes_error_interrupts_keeps_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out, page = tmp_path / "half.py", tmp_path / "o.json", tmp_path / "o.html"
    script.write_text(
        'import torch\nx = torch.ones(2, device="cuda")\nx.tolist()\ntorch.cuda.caching_allocator_alloc(9)\nx.tolist()\n'
    )
    assert main(["--simulate", "--json", str(out), "--html", str(page), "--", str(script)]) == 2
    data = json.loads(out.read_text())
    assert [finding["line"] for finding in data["findings"]] == [3] and "does not serve torch.cuda.caching" in data[
        "unproven"
    ][0]
    assert page.stat().st_size > 5000 and "PROVES NOTHING" in capsys.readouterr().err


@no_cuda
@pytest.mark.parametrize(("limit", "status"), [(1, FAILED), (2, FAILED), (3, 0)])
def test_the_limit_itself_fails(tmp_path: Path, limit: int, status: int) -> None:
    script = tmp_path / "twice.py"
    script.write_text('import torch\nx = torch.ones(2, device="cuda")\nx.tolist()\nx.tolist()\n')
    assert main(["--simulate", "--fail-on", str(limit), "--", str(script)]) == status


def test_targets(program: Path) -> None:
    assert parse(["python3", str(program), "x"]) == (str(program), ["x"], False)
    assert parse(["-m", "pkg", "x"]) == ("pkg", ["x"], True)
    for words in ([], ["python"], ["python", "-O", "x.py"], ["absent.py"], ["-m"]):
        with pytest.raises(UsageError):
            parse(words)


@pytest.mark.parametrize(
    "text",
    [
        "allow = 1",
        "[other]",
        "[[allow]]\nat = 'x'",
        "[[allow]]\nreason = 'x'",
        "[[allow]]\nat='x'\nreason=' '",
        "nonsense [",
        "[[allow]]\nat='x'\nreason='y'\nkind='z'",
        "[[allow]]\nat='x'\nreason='y'\nmore=1",
    ],
)
def test_a_bad_allow_list_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "allow.toml"
    path.write_text(text)
    with pytest.raises(AllowListError, match=r"allow\.toml"):
        AllowList.load(path)


@pytest.mark.parametrize(
    ("at", "covers"),
    [
        ("a.py:7", True),
        ("a.py:8", False),
        ("a.py:5-9", True),
        ("a.py:step", True),
        ("a.py:Loop.*", True),
        ("a.py", True),
        ("src/*.py:7", True),
        ("b.py:7", False),
        ("xa.py", False),
    ],
)
def test_places_of_an_allow_list(tmp_path: Path, at: str, covers: bool) -> None:
    path = tmp_path / "allow.toml"
    path.write_text(f'[[allow]]\nat = "{at}"\nreason = "why"\nkind = "read"\ncall = "Tensor.*"\n')
    allow = AllowList.load(path)
    wait = Wait(Site("/home/src/a.py", 7, "Loop.step"), Kind.READ, "Tensor.item")
    assert (allow.apply(wait).reason == "why") is covers
    assert bool(allow.unused) is not covers


def example() -> Run:
    log = Log(["torch: a test"])
    evil = Site("</script><script>document.title='owned'</script>.py", 3, "step")
    log.add(Wait(evil, Kind.READ, "Tensor.item", 120.0, 1_100_000, "MainThread"))
    log.add(
        Wait(Site("b.py", 4, "log"), Kind.DEVICE, "torch.cuda.synchronize", 60.0, 1_400_000, "worker", reason="end")
    )
    streams = {"GPU 0, stream 7": [(1010.0, 80.0, "gemm"), (1085.0, 20.0, "add"), (1240.0, 100.0, "gemm")]}
    return Run(["python", "x.py"], "profiler", log, 500.0, streams, 1000.0, ["subprocess.Popen true"], ["a note"])


def test_the_data_model_sums_up() -> None:
    data = to_dict(example())
    assert data["gpu"] == {"busy_micros": 195.0, "busy_percent": 39.0}
    assert data["timeline"]["gaps"] == [[105.0, 135.0]]
    assert data["totals"]["micros_lost"] == 120.0 and data["totals"]["micros_sanctioned"] == 60.0
    assert data["timeline"]["threads"][0]["spans"][0]["start"] == 100.0
    assert data["lines"][0]["line"] == 3 and data["findings"][0]["fix"]["name"] == "readback ring"


def test_the_page_is_one_file_that_asks_nobody(tmp_path: Path) -> None:
    page = tmp_path / "o.html"
    write_html(example(), page)
    text = page.read_text()
    assert not re.search(r"https?://|<link|<img|\bsrc=|@import|url\(", text)
    assert "default-src 'none'" in text and text.count("</script>") == 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 375])
def test_the_page_in_a_browser(tmp_path: Path, width: int) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium on this machine")
    page, picture = tmp_path / "o.html", tmp_path / "o.png"
    write_html(example(), page)
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += (
        f" --disable-component-update --disable-sync --window-size={width},900 --user-data-dir={tmp_path / 'profile'}"
    )

    def browse(*more: str) -> str:
        command = [browser, *flags.split(), *more, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout

    dom: Any = browse("--dump-dom")
    assert 'data-wide="0"' in dom, "the page must not be wider than the window"
    assert 'data-ready="1"' in dom and "owned" not in dom.partition("<title>")[2].partition("</title>")[0]
    assert '59.1 %</b><span class="soft">from its first to its last work' in dom, "195 of 330 us"
    assert "readback ring" in dom and "39 %" in dom and "allowed: end" in dom and 'id="children"' in dom
    browse(f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
