"""Steps of some tokens with linear layers that start early give what the separate kernels give."""

from __future__ import annotations

import pytest
import torch

import headway.kernels.linear
from headway.kernels.hopper import runs_gluon
from headway.kernels.mid_linear import linear_parts, mid_add, mid_gate_up, mid_linear, reference
from headway.kernels.mid_linear.tiles import TABLE, Kind, MidTile
from headway.models.layers.few_tokens import FewTokens
from headway.models.layers.mid_tokens import MidTokens, starting_early
from tests.models.harness import Machine, Row
from tests.models.tiny import TINY, hf_model, ours

OPS = (mid_linear, mid_gate_up, mid_add, linear_parts)
KINDS: tuple[Kind, ...] = ("mid_linear", "mid_gate_up", "mid_add", "linear_parts")
TOKENS = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(
    "last",
    [{}, {"mid_add": 0}, {"mid_add": 2}, {"mid_add": 0, "linear_parts": 2}, {"mid_linear": 2, "mid_gate_up": 2}],
    ids=repr,
)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_early_steps_equal_separate_steps(name: str, last: dict[Kind, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode, prefill and mixed batches; ops may end at different numbers of tokens, above 16 none is used here."""
    monkeypatch.setattr(headway.kernels.linear, "_can_pack", lambda *_: False)  # as on a GPU
    # Tiny models do not fit the kernel; the references do, in two parts.
    monkeypatch.setattr(reference, "tile_for", lambda *_: MidTile(16, 64, 2, 1, 1, 4))
    used: dict[str, int] = {}
    for op in OPS:

        def counted(*args: object, run: object = op.reference, name: str = op.name) -> object:
            used[name] = used.get(name, 0) + 1
            assert callable(run)
            return run(*args)

        for device in ("_cpu_impl", "_cuda_impl"):
            monkeypatch.setattr(op, device, counted)

    oracle = hf_model(TINY[name])
    plain, early = Machine(ours(oracle)), Machine(ours(oracle))
    early.model.start_early(lambda kind, outputs, inputs: range(1, last.get(kind, 16) + 1))
    steps = [
        [Row(1, TOKENS[:17])],
        [Row(1, TOKENS[17:18], 17)],
        [Row(1, TOKENS[18:19], 18), Row(2, [5], 3, alive=False), Row(0, TOKENS[:9])],
    ]
    layers = early.model.config.num_layers
    wanted_uses = dict.fromkeys((op.name for op in OPS), 0)
    for count, step in zip((17, 1, 11), steps, strict=True):
        for wanted, found in zip(plain.step(step), early.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        for kind, uses in expected_uses(count, last, layers).items():
            wanted_uses[kind] += uses
        assert {kind: used.get(kind, 0) for kind in wanted_uses} == wanted_uses


def expected_uses(tokens: int, last: dict[Kind, int], layers: int) -> dict[str, int]:
    """Runs of each op in a step of so many tokens."""
    within: dict[Kind, bool] = {kind: tokens <= last.get(kind, 16) for kind in KINDS}
    meeting = within["mid_add"] and within["mid_linear"] and within["mid_gate_up"]
    early = meeting or within["linear_parts"]
    return {
        "mid_linear": layers * (early and within["mid_linear"]) + within["mid_linear"],  # and the output layer
        "mid_gate_up": layers * (early and within["mid_gate_up"]),
        "mid_add": 2 * layers * meeting,
        "linear_parts": 2 * layers * (within["linear_parts"] and not meeting),
    }  # fmt: skip


def test_only_half_precision_on_hopper_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.kernels.hopper.version", lambda _: "3.6.0")
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for capability, starts in (((9, 0), True), ((8, 9), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        runs_gluon.cache_clear()
        assert (starting_early(cuda, torch.bfloat16) is not None) is starts
        half = starting_early(cuda, torch.float16)
        assert (half is not None) is starts
        for (kind, outputs, size), found in TABLE.items():
            assert half is None or half(kind, outputs, size).stop == (0 if kind == "mid_add" else max(found) + 1), (
                "beyond float16"
            )
        assert starting_early(cuda, torch.float32) is None and starting_early(cpu, torch.bfloat16) is None
    runs_gluon.cache_clear()


def test_early_steps_go_before_fused_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both are for a number of tokens, layers start early; below it they are fused."""
    monkeypatch.setattr(headway.kernels.linear, "_can_pack", lambda *_: False)
    monkeypatch.setattr(reference, "tile_for", lambda *_: MidTile(16, 64, 2, 1, 1, 4))
    used: list[str] = []
    for layer, name in ((FewTokens, "few"), (MidTokens, "mid")):

        def noted(*args: object, run: object = layer.forward, name: str = name) -> object:
            used.append(name)
            assert callable(run)
            return run(*args)

        monkeypatch.setattr(layer, "forward", noted)
    machine = Machine(ours(hf_model(TINY["qwen3"])))
    machine.model.fuse(lambda *_: 16)
    machine.model.start_early(lambda *_: range(9, 17))
    for tokens, name in ((8, "few"), (9, "mid"), (16, "mid"), (17, "")):
        used.clear()
        machine.step([Row(0, TOKENS[:tokens])])
        assert set(used) == ({name} if name else set()), tokens
