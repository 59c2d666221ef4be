"""Drafts on models with states: tokens, log-probabilities and ends are those of plain decoding, whatever is accepted, on
the CPU and on the simulated device, which checks every ring; and rings without drafts."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from headway.core.chunks import ring_places
from headway.core.config import EngineArgs, Thresholds
from headway.core.errors import ConfigError
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.engine.states import WRITE_BACK, state_storage
from headway.models.interface import ModelSpec
from headway.state.cache_pool import StateStorage, bytes_per_block
from tests.engine.forced_drafts import Pattern, forced
from tests.engine.harness import Answer, request, run
from tests.engine.test_depths import close
from tests.engine.tiny_llama import save_tiny_llama
from tests.recurrent.test_engine import CPU, arguments, prompts
from tests.recurrent.test_prefixes import conversation
from tests.recurrent.tiny_hybrids import pair
from tests.sim.harness import simulated
from tests.speculative.tiny_eagle import save_eagle

PATTERNS: tuple[Pattern, ...] = ("all", "none", "random")
KINDS = ("mamba", "mamba2", "falcon-h1", "qwen3-next", "lfm2")
"""Mamba-1, Mamba-2, the same beside attention, gated delta net, short convolutions."""
OTHERS = (
    "jamba", "nemotron-h", "granite-hybrid", "qwen3.5", "olmo-hybrid", "zamba2", "minimax", "kimi-linear"
)  # fmt: skip
BLOCK = 8
ROWS = 4
TOLERANCE = 1e-3
"""Of log-probabilities. Plain decoding in other chunks differs as much as with drafts: 2e-4 at one token, 1e-5 at others."""


def requests() -> list[AddRequest]:
    """More than slots, prompts shorter than a row of drafts and longer than a chunk."""
    found = []
    for number, prompt in enumerate(prompts()):
        options: dict[str, Any] = {"temperature": 1.1 if number % 3 == 2 else 0.0, "ignore_eos": number % 2 == 0}
        found.append(request(f"r{number}", prompt, seed=number, max_tokens=18 + number, logprobs=2, **options))
    return found


def cpu_engine(name: str, **changes: Any) -> EngineCore:
    drafts = changes.pop("drafts", None)
    return build_engine(EngineArgs(**arguments(name, **CPU | changes)), progress=False, drafts=drafts)


@functools.cache
def truth(name: str) -> dict[str, Answer]:
    core = cpu_engine(name)
    found = run(core, requests())
    core.shutdown()
    return found


def check(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert answers.keys() == expected.keys()
    for key, answer in answers.items():
        try:
            close(answer, expected[key], TOLERANCE)
        except AssertionError as error:
            error.add_note(key)
            raise


def memory(name: str, blocks: int, number: int) -> int:
    """Bytes for ``ROWS`` requests, no checkpoint and so many blocks."""
    layout = pair(name).model.spec.cache
    replays = ring_places(WRITE_BACK, number + 1) if layout.recurrent else 0
    states = StateStorage(ROWS, torch.float32, drafts=number, replays=replays).bytes(layout)
    return states + blocks * bytes_per_block(layout, BLOCK, torch.float32)


def on_cpu(name: str, number: int, pattern: Pattern, depth: int, *, preempting: bool) -> None:
    changes: dict[str, Any] = {"run_ahead": depth, "drafts": forced(requests(), truth(name), number, pattern)}
    if preempting:
        changes["kv_cache_memory_bytes"] = memory(name, 19, number)
    core = cpu_engine(name, **changes)
    check(run(core, requests()), truth(name))
    assert (core.stats().num_preemptions > 0) == preempting
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_tokens_of_plain_decoding(name: str, number: int) -> None:
    """Patterns, depths and pools by turns; a model without attention has no blocks to run out of."""
    turn = KINDS.index(name) + number
    preempting = name not in ("mamba", "mamba2") and turn % 2 == 0
    on_cpu(name, number, PATTERNS[turn % 3], (0, 1, 2, 4)[turn % 4], preempting=preempting)


@pytest.mark.parametrize(("name", "number", "pattern", "depth"), [
    ("zamba2", 2, "random", 2), ("minimax", 4, "random", 4), ("kimi-linear", 3, "random", 1),
])  # fmt: skip
def test_rings_of_other_mixers(name: str, number: int, pattern: Pattern, depth: int) -> None:
    """Shared blocks, lightning attention, decays of each channel; on few blocks."""
    on_cpu(name, number, pattern, depth, preempting=True)


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_every_pattern_and_depth(name: str, pattern: Pattern, number: int) -> None:
    for depth in (0, 1, 2, 4):
        for preempting in (False, True)[: 1 if name in ("mamba", "mamba2") else 2]:
            on_cpu(name, number, pattern, depth, preempting=preempting)


def on_simulated_device(name: str, number: int, pattern: Pattern, depth: int, **changes: Any) -> None:
    drafts = forced(requests(), truth(name), number, pattern)
    changes = arguments(name, run_ahead=depth, enforce_eager=depth == 1, max_num_batched_tokens=48) | changes
    with simulated(11 + number, drafts=drafts, **changes) as (core, _, _):
        check(run(core, requests()), truth(name))


@pytest.mark.parametrize(
    ("name", "number", "pattern", "depth"),
    [
        ("mamba", 2, "random", 1), ("falcon-h1", 3, "random", 2), ("qwen3-next", 4, "all", 4), ("lfm2", 1, "none", 0),
        ("kimi-linear", 2, "random", 2),
    ],
)  # fmt: skip
def test_on_the_simulated_device(name: str, number: int, pattern: Pattern, depth: int) -> None:
    small = {"kv_cache_memory_bytes": memory(name, 19, number), "enable_prefix_caching": False}
    on_simulated_device(name, number, pattern, depth, **small if name != "mamba" else {})


@pytest.mark.soak
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_on_the_simulated_device(name: str, pattern: Pattern, depth: int) -> None:
    for number in (1, 2, 3, 4):
        on_simulated_device(name, number, pattern, depth)


@pytest.mark.parametrize(("name", "write_back", "depth"), [("mamba2", 1, 2), ("qwen3-next", 5, 4)])
def test_rings_without_drafts(name: str, write_back: int, depth: int) -> None:
    changes = arguments(name, run_ahead=depth, replayssm_buffer_len=write_back)
    with simulated(5, **changes) as (core, _, _):
        assert core._runner.executor.body.caches.replays == write_back
        check(run(core, requests()), truth(name))


def test_the_width_may_change_from_step_to_step() -> None:
    """Steps without drafts go on with the rings of those that have some."""
    name = "falcon-h1"
    with simulated(3, drafts=forced(requests(), truth(name), 3, "random"), **arguments(name, run_ahead=2)) as (
        core,
        _,
        _,
    ):
        for each in requests():
            core.add(each)
        answers = {each.request_id: Answer() for each in requests()}
        turn = 0
        while core.has_work():
            core._scheduler.width = (1, 4, 4, 1, 1)[turn % 5]
            turn += 1
            for update in core.step():
                answers[update.request_id].take(update)
        check(answers, truth(name))


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


@functools.cache
def heads() -> dict[str, str]:
    """A draft model and an EAGLE-3 head, of the hybrids' vocabulary and hidden size."""
    folders = {name: Path(mkdtemp(prefix=f"headway-{name}-")) for name in ("draft_model", "eagle3")}
    save_tiny_llama(folders["draft_model"])
    save_eagle(folders["eagle3"], third=True)
    return {name: str(folder) for name, folder in folders.items()}


def drafting(method: str, number: int = 3) -> dict[str, Any]:
    if method == "ngram":
        return {"speculative_config": NGRAM | {"num_speculative_tokens": number}}
    config = {"method": method, "model": heads()[method], "num_speculative_tokens": number, "adaptive": False}
    return {"speculative_config": config}


@pytest.mark.parametrize(
    ("name", "method", "depth"),
    [("mamba2", "ngram", 4), ("falcon-h1", "ngram", 1), ("jamba", "draft_model", 2), ("qwen3-next", "eagle3", 2)],
)
def test_drafters_and_prefixes(name: str, method: str, depth: int, monkeypatch: Any) -> None:
    """Prompts that share prefixes, twice, with few checkpoints: hits go on behind states that are certain."""
    monkeypatch.setattr("headway.engine.sizes.CHECKPOINTS_PER_SLOT", 0.75)
    asked = conversation()[:5]
    core = cpu_engine(name)
    expected = run(core, asked)
    core.shutdown()
    changes = arguments(name, run_ahead=depth, max_num_batched_tokens=48, **drafting(method))
    with simulated(8, thresholds=Thresholds(checkpoint_every=24), **changes) as (core, _, _):
        for _ in range(2):
            check(run(core, asked), expected)
        stats = core.stats()
        assert stats.prefix_cache_hits > 0 and stats.num_draft_tokens > 0


def test_a_full_hit_with_a_head_that_reads_hidden_states() -> None:
    """The last block of a prefix is computed once more for the head, so the checkpoint lies a block earlier."""
    core = cpu_engine("qwen3-next", enable_prefix_caching=True, **drafting("eagle3"))
    prompt = [5 + n % 60 for n in range(90)]
    hits = [
        run(core, [request(str(n), prompt, temperature=0.0, max_tokens=3)])[str(n)].num_cached_tokens for n in range(2)
    ]
    core.check_integrity()
    core.shutdown()
    assert hits == [0, 80]


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="replayssm_buffer_len must be an integer from 0 to 64; got 65"):
        EngineArgs(model="x", replayssm_buffer_len=65)
    with pytest.raises(ConfigError, match="drafts need the ring of inputs that replayssm_buffer_len=0 turns off"):
        cpu_engine("mamba2", replayssm_buffer_len=0, **drafting("ngram"))
    with pytest.raises(
        ConfigError, match="replayssm_buffer_len=4 applies to recurrent states, and Lfm2ForCausalLM has none"
    ):
        cpu_engine("lfm2", replayssm_buffer_len=4)
    with pytest.raises(ConfigError, match=r'no layer of the model keeps every token.*use method="ngram"'):
        cpu_engine("mamba2", **drafting("draft_model"))


def test_rings_take_memory_of_requests_alone() -> None:
    """Of 14 places with three drafts; checkpoints are states without rings, and windows have a place for each draft."""
    spec: ModelSpec = pair("qwen3-next").model.spec
    args = EngineArgs(model="x")
    plain, ring = (state_storage(args, spec, torch.float32, number) for number in (0, 3))
    assert (plain.replays, plain.ring_bytes(spec.cache), ring.replays) == (0, 0, 14)
    channels = 2 * 2 * 8 + 4 * 12
    assert ring.words(spec.cache) - plain.words(spec.cache) == 16 + 2 * 3 * channels
    assert ring.ring_bytes(spec.cache) == 2 * 14 * 4 * (2 * 8 + 4 * 12 + 4)
