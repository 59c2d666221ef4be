"""What two GPUs of one host are worth: sums, parts of a model, shared experts, replicas, waits, a slow rank.

    python bench/two_cards.py --out FOLDER [--seconds 530] [--only PART ...] [--tiny]

Each part runs in a process of its own with a limit of its own, the most valuable first, and prints one line; its figures are in
FOLDER/PART.json, what it printed besides in FOLDER/PART.log. A part that fails or takes too long says so and costs the others
nothing; one for which no time is left is not begun. Decode steps are in milliseconds, from the difference of two output
lengths (32 and 288 tokens, prompts of 128 random ones, greedy, dummy weights), prefill in tokens a second (64 prompts of
1,024). ``--tiny`` runs small models on CPUs, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from headway import LLM

LEAST_SECONDS = 25.0
"""A part is not begun with less."""
TP: dict[str, Any] = {"tensor_parallel_size": 2}
SLOW_SHARE, SLOW_SECONDS, SLOW_CYCLES = 0.25, 1e-3, 1_750_000
"""Steps that a rank is late in, and by how much; the cycles are a millisecond at 1.75 GHz."""
FLAG, WAITS, DRIVER = "HEADWAY_BENCH_FLAG", "HEADWAY_BENCH_WAITS", "HEADWAY_BENCH_DRIVER"
QUIET, LATE_DEVICE, LATE_HOST = range(3)
TINY_MODEL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
TINY_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


class Lab:
    """Sizes, and engines of the shapes in ``headway/cli/bench/anchors/models``."""

    def __init__(self, out: Path, tiny: bool) -> None:
        self.out, self.tiny = out, tiny
        self.rows = (1, 2) if tiny else (1, 8, 64, 256)
        self.lengths = (4, 12) if tiny else (32, 288)
        self.prompt, self.prefill = (8, (2, 32)) if tiny else (128, (64, 1024))
        self.requests = (8, (5, 12)) if tiny else (1024, (100, 512))
        self.notes: list[str] = []

    @contextmanager
    def open(self, name: str, **more: Any) -> Iterator[LLM]:
        """An engine; notes which way its sums go."""
        from headway import LLM
        from headway.cli.bench.anchors.context import find_model, free_memory
        from headway.core.log import logger

        handler = logging.Handler()
        handler.emit = lambda record: self._note(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        given: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 256}
        if self.tiny:
            given = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "max_num_seqs": 16}
            given["kv_cache_memory_bytes"] = 2**22
            given["hf_overrides"] = TINY_MODEL | (TINY_MIXTURE if name == "qwen3_30b_a3b" else {})
        given |= {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
        begun = time.perf_counter()
        llm = LLM(str(find_model(name)), **given | more)
        self._note(f"started in {time.perf_counter() - begun:.1f} s", "started")
        try:
            yield llm
        finally:
            llm.close()
            del llm
            free_memory()
            logger.removeHandler(handler)

    def _note(self, message: str, word: str = "all-reduces") -> None:
        if word in message:
            self.notes.append(message)

    def step_ms(self, llm: LLM, rows: int, seed: int = 0) -> float:
        """Milliseconds of a decode step."""
        from headway.cli.bench.anchors.context import plain, random_prompts, seconds, step_ms

        seconds(llm, random_prompts(random.Random(5), rows, self.prompt, llm.model_info.vocab_size), plain(8))
        return round(step_ms(llm, rows, self.prompt, self.lengths, [{}], rows + seed), 3)

    def prefill_rate(self, llm: LLM) -> int:
        """Tokens a second."""
        from headway.cli.bench.anchors.context import plain, random_prompts, seconds

        count, length = self.prefill
        prompts = [random_prompts(random.Random(n), count, length, llm.model_info.vocab_size) for n in range(3)]
        return round(count * length / min(seconds(llm, each, plain(1)) for each in prompts))

    def request_rate(self, llm: LLM) -> float:
        """Requests a second, all at once."""
        from headway.cli.bench.anchors.context import seconds
        from headway.cli.bench.offline import nano_workload

        count, lengths = self.requests
        prompts, params = nano_workload(count, llm.model_info.vocab_size, False, lengths)
        seconds(llm, prompts[: count // 4], params[: count // 4])
        return round(count / seconds(llm, prompts, params), 2)

    def figures(self, name: str, rows: tuple[int, ...], **more: Any) -> dict[str, Any]:
        """Steps and prefill of an engine."""
        found: dict[str, Any] = {}
        with self.open(name, **more) as llm:
            for each in rows:
                found[f"ms_{each}"] = self.step_ms(llm, each)
                self.keep(found)
            found["prefill_tok_s"] = self.prefill_rate(llm)
        return found

    def keep(self, found: dict[str, Any]) -> None:
        """Write what there is so far: a part may be ended at its limit."""
        self.out.write_text(json.dumps(found | {"notes": self.notes}))


# -- parts -------------------------------------------------------------------------------------------------------------


def reduce(lab: Lab) -> dict[str, Any]:
    """Sums by size, ours and NCCL's."""
    if lab.tiny:
        return {"skipped": "needs GPUs"}
    command = [sys.executable, str(ROOT / "bench" / "all_reduce.py"), "--json", str(lab.out)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if done.returncode:
        raise SystemExit(f"bench/all_reduce.py ended with {done.returncode}")
    found: dict[str, Any] = json.loads(lab.out.read_text())
    return found


def llama(lab: Lab) -> dict[str, Any]:
    """Llama-8B in two parts."""
    return lab.figures("llama_8b", lab.rows, **TP)


def mixture(lab: Lab) -> dict[str, Any]:
    """Qwen3-30B-A3B in two parts."""
    return lab.figures("qwen3_30b_a3b", (lab.rows[0], *lab.rows[-2:]), **TP)


def experts(lab: Lab) -> dict[str, Any]:
    """Qwen3-30B-A3B on two replicas that share its experts; rows of both together."""
    shared = {"data_parallel_size": 2, "enable_expert_parallel": True}
    return lab.figures("qwen3_30b_a3b", (lab.rows[0], *lab.rows[-2:]), **shared)


def replicas(lab: Lab) -> dict[str, Any]:
    """Requests of Qwen3-0.6B on one card and on two."""
    found: dict[str, Any] = {}
    for cards in (1, 2):
        more = {"data_parallel_size": 2} if cards == 2 else {}
        with lab.open("qwen3_06b", **more) as llm:
            found[f"requests_s_{cards}"] = lab.request_rate(llm)
            lab.keep(found)
    return found | {"times": round(found["requests_s_2"] / found["requests_s_1"], 3)}


def waits(lab: Lab) -> dict[str, Any]:
    """Unsanctioned waits of both ranks' threads; and the step beside a rank that is late in a quarter of its steps."""
    found: dict[str, Any] = {}
    rows = lab.rows[-2]
    with tempfile.TemporaryDirectory() as folder:
        flag, counts = Path(folder, "flag"), Path(folder, "waits")
        flag.write_bytes(bytes(mmap.PAGESIZE))
        os.environ |= {FLAG: str(flag), WAITS: str(counts)}
        with flag.open("r+b") as file, mmap.mmap(file.fileno(), 1) as memory, own_followers():
            counted = {} if lab.tiny else {"count_host_waits": True}
            with lab.open("qwen3_06b", **TP, **counted) as llm:
                kinds = (("ms_quiet", QUIET), ("ms_late_on_device", LATE_DEVICE), ("ms_late_on_host", LATE_HOST))
                for name, kind in (*kinds, ("ms_quiet_again", QUIET)):
                    memory[0] = 0 if lab.tiny and kind == LATE_DEVICE else kind
                    found[name] = lab.step_ms(llm, rows, kind)
                    lab.keep(found)
                memory[0] = QUIET
                stats = llm.stats()
                found |= {"waits_rank_0": stats.host_waits, "steps": stats.num_steps}
        found["waits_rank_1"] = json.loads(counts.read_text()) if counts.exists() else "not told"
    found["late_share"], found["late_ms"] = SLOW_SHARE, SLOW_SECONDS * 1e3
    return found


@contextmanager
def counted_by_the_driver() -> Iterator[dict[str, int]]:
    """Unsanctioned waits of all of this process's threads, by CUPTI; filled when the context ends."""
    from bench.driver_waits import heard_by_the_driver

    found = dict[str, int]()
    with heard_by_the_driver() as (log, probe):
        yield found
    found["calls seen"] = probe.calls_seen
    for finding in log.unsanctioned:
        name = f"{finding.kind} {finding.call} {Path(finding.site.file).name}:{finding.site.line}"
        found[name] = found.get(name, 0) + finding.count


def driver_waits(lab: Lab) -> dict[str, Any]:
    """Unsanctioned waits of both ranks at the driver boundary while requests run."""
    found: dict[str, Any] = {}
    if lab.tiny:
        return {"cupti": "there is no driver on a CPU"}
    with tempfile.TemporaryDirectory() as folder:
        flag, counts = Path(folder, "flag"), Path(folder, "waits")
        flag.write_bytes(bytes(mmap.PAGESIZE))
        os.environ |= {FLAG: str(flag), WAITS: str(counts), DRIVER: "1"}
        with own_followers(), lab.open("qwen3_06b", **TP) as llm:
            lab.step_ms(llm, lab.rows[-2])
            with counted_by_the_driver() as heard:
                before = llm.stats().num_steps
                found["ms"] = lab.step_ms(llm, lab.rows[-2], 1)
                found["steps"] = llm.stats().num_steps - before
            found["rank_0"] = heard
        found["rank_1"] = json.loads(counts.read_text()) if counts.exists() else "not told"
    return found


PARTS: dict[str, tuple[Callable[[Lab], dict[str, Any]], float, dict[str, str]]] = {
    "reduce": (reduce, 90, {}),
    "llama": (llama, 130, {}),
    "llama-nccl": (llama, 90, {"HEADWAY_PEER_REDUCE": "0"}),
    "mixture": (mixture, 120, {}),
    "replicas": (replicas, 110, {}),
    "experts": (experts, 120, {}),
    "waits": (waits, 70, {}),
    "cupti": (driver_waits, 70, {}),
}
"""Name -> what it does, seconds it may take, what it adds to the environment."""


# -- a follower that can be late ---------------------------------------------------------------------------------------


@contextmanager
def own_followers() -> Iterator[None]:
    """Followers are this file's: they wait when they are told to, and count their waits."""
    begin: Any = subprocess.Popen

    def popen(command: Any, **more: Any) -> Any:
        if isinstance(command, list) and "headway.engine.follower" in command:
            given = command[command.index("headway.engine.follower") + 1 :]
            command = [sys.executable, "-P", __file__, "--follower", *given]
        return begin(command, **more)

    subprocess.Popen = popen  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        subprocess.Popen = begin  # type: ignore[misc]


def follower(arguments: list[str]) -> int:
    """A follower's process."""
    import torch

    from headway.engine import follower as module
    from headway.engine.host_waits import HostWaits
    from headway.runner.executor import Executor

    run, follow, rng = Executor.run, module.follow, random.Random(1)
    with Path(os.environ[FLAG]).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 1)

    def late(self: Any, *given: Any) -> Any:
        kind = memory[0]
        if kind != QUIET and rng.random() < SLOW_SHARE:
            if kind == LATE_HOST:
                time.sleep(SLOW_SECONDS)
            else:
                with self.device.main.active():
                    torch.cuda._sleep(SLOW_CYCLES)  # noqa: SLF001 - torch has no other
        return run(self, *given)

    def watched(runner: Any, inbox: Any, world: Any) -> None:
        if not runner.device.asynchronous:
            follow(runner, inbox, world)
            return
        if DRIVER in os.environ:
            with counted_by_the_driver() as heard:
                follow(runner, inbox, world)
            Path(os.environ[WAITS]).write_text(json.dumps(heard))
            return
        counted = HostWaits(runner.device)
        try:
            with counted.watching():
                follow(runner, inbox, world)
        finally:
            Path(os.environ[WAITS]).write_text(json.dumps(counted.counts()))

    setattr(Executor, "run", late)  # noqa: B010 - of another signature
    module.follow = watched
    return module.main(arguments)


# -- all of them -------------------------------------------------------------------------------------------------------


def begin(name: str, out: Path, seconds: float, tiny: bool) -> str:
    """Run a part in a process of its own; what came of it."""
    path = out / f"{name}.json"
    command = [sys.executable, __file__, "--out", str(out), "--part", name, *(["--tiny"] if tiny else [])]
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"} | PARTS[name][2]
    with (out / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = f"ended with {code}" if (code := child.wait(seconds)) else ""
        except subprocess.TimeoutExpired:
            status = f"took longer than {seconds:.0f} s"
    try:
        os.killpg(child.pid, signal.SIGKILL)  # followers, too
    except ProcessLookupError:
        pass
    child.wait()
    figures = path.read_text() if path.exists() else "nothing"
    if not status:
        return figures
    last = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()[-3:]
    return f"{status}; so far {figures}; {' | '.join(last)[-600:]}"


def main() -> None:
    """Run all parts, or be one."""
    if sys.argv[1:2] == ["--follower"]:
        sys.exit(follower(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=530.0)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part:
        lab = Lab(args.out / f"{args.part}.json", args.tiny)
        found = PARTS[args.part][0](lab)
        lab.keep(found)
        return
    end = time.monotonic() + args.seconds
    for name in args.only:
        begun = time.monotonic()
        if end - begun < LEAST_SECONDS:
            print(f"{name}: not begun, {end - begun:.0f} s are left", flush=True)
            continue
        said = begin(name, args.out, min(PARTS[name][1], end - begun), args.tiny)
        print(f"{name} ({time.monotonic() - begun:.0f} s): {said}", flush=True)


if __name__ == "__main__":
    main()
