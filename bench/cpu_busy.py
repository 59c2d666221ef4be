"""One stream of SmolLM2 on a CPU beside processes that compute without end: what is kept of the fair share.

    python bench/cpu_busy.py [--busy 2,6] [--quota 1.5] [--seconds 2] [--rounds 8] [--dtype bfloat16] [--json FILE]

With T threads of ours and B busy processes on C cores, each gets C / (T + B) of a core when the scheduler is fair, and that
part of the speed alone is the fair share. Threads that wait for each other get less out of it. A quota of Q CPUs is set by a
control group of this process's own (Linux, as root; elsewhere start the bench in a container with ``--cpus Q`` and compare
with one without it); Q / T is the fair share. Each round measures speed alone and every case; the best of the rounds counts.
Where other work runs beside all of this, the last figure still holds: processor time that a thread of ours got over what a busy
process got in the same moments, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.kernels.cpu.instructions import cpu_name

PROMPT, CONTEXT = 20, 1024


def tokens_per_second(core: EngineCore, seconds: float, name: str) -> float:
    """Of one stream, its prompt not counted."""
    params = SamplingParams(temperature=0.0, max_tokens=CONTEXT - PROMPT, ignore_eos=True, detokenize=False)
    core.add(AddRequest(request_id=name, prompt_token_ids=list(range(100, 100 + PROMPT)), params=params, seed=0,
                        eos_token_ids=core.info.eos_token_ids))  # fmt: skip
    while not core.step():
        pass
    start, tokens = time.perf_counter(), 0
    while core.has_work() and time.perf_counter() - start < seconds:
        tokens += sum(len(update.new_token_ids) for update in core.step())
    elapsed = time.perf_counter() - start
    core.abort(name)
    while core.has_work():
        core.step()
    return tokens / elapsed


@contextmanager
def running(others: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """These processes go on meanwhile."""
    for other in others:
        other.send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        for other in others:
            other.send_signal(signal.SIGSTOP)


def seconds_of(others: list[subprocess.Popen[bytes]]) -> float:
    """Processor time that these processes have had."""
    stats = [Path(f"/proc/{other.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split() for other in others]
    return sum(int(words[11]) + int(words[12]) for words in stats) / os.sysconf("SC_CLK_TCK")


@contextmanager
def quota_of(cpus: float) -> Iterator[None]:
    """This process within so many CPUs, in periods of 100 ms as containers have.

    Raises:
        OSError: the control group cannot be made.
    """
    root, name = Path("/sys/fs/cgroup"), f"headway-bench-{os.getpid()}"
    first = (root / "cpu" / "cpu.cfs_quota_us").parent if (root / "cpu").is_dir() else root
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()]
    own = next((group for _, kinds, group in lines if kinds == ("cpu" if first != root else "")), "/")
    parent = first / own.lstrip("/")
    group = parent / name
    group.mkdir()
    try:
        if first != root:
            (group / "cpu.cfs_period_us").write_text("100000", encoding="ascii")
            (group / "cpu.cfs_quota_us").write_text(str(int(cpus * 1e5)), encoding="ascii")
        else:
            (group / "cpu.max").write_text(f"{int(cpus * 1e5)} 100000", encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        group.rmdir()


def main() -> None:
    """Print tokens per second, and the part of the fair share, for each number of busy processes and each quota."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", default="2,6")
    parser.add_argument("--quota", default="", help="CPUs, several with commas between them")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0, help="0: what the engine chooses")
    parser.add_argument("--json", type=Path, help="where the figures are written, too")
    options = parser.parse_args()
    core = build_engine(
        EngineArgs(
            model="smollm2", dtype=options.dtype, max_model_len=CONTEXT, device="cpu", enable_prefix_caching=False
        ),
        progress=False,
    )
    if options.threads:
        torch.set_num_threads(options.threads)
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    print(f"{cpu_name()}: {options.dtype}, {threads} threads on {cores} cores", flush=True)
    cases = [("busy", float(word)) for word in options.busy.split(",") if word]
    cases += [("quota", float(word)) for word in options.quota.split(",") if word]
    most = max((int(number) for kind, number in cases if kind == "busy"), default=0)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(most)]
    for other in others:
        other.send_signal(signal.SIGSTOP)
    alone, speeds = 0.0, dict.fromkeys(cases, 0.0)
    got: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
    try:
        for turn in range(options.rounds):
            for kind, number in cases:
                name = f"{turn}-{kind}-{number}"
                alone = max(alone, tokens_per_second(core, options.seconds, f"{name}-alone"))
                beside = others[: int(number)] if kind == "busy" else []
                before, own = seconds_of(beside), time.process_time()
                with running(beside) if kind == "busy" else quota_of(number):
                    speed = tokens_per_second(core, options.seconds, name)
                speeds[kind, number] = max(speeds[kind, number], speed)
                if beside:
                    each = (seconds_of(beside) - before) / len(beside) * threads
                    got[kind, number].append((time.process_time() - own) / each)
    finally:
        for other in others:
            other.kill()
            other.wait()
    report = []
    for (kind, number), speed in speeds.items():
        share = min(1.0, cores / (threads + number) if kind == "busy" else number / threads)
        kept = speed / alone / share
        row = {"beside": kind, "number": number, "tokens_per_second": speed, "of_fair_share": kept}
        line = f"  {kind} {number:g}: {speed:6.1f} of {alone:.1f} tokens/s, {kept:.2f} of the fair share {share:.2f}"
        if times := got[kind, number]:
            row["processor_time_of_theirs"] = statistics.median(times)
            line += f"; processor time of a thread over theirs: {statistics.median(times):.2f}"
        report.append(row)
        print(line)
    if options.json:
        about = {"cpu": cpu_name(), "dtype": options.dtype, "threads": threads, "cores": cores, "alone": alone}
        options.json.write_text(json.dumps(about | {"cases": report}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
