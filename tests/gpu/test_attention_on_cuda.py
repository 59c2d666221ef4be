"""Kinds of attention on a card: each form against the reference in bfloat16, and whole engines against those of the CPU, with
graphs and without a wait."""

from __future__ import annotations

from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.engine.boot import build_engine
from headway.kernels.decode_attention import decode_attention
from headway.kernels.paged_attention import paged_attention
from headway.kernels.testing import assert_close, make_paged_inputs, make_random
from headway.models import registry
from tests.attention.kinds import KINDS, folder_of
from tests.attention.test_kinds import arguments, prompts
from tests.engine.harness import request, run
from tests.gpu.guard import no_waits
from tests.kernels import draft_rows, test_decode_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

DECODE = [(1, 1), (1, 700), (1, 0), (1, 130), (1, 4100), (1, 64)]
MIXED = [(1, 70), (1, 900), (5, 5), (300, 1200), (21, 71), (2, 40)]
RULES: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 128},
    "chunk": {"chunk": 512},
    "chunk and sinks": {"chunk": 100, "sinks": True},
    "slopes": {"slopes": True},
    "all": {"slopes": True, "sinks": True, "window": 300, "soft_cap": 20.0},
}
SHAPES = [((64, 8), 64), ((16, 8), 128), ((8, 4), 256), ((40, 8), 128)]


@pytest.mark.parametrize("cached", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "size"), SHAPES, ids=str)
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_equal_the_reference(
    rule: str, rows: list[tuple[int, int]], heads: tuple[int, int], size: int, cached: torch.dtype | None
) -> None:
    first = next((i for i, (queries, _) in enumerate(rows) if queries > 1), len(rows))
    inputs = make_paged_inputs(
        rows, num_decode_rows=first, heads=heads, size=size, block_size=16, dtype=torch.bfloat16, device="cuda",
        heads_first=True, cached=cached, pad_rows=2, pad_tokens=3, bound=4200,
    )  # fmt: skip
    kind = dict(RULES[rule])
    for name, seed in (("sinks", 1), ("slopes", 2)):
        drawn = make_random(heads[0], dtype=torch.float32, device="cuda", seed=seed)
        kind[name] = (drawn if name == "sinks" else drawn.abs() / 16) if kind.get(name) else None
    wanted = inputs.arguments(size**-0.5, **kind)
    on_cpu = [each.cpu() if isinstance(each, torch.Tensor) else each for each in wanted]
    expected = paged_attention.reference(*on_cpu).cuda()
    for reads_this_step in (False, True):
        assert_close(paged_attention(*wanted, reads_this_step), expected)


SHARED: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {"heads": (8, 1), "size": 256, "window": 512}),
    (70, 1, {"heads": (8, 1), "size": 256, "window": 512}),
    (300, 1, {"heads": (8, 1), "size": 256}),
    (70, 2, {"heads": (8, 1), "size": 256, "window": 512}),
    (7, 4, {"heads": (8, 2), "size": 256}),
    (7, 1, {"heads": (8, 2), "size": 256, "cached": torch.float8_e4m3fn}),
    (300, 1, {"heads": (16, 8), "size": 128, "soft_cap": 20.0}),
    (70, 4, {"heads": (16, 8), "size": 128, "cached": torch.float8_e4m3fn}),
    (7, 1, {"heads": (8, 2), "size": 64, "sinks": True, "window": 100}),
    (70, 1, {"heads": (8, 2), "size": 96}),
]


@pytest.mark.parametrize(("rows", "width", "shape"), SHARED, ids=str)
def test_shared_keys_are_read_behind_their_writer(rows: int, width: int, shape: dict[str, Any]) -> None:
    """Right behind the kernel that writes them, in a graph: other keys each time, and the outputs are those of kernels with a
    wait between them. Lengths end on both sides of tiles' edges; with many rows all keys of some are in the first tiles."""
    lengths = [max(width, (7 + 97 * n) % (900 if rows < 100 else 300)) for n in range(rows)]
    kind = {**shape, "dtype": torch.bfloat16, "block_size": 16, "bound": 1024}
    module: Any = test_decode_attention if width == 1 else draft_rows
    wide = {} if width == 1 else {"width": width}
    contexts = lengths if width == 1 else [(width - n % 2, length) for n, length in enumerate(lengths)]
    module.check(module.make(contexts, "cuda", shares=True, **wide, **kind))
    own = module.make(contexts, "cuda", **wide, **kind)
    sharing = [*own[:-1], True]
    inputs = [torch.randn_like(own[0]) for _ in range(8)]
    queries = own[9] * own[7].shape[3]

    def both(qkv: torch.Tensor, wait: bool) -> torch.Tensor:
        decode_attention(qkv, *own[1:])
        if wait:
            torch.cuda.synchronize()
        found: torch.Tensor = decode_attention(qkv[:, :queries], *sharing[1:])
        return found

    expected = [both(each, wait=True).clone() for each in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [both(each, wait=False) for each in inputs]
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for n, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(mine, theirs), n
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", KINDS)
def test_engines_agree_with_the_cpu(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens in float32 with graphs, at depth 2, in chunks and behind prefix hits."""
    own = {"KindsForCausalLM": "tests.attention.kinds:KindsForCausalLM"}
    monkeypatch.setattr(registry, "ARCHITECTURES", MappingProxyType(dict(registry.ARCHITECTURES) | own))
    asked = [
        request(str(n), prompt, temperature=0.0, ignore_eos=True, max_tokens=12) for n, prompt in enumerate(prompts())
    ]
    found = []
    for device, depth, guard in (("cpu", 0, nullcontext()), ("cuda", 2, no_waits(monkeypatch))):
        changes = arguments(name, device=device, run_ahead=depth, kv_cache_dtype=dtype, max_num_batched_tokens=40)
        core = build_engine(EngineArgs(**changes | {"model": str(folder_of(name))}), progress=False)
        with guard:
            for _ in range(2):
                answers = run(core, asked)
        assert device == "cpu" or core.stats().num_graph_steps > 0
        found.append({key: answer.token_ids for key, answer in answers.items()})
        core.shutdown()
    same = sum(found[0][key] == found[1][key] for key in found[0])
    assert same >= len(asked) - 1, found  # a tie may fall the other way
