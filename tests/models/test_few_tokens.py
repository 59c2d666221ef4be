"""Steps of few tokens with fused linear layers give what the separate kernels give."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel module is imported

import headway.kernels.linear
import headway.models.decoder
from headway.kernels.skinny_linear import linear_add, norm_gate_up, norm_linear, skinny_linear
from headway.kernels.skinny_linear.tiles import Kind
from headway.models.layers.few_tokens import fusing
from tests.models.harness import Machine, Row
from tests.models.tiny import TINY, hf_model, ours

OPS = (skinny_linear, norm_linear, norm_gate_up, linear_add)
TOKENS = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("norm_rows", [16, 2, 0])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_fused_steps_equal_separate_steps(name: str, norm_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode, prefill of up to 16 tokens and mixed batches; with 17 tokens both models take the same path."""
    monkeypatch.setattr(headway.kernels.linear, "_can_pack", lambda *_: False)  # as on a GPU
    used: dict[str, int] = {}
    for op in OPS:

        def counted(*args: object, kernel: object = op.implementation("cuda"), name: str = op.name) -> object:
            used[name] = used.get(name, 0) + 1
            assert callable(kernel)
            return kernel(*args)

        for device in ("_cpu_impl", "_cuda_impl"):
            monkeypatch.setattr(op, device, counted)

    def rows(kind: Kind, outputs: int, inputs: int) -> int:
        return norm_rows if kind.startswith("norm") else 16

    oracle = hf_model(TINY[name])
    plain, fused = Machine(ours(oracle)), Machine(ours(oracle))
    fused.model.fuse(rows)
    steps = [
        [Row(1, TOKENS[:17])],
        [Row(1, TOKENS[17:18], 17)],
        [Row(1, TOKENS[18:19], 18), Row(2, [5], 3, alive=False), Row(0, TOKENS[:9])],
    ]
    for count, step in zip((0, 1, 2), steps, strict=True):
        for wanted, found in zip(plain.step(step), fused.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        assert used.get("linear_add", 0) == count * 2 * fused.model.config.num_layers
        assert used.get("skinny_linear", 0) == count
    for kind in ("norm_linear", "norm_gate_up"):
        assert used.get(kind, 0) == {16: 2, 2: 1, 0: 0}[norm_rows] * fused.model.config.num_layers


def test_only_half_precision_on_cuda_fuses_by_itself() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert fusing(cuda, torch.bfloat16) and fusing(cuda, torch.float16)
    assert fusing(cuda, torch.float32) is None and fusing(cpu, torch.bfloat16) is None


@pytest.mark.parametrize("on", [True, False])
def test_layers_of_fused_kernels_can_be_switched_off(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("fusing", "starting_early", "going_wide"):
        monkeypatch.setattr(headway.models.decoder, name, lambda *_, name=name: asked.append(name))
    monkeypatch.setenv("HEADWAY_FUSED_LAYERS", str(int(on)))
    ours(hf_model(TINY["llama-biases"]))
    assert asked == (["fusing", "starting_early", "going_wide"] if on else [])
