"""Decoders with sight on the simulated device: no host waits, no races, and the tokens of the CPU, at every depth.

What the CPU gives without running ahead, with whole passes, is compared with transformers in ``tests/multimodal``.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import pytest

from headway.core.config import EngineArgs, Thresholds
from headway.core.encode import Encoding
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.runner.encoder_passes import PassRunner
from tests.engine.harness import run
from tests.multimodal import test_engine, test_gemma3n, test_sounds
from tests.multimodal.test_engine import cache_rows
from tests.multimodal.tiny_sight import arguments, plain, request
from tests.sim.harness import simulated

BLOCK_BYTES = 2 * 8 * 2 * 2 * 8 * 4
"""Of 8 tokens in two layers of two heads of 8."""


HEARD = "gemma4 heard"
"""Gemma 4 with prompts that have recordings, too."""
HEARS = "gemma3n"
"""Without its tower that sees."""


def checkpoint(name: str) -> str:
    return plain(name.split()[0])


def prompts(name: str) -> list[list[Any]]:
    if name == HEARS:
        return test_gemma3n.prompts()
    return test_sounds.prompts() if name == HEARD else test_engine.prompts(name)


@cache
def oracle(name: str) -> EngineCore:
    """The CPU, synchronous, with room for everything."""
    args = arguments(checkpoint(name), run_ahead=0, max_model_len=136, encoder_step_ratio=float("inf"))
    return build_engine(args, progress=False)


def traffic(name: str, info: Any) -> list[AddRequest]:
    return [request(info, f"{i}", prompts(name)[(i + 2) % 5], max_tokens=26 + i % 4) for i in range(6)]


def noted(passes: PassRunner | None) -> list[Encoding]:
    """What ``passes`` is told to run from now on."""
    assert passes is not None
    told, run_pass = list[Encoding](), passes.run

    def note(encoding: Encoding, item: Any) -> None:
        told.append(encoding)
        run_pass(encoding, item)

    passes.run = note  # type: ignore[method-assign]
    return told


@pytest.mark.parametrize(
    ("name", "depth", "seed", "eager"),
    [
        ("gemma3", 4, 2, False), ("qwen2.5", 2, 3, False), ("qwen3", 4, 4, False), ("paligemma", 2, 5, False),
        ("llava", 0, 6, False), ("smolvlm", 1, 7, False), ("gemma3", 1, 1, True), ("qwen3", 4, 8, True),
        ("gemma4", 2, 9, False), ("internvl", 1, 10, True), ("mistral3", 2, 11, False),
        (HEARD, 4, 12, False), (HEARD, 1, 13, True), (HEARS, 4, 14, False), (HEARS, 2, 15, True),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_cpu(name: str, depth: int, seed: int, eager: bool) -> None:
    """Requests arrive in two waves, on few blocks and few rows of the encoder cache, so that they preempt and evict; one is
    aborted while its picture is under way. Beside rows that decode a step does one block of the tower."""
    wanted = run(oracle(name), traffic(name, oracle(name).info.vision))
    # Windows have a group of blocks of their own, each of half the layers.
    blocks = 13 if name in ("gemma3", "gemma4", HEARD, HEARS) else 18 if name == "internvl" else 19
    options = vars_of(
        arguments(
            checkpoint(name), run_ahead=depth, max_num_seqs=4 if name == "internvl" else 3,
            max_num_batched_tokens=96 if name == "paligemma" else 28,
            encoder_step_ratio=1e-9, kv_cache_memory_bytes=blocks * BLOCK_BYTES, max_model_len=136, enforce_eager=eager,
        )
    )  # fmt: skip
    small = Thresholds(encoder_cache_rows=cache_rows(name), encoder_rows=32)
    with simulated(seed, **options, thresholds=small) as (core, _, watch):
        passes = core._runner.executor.passes
        told = noted(passes)
        batch = traffic(name, core.info.vision)
        answers = run(core, batch[:4])
        core.add(batch[5])  # decodes meanwhile; what it brings then is not kept
        leave_amid_a_pass(core, told, batch[4])
        rest = run(core, [])[batch[5].request_id].token_ids
        stats = core.stats()
    for key, answer in answers.items():
        assert answer.error is None and answer.token_ids == wanted[key].token_ids, key
    assert rest and wanted[batch[5].request_id].token_ids[-len(rest) :] == rest
    assert watch.num_steps and any(not each.is_last for each in told), "no pass was cut"
    assert stats.num_preemptions or name in ("gemma3", "gemma4", HEARD, HEARS, "paligemma", "smolvlm"), (
        "blocks never ran out"
    )
    assert passes is not None and bool(passes.num_replays) == bool(stats.num_graph_steps) == (not eager)


def leave_amid_a_pass(core: EngineCore, told: list[Encoding], message: AddRequest) -> None:
    """The request is aborted when some of the tower's blocks have been launched for it, beside whatever decodes."""
    core.add(message)
    for _ in range(6):
        core.step()
        if told and not told[-1].is_last:
            break
    core.abort(message.request_id)


def vars_of(args: EngineArgs) -> dict[str, Any]:
    """The fields that were set, for ``simulated``."""
    usual = EngineArgs(model="x")
    found = {each.name: getattr(args, each.name) for each in fields(args)}
    return {name: value for name, value in found.items() if name != "device" and value != getattr(usual, name)}
