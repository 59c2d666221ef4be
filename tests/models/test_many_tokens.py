"""Steps of many tokens with wide products, and steps that end with the rows' last tokens, give what the others give."""

from __future__ import annotations

import pytest
import torch

import headway.kernels.linear
from headway.kernels.hopper import runs_gluon
from headway.kernels.wide_linear import wide_add, wide_gate_up, wide_qkv
from headway.kernels.wide_linear.tiles import Counts, Kind
from headway.models.layers import many_tokens
from headway.models.layers.many_tokens import going_wide
from tests.models.harness import Machine, Row
from tests.models.tiny import TINY, hf_model, ours, pair

OPS = (wide_qkv, wide_gate_up, wide_add)
TOKENS = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(3)).tolist()
STEPS = [
    [Row(1, TOKENS[:17])],
    [Row(1, TOKENS[17:18], 17)],
    [Row(1, TOKENS[18:19], 18), Row(2, [5], 3, alive=False), Row(0, TOKENS[:9])],
]
"""17 tokens, a decode row, and 11 tokens of three rows."""


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each op ran, by its reference: tiny models do not fit the kernels."""
    monkeypatch.setattr(headway.kernels.linear, "_can_pack", lambda *_: False)  # as on a GPU
    counts: dict[str, int] = {op.name: 0 for op in OPS}
    for op in OPS:

        def counted(*args: object, run: object = op.reference, name: str = op.name) -> object:
            counts[name] += 1
            assert callable(run)
            return run(*args)

        for device in ("_cpu_impl", "_cuda_impl"):
            monkeypatch.setattr(op, device, counted)
    return counts


@pytest.mark.parametrize("full", [1, 99])
@pytest.mark.parametrize("never", ["", "wide_qkv", "wide_gate_up", "wide_add"])
def test_wide_steps_equal_separate_steps(
    never: str, full: int, used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``full``: tokens from which on steps with decode rows are wide, too."""
    oracle = hf_model(TINY["qwen3"])
    plain, wide, ending = (Machine(ours(oracle)) for _ in range(3))
    config = plain.model.config
    monkeypatch.setattr(many_tokens, "HEAD_SIZE", config.head_dim)
    monkeypatch.setattr(many_tokens, "FULL_TOKENS", full)

    used_for: dict[Kind, Counts] = {
        "wide_qkv": (range(10, 15), range(16, 99)),
        "wide_gate_up": (range(12, 99),),
        "wide_add": (range(10, 12), range(17, 18)),
    }

    def counts(kind: Kind, outputs: int, inputs: int) -> Counts:
        return () if kind == never else used_for[kind]

    wide.model.go_wide(counts)
    ending.model.go_wide(counts)
    for number, step in enumerate(STEPS):
        used.update(dict.fromkeys(used, 0))
        expected = plain.step(step)
        for wanted, found in zip(expected, wide.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        tokens = sum(len(row.tokens) for row in step) if full == 1 or len(step[0].tokens) > 1 else 0
        wide_kinds = {k for k, parts in used_for.items() if k != never and any(tokens in part for part in parts)}
        adding = ("wide_gate_up" in wide_kinds) + ("wide_qkv" in wide_kinds) if "wide_add" in wide_kinds else 0
        for kind in used_for:
            each = adding if kind == "wide_add" else int(kind in wide_kinds)
            assert used[kind] == config.num_layers * each, (number, kind)
        last = torch.stack([row[-1] for row in expected])
        torch.testing.assert_close(ending.last_step(step), last, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
@pytest.mark.parametrize("way", ["separate", "fused"])
def test_the_last_layer_may_end_with_the_rows_last_tokens(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, decode rows, zombies and padding; what is written into the cache is the same."""
    monkeypatch.setattr(headway.kernels.linear, "_can_pack", lambda *_: False)
    case = pair(name)
    whole, ending = Machine(case.model), Machine(case.model)
    if way == "fused":
        ending = Machine(ours(hf_model(TINY[name])))
        ending.model.fuse(lambda *_: 16)
    for step in STEPS:
        expected = torch.stack([each[-1] for each in whole.step(step, pad_rows=2, pad_tokens=3)])
        found = ending.last_step(step, pad_rows=2, pad_tokens=3)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    for mine, wanted in zip(ending.kv.keys + ending.kv.values, whole.kv.keys + whole.kv.values, strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-4, rtol=1e-4)


def test_biases_keep_products_narrow() -> None:
    model = ours(hf_model(TINY["llama-biases"]))
    model.go_wide(lambda *_: (range(1, 99),))
    assert not model._many_tokens


def test_only_half_precision_on_hopper_goes_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.kernels.hopper.version", lambda _: "3.6.0")
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for capability, wide in (((9, 0), True), ((8, 9), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        runs_gluon.cache_clear()
        assert (going_wide(cuda, torch.bfloat16) is not None) is wide
        assert going_wide(cuda, torch.float32) is None and going_wide(cpu, torch.bfloat16) is None
    runs_gluon.cache_clear()
