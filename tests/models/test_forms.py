"""Layers give the same in every form of their products, and each form runs where the rules say."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel module is imported

import headway.kernels.linear
from headway.kernels.expert_mlp import add_experts
from headway.kernels.hopper import runs_gluon
from headway.kernels.mid_linear import linear_parts, mid_add, mid_gate_up, mid_linear, reference
from headway.kernels.mid_linear.tiles import Kind as MidKind
from headway.kernels.mid_linear.tiles import MidTile
from headway.kernels.registry import Op
from headway.kernels.skinny_linear import linear_add, norm_gate_up, norm_linear, skinny_linear
from headway.kernels.skinny_linear.tiles import Kind as FewKind
from headway.kernels.wide_linear import wide_add, wide_gate_up, wide_qkv
from headway.kernels.wide_linear.tiles import Counts
from headway.kernels.wide_linear.tiles import Kind as WideKind
from headway.models.blocks import BlockSpec
from headway.models.config import map_blocks
from headway.models.decoder import DecoderModel
from headway.models.layers import attention, moe
from headway.models.layers.forms import Rules, rules_for
from headway.models.layers.mlp import MLP, MLPSpec
from headway.models.layers.moe import MixtureSpec
from headway.models.load import load_model
from headway.weights import open_checkpoint
from tests.kernels.test_mid_linear import SHIPPED
from tests.models.harness import DEVICE, Machine, Row
from tests.models.tiny import TINY, hf_model, ours, pair
from tests.recurrent import tiny_hybrids

pytestmark = pytest.mark.usefixtures("interpreted_quickly")
FEW = (skinny_linear, norm_linear, norm_gate_up, linear_add)
MID = (mid_linear, mid_gate_up, mid_add, linear_parts)
WIDE = (wide_qkv, wide_gate_up, wide_add)
MID_KINDS: tuple[MidKind, ...] = ("mid_linear", "mid_gate_up", "mid_add", "linear_parts")
TOKENS = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(3)).tolist()
STEPS = [
    [Row(1, TOKENS[:17])],
    [Row(1, TOKENS[17:18], 17)],
    [Row(1, TOKENS[18:19], 18), Row(2, [5], 3, alive=False), Row(0, TOKENS[:9])],
]
"""17 tokens, a decode row, and 11 tokens of three rows."""


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each op ran. Tiny models do not fit the kernels of the latter two kinds: their references run."""
    monkeypatch.setattr(headway.kernels.linear, "_can_pack", lambda *_: False)  # as on a GPU
    monkeypatch.setattr(reference, "tile_for", lambda *_: MidTile(16, 64, 2, 1, 1, 4))  # parts of K: two
    counts = {op.name: 0 for op in (*FEW, *MID, *WIDE)}

    def count(op: Op, run: Any) -> None:
        def counted(*args: object) -> object:
            counts[op.name] += 1
            return run(*args)

        for device in ("_cpu_impl", "_cuda_impl"):
            monkeypatch.setattr(op, device, counted)

    for op in FEW:
        count(op, op.implementation("cuda"))
    for op in (*MID, *WIDE):
        count(op, op.reference)
    return counts


@pytest.mark.parametrize("norm_rows", [16, 2, 0])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_forms_for_few_tokens_equal_separate_kernels(name: str, norm_rows: int, used: dict[str, int]) -> None:
    """Decode, prefill of up to 16 tokens and mixed batches; with 17 tokens both models take the same path."""

    def rows(kind: FewKind, outputs: int, inputs: int) -> int:
        return norm_rows if kind.startswith("norm") else 16

    oracle = hf_model(TINY[name])
    plain, fused = Machine(ours(oracle)), Machine(ours(oracle))
    fused.model.use_forms(Rules(few=rows))
    layers = fused.model.spec.num_layers
    for count, step in zip((0, 1, 2), STEPS, strict=True):
        for wanted, found in zip(plain.step(step), fused.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        assert used["linear_add"] == count * 2 * layers
        assert used["skinny_linear"] == count
    for kind in ("norm_linear", "norm_gate_up"):
        assert used[kind] == {16: 2, 2: 1, 0: 0}[norm_rows] * layers


@pytest.mark.parametrize(
    "last",
    [{}, {"mid_add": 0}, {"mid_add": 2}, {"mid_add": 0, "linear_parts": 2}, {"mid_linear": 2, "mid_gate_up": 2}],
    ids=repr,
)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_products_that_start_early_equal_separate_kernels(
    name: str, last: dict[MidKind, int], used: dict[str, int]
) -> None:
    """Decode, prefill and mixed batches; ops may end at different numbers of tokens, above 16 none is used here."""
    oracle = hf_model(TINY[name])
    plain, early = Machine(ours(oracle)), Machine(ours(oracle))
    early.model.use_forms(Rules(mid=lambda kind, outputs, inputs: range(1, last.get(kind, 16) + 1)))
    wanted_uses = dict.fromkeys(MID_KINDS, 0)
    for count, step in zip((17, 1, 11), STEPS, strict=True):
        for wanted, found in zip(plain.step(step), early.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        for kind, uses in expected_uses(count, last, early.model.spec.num_layers).items():
            wanted_uses[kind] += uses
        assert {kind: used[kind] for kind in MID_KINDS} == wanted_uses


def expected_uses(tokens: int, last: dict[MidKind, int], layers: int) -> dict[MidKind, int]:
    """Runs of each op in a step of so many tokens."""
    within: dict[MidKind, bool] = {kind: tokens <= last.get(kind, 16) for kind in MID_KINDS}
    meeting = within["mid_add"] and within["mid_linear"] and within["mid_gate_up"]
    early = meeting or within["linear_parts"]
    return {
        "mid_linear": layers * (early and within["mid_linear"]) + within["mid_linear"],  # and the output layer
        "mid_gate_up": layers * (early and within["mid_gate_up"]),
        "mid_add": 2 * layers * meeting,
        "linear_parts": 2 * layers * (within["linear_parts"] and not meeting),
    }  # fmt: skip


@pytest.mark.parametrize("never", ["", "wide_qkv", "wide_gate_up", "wide_add"])
def test_wide_products_equal_separate_kernels(
    never: str, used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = hf_model(TINY["qwen3"])
    monkeypatch.setattr(attention, "HEAD_SIZE", 20)
    plain, wide, ending = (Machine(ours(oracle)) for _ in range(3))
    used_for: dict[WideKind, Counts] = {
        "wide_qkv": (range(10, 15), range(16, 99)),
        "wide_gate_up": (range(12, 99),),
        "wide_add": (range(10, 12), range(17, 18)),
    }

    def counts(kind: WideKind, outputs: int, inputs: int) -> Counts:
        return () if kind == never else used_for[kind]

    wide.model.use_forms(Rules(wide=counts))
    ending.model.use_forms(Rules(wide=counts))
    for number, step in enumerate(STEPS):
        used.update(dict.fromkeys(used, 0))
        expected = plain.step(step)
        for wanted, found in zip(expected, wide.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        tokens = sum(len(row.tokens) for row in step)
        each: dict[WideKind, int] = {"wide_qkv": 1, "wide_gate_up": 1, "wide_add": 2}
        for kind, uses in each.items():
            runs = kind != never and any(tokens in part for part in used_for[kind])
            assert used[kind] == uses * plain.model.spec.num_layers * runs, (number, kind)
        last = torch.stack([each[-1] for each in expected])
        torch.testing.assert_close(ending.last_step(step), last, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
@pytest.mark.parametrize("way", ["separate", "fused"])
def test_the_last_layer_may_end_with_the_rows_last_tokens(name: str, way: str, used: dict[str, int]) -> None:
    """Prompts, decode rows, zombies and padding; what is written into the cache is the same."""
    case = pair(name)
    whole, ending = Machine(case.model), Machine(case.model)
    if way == "fused":
        ending = Machine(ours(hf_model(TINY[name])))
        ending.model.use_forms(Rules(few=lambda *_: 16))
    for step in STEPS:
        expected = torch.stack([each[-1] for each in whole.step(step, pad_rows=2, pad_tokens=3)])
        found = ending.last_step(step, pad_rows=2, pad_tokens=3)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    for mine, wanted in zip(ending.cached, whole.cached, strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma", "gemma3", "glm4", "olmo2", "gemma4-shared"])
@pytest.mark.parametrize("kind", ["few", "mid", "wide"])
def test_norms_behind_products_and_other_gates(kind: str, name: str, used: dict[str, int]) -> None:
    """Products that no residual follows at once, and gelu or silu between them; Gemma 1's norms have f32 weights, too. Gemma 4
    has two products more a layer, those of inputs by layer."""
    oracle = hf_model(TINY[name])
    plain, fused = Machine(ours(oracle)), Machine(ours(oracle))
    rules = {
        "few": Rules(few=lambda *_: 16),
        "mid": Rules(mid=lambda kind, *_: range(0) if kind == "mid_add" else range(1, 17)),
        "wide": Rules(wide=lambda kind, *_: (range(2, 99),) if kind == "wide_gate_up" else ()),
    }
    fused.model.use_forms(rules[kind])
    for step in STEPS:
        for wanted, found in zip(plain.step(step), fused.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    layers, added = fused.model.spec.num_layers, name == "gemma"
    expected = {
        "few": ("norm_gate_up", 2),
        "mid": ("linear_parts", 4) if added else ("mid_gate_up", 2),
        "wide": ("wide_gate_up", 2),
    }
    op, steps = expected[kind]
    assert used[op] == steps * layers
    if kind != "wide" and not added:
        outs = {"few": used["skinny_linear"], "mid": used["mid_linear"] + used["linear_parts"]}
        products = 5 if name == "gemma4-shared" else 3
        assert outs[kind] >= 2 * products * layers and (kind == "few" or used["linear_parts"] >= 2 * layers)


HYBRID_USES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "mamba2": ({"norm_linear": 2, "linear_add": 2}, {"mid_linear": 2, "mid_add": 2}),
    "nemotron-h": ({"norm_linear": 4, "linear_add": 4}, {"mid_linear": 4, "mid_add": 4}),
    "nemotron-h-moe": (
        {"norm_linear": 1, "skinny_linear": 2, "linear_add": 3},  # experts leave a norm to what follows them
        {"mid_linear": 3, "linear_parts": 3},
    ),
    "zamba2": ({"norm_linear": 1, "linear_add": 4}, {}),  # what follows the first layer adds something else first
    "jamba-moe": (
        {"norm_linear": 3, "norm_gate_up": 2, "linear_add": 5},
        {"mid_linear": 3, "mid_gate_up": 2, "linear_parts": 5},
    ),
    "jamba": (
        {"norm_linear": 3, "norm_gate_up": 3, "linear_add": 6},
        {"mid_linear": 3, "mid_gate_up": 3, "mid_add": 6},
    ),
}
"""Of layers that lack a half, or whose mixers have states: ops of a decode row in forms for few tokens, and in those that start
early; without the output layer."""


@pytest.mark.parametrize("kind", ["few", "mid"])
@pytest.mark.parametrize("name", HYBRID_USES)
def test_layers_that_lack_a_half_run_in_forms(name: str, kind: str, used: dict[str, int]) -> None:
    def model() -> DecoderModel:
        checkpoint = open_checkpoint(str(tiny_hybrids.folder_of(name)))
        made = load_model(checkpoint, dtype=torch.float32, device=DEVICE, max_model_len=80, progress=False, seed=0)
        assert isinstance(made, DecoderModel)
        return made

    plain, fused = Machine(model()), Machine(model())
    fused.model.use_forms(Rules(few=lambda *_: 16) if kind == "few" else Rules(mid=lambda *_: range(1, 17)))
    for step in STEPS:
        used.update(dict.fromkeys(used, 0))
        for wanted, found in zip(plain.step(step), fused.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        if len(step) == 1 and len(step[0].tokens) == 1:
            few, mid = HYBRID_USES[name]
            wanted_uses = dict.fromkeys(used, 0) | (few if kind == "few" else mid)
            wanted_uses["skinny_linear" if kind == "few" else "mid_linear"] += 1
            assert used == wanted_uses


MIXTURES = {
    "qwen3-moe": 2,
    "qwen3-moe-some-dense": None,
    "gpt-oss": None,
    "granite-moe": 0,
    "glm4-moe": 0,
    "gemma4-moe": 0,
}
"""Layers whose mixture takes its norm and its sum in; None: some. A factor, a shared block, norms behind it leave none."""


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_few_tokens_take_norms_and_sums_in(
    name: str, used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of any size follow each other, with rows that have ended; what is left to a layer is what the one before left."""
    calls: list[int] = []

    def counted(x: torch.Tensor, *others: Any) -> None:
        calls.append(len(x))
        add_experts(x, *others)

    monkeypatch.setattr(moe, "add_experts", counted)
    oracle = hf_model(TINY[name])
    plain, fused = Machine(ours(oracle)), Machine(ours(oracle))
    fused.model.use_forms(Rules(few=lambda *_: 16))
    for step in (
        *STEPS,
        [Row(1, TOKENS[19:], 19)],
        [Row(1, [3], 20), Row(0, [4], 9, alive=False)],
        [Row(1, [5, 6, 7, 8], 21)],
    ):
        calls.clear()
        for wanted, found in zip(plain.step(step), fused.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        tokens, layers = sum(len(row.tokens) for row in step), MIXTURES[name]
        assert set(calls) <= {tokens} and not (calls and tokens > 4)
        if tokens == 1:
            assert calls if layers is None else len(calls) == layers


@pytest.mark.parametrize(
    ("block", "mixture", "taken"),
    [
        ({}, {}, True),
        ({}, {"bias": True}, True),
        ({}, {"weigh_inputs": True}, True),
        ({}, {"activation": "clamped_swiglu", "limit": 1.0, "alpha": 1.7}, True),
        ({}, {"gated": False, "activation": "relu2"}, True),
        ({"after": "norm"}, {}, False),
        ({"residual_multiplier": 0.3}, {}, False),
        ({}, {"zero_experts": 2}, False),
        ({}, {"latent": 16}, False),
        ({}, {"shared": MLPSpec(size=24)}, False),
        ({}, {"shared": MLPSpec(size=24), "shared_gate": "gate"}, False),
    ],
)
def test_few_tokens_leave_nothing_out_of_a_mixture(
    block: dict[str, Any], mixture: dict[str, Any], taken: bool, used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is around and in it, also in layers no released model has yet."""
    calls: list[int] = []

    def counted(x: torch.Tensor, *more: Any) -> None:
        calls.append(len(x))
        add_experts(x, *more)

    monkeypatch.setattr(moe, "add_experts", counted)
    others, after = {name: value for name, value in block.items() if name != "after"}, block.get("after", "")

    def changed(_: int, spec: BlockSpec) -> BlockSpec:
        assert isinstance(spec.ffn, MixtureSpec)
        return replace(spec, ffn=replace(spec.ffn, **mixture), names=replace(spec.names, after_ffn=after), **others)

    found = pair("qwen3-moe").model
    config = map_blocks(found.config, changed)
    plain, fused = (DecoderModel(config, dtype=torch.float32, device=DEVICE, max_model_len=64) for _ in range(2))
    generator = torch.Generator().manual_seed(11)
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        one.data.copy_(torch.randn(one.shape, generator=generator) * 0.2)
        other.data.copy_(one.data)
    for model in (plain, fused):
        model.finalize()
    fused.use_forms(Rules(few=lambda *_: 16))
    machines = Machine(plain), Machine(fused)
    for step in ([Row(1, TOKENS[:3])], [Row(1, TOKENS[3:4], 3)]):
        wanted, given = (machine.step(step) for machine in machines)
        torch.testing.assert_close(given, wanted, atol=2e-4, rtol=1e-4)
    assert bool(calls) == taken


def test_biases_keep_products_narrow(used: dict[str, int]) -> None:
    machine = Machine(ours(hf_model(TINY["llama-biases"])))
    machine.model.use_forms(Rules(wide=lambda *_: (range(1, 99),)))
    machine.step([Row(0, TOKENS)])
    assert not any(used[op.name] for op in WIDE)


def test_products_that_start_early_go_before_those_for_few_tokens(used: dict[str, int]) -> None:
    """Where both are for a number of tokens, products start early; below it they are fused."""
    machine = Machine(ours(hf_model(TINY["qwen3"])))
    machine.model.use_forms(Rules(few=lambda *_: 16, mid=lambda *_: range(9, 17)))
    for tokens, few, mid in ((8, 1, 0), (9, 0, 1), (16, 0, 1), (17, 0, 0)):
        used.update(dict.fromkeys(used, 0))
        machine.step([Row(0, TOKENS[:tokens])])
        assert (bool(used["linear_add"]), bool(used["mid_add"])) == (few, mid), tokens


def test_rules_are_for_half_precision_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.kernels.hopper.version", lambda _: "3.6.0")
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for capability, hopper in (((9, 0), True), ((8, 9), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        runs_gluon.cache_clear()
        for dtype in (torch.bfloat16, torch.float16):
            found = rules_for(cuda, dtype)
            assert found.few is not None
            assert (found.mid is not None, found.wide is not None) == (hopper, hopper)
        assert rules_for(cuda, torch.float32) == rules_for(cpu, torch.bfloat16) == Rules()
    runs_gluon.cache_clear()


def test_float16_leaves_out_what_may_be_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.kernels.hopper.version", lambda _: "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    runs_gluon.cache_clear()
    half = rules_for(torch.device("cuda"), torch.float16).mid
    assert half is not None
    for (kind, outputs, size), found in SHIPPED.items():
        assert half(kind, outputs, size).stop == (0 if kind == "mid_add" else max(found) + 1)
    runs_gluon.cache_clear()


@pytest.mark.parametrize("on", [True, False])
def test_forms_can_be_switched_off(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def rules(device: torch.device, dtype: torch.dtype) -> Rules:
        asked.append(dtype)
        return Rules()

    monkeypatch.setattr("headway.models.decoder.rules_for", rules)
    monkeypatch.setenv("HEADWAY_FUSED_LAYERS", str(int(on)))
    ours(hf_model(TINY["llama-biases"]))
    assert bool(asked) is on


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_gelu_stands_in_the_product_of_many_tokens(act: str, bias: bool) -> None:
    """Where the rule says, with a bias, and by the formula that the model has."""
    spec = MLPSpec(size=24, activation=act, gated=False, bias=bias, names=(("up",), "down"))
    mlp, generator = MLP(spec, 64, dtype=torch.bfloat16, device=torch.device("cpu")), torch.Generator().manual_seed(1)
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    mlp.fuse(Rules(wide=lambda kind, outputs, inputs: (range(4, 9),) if (outputs, inputs) == (24, 64) else ()))
    assert [bool(each) for each in mlp.wide] == [True] * bias
    x = torch.randn(8, 64, generator=generator).bfloat16()
    linear = mlp.gate_up
    added = None if linear.bias is None else linear.bias.float()
    y = torch.nn.functional.linear(x.float(), linear.weight.float(), added)
    exact = torch.nn.functional.gelu(y, approximate="tanh" if act == "gelu_tanh" else "none").bfloat16()
    assert torch.equal(mlp.inner(x), exact) == bias, "one rounding in the product, two outside of it"
    torch.testing.assert_close(mlp.inner(x), exact, atol=2e-2, rtol=2e-2)
    assert torch.equal(mlp.inner(x[:3]), mlp.act(mlp.gate_up.forward(x[:3]))), "too few tokens"


@pytest.mark.parametrize("name", ["gemma3", "glm4", "olmo2"])
def test_each_product_hands_over_to_the_op_that_starts_early_by_itself(name: str, used: dict[str, int]) -> None:
    """Gate and up from 2 rows on, products out from 12; where a product has neither, ``F.linear``. Outputs are the same."""
    oracle = hf_model(TINY[name])
    plain, mixed = Machine(ours(oracle)), Machine(ours(oracle))
    last = {"gate_up": 1, "skinny_linear": 11}
    rules = Rules(
        few=lambda kind, *_: 16,
        mid=lambda kind, *_: range(5, 17),  # what is there for more tokens is there for 2 to 4, too
        handover=lambda few, *_: last[few],
    )
    mixed.model.use_forms(rules)
    layers = mixed.model.spec.num_layers
    for step in (*STEPS, [Row(0, TOKENS[9:12], 9)]):
        used.update(dict.fromkeys(used, 0))
        for wanted, found in zip(plain.step(step), mixed.step(step), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        tokens = sum(len(row.tokens) for row in step)
        assert used["mid_gate_up"] == layers * (1 < tokens <= 16) and used["norm_gate_up"] == layers * (tokens == 1)
        assert (used["skinny_linear"] >= 2 * layers) == (tokens <= 11)
        assert used["linear_parts"] == 0
    used.update(dict.fromkeys(used, 0))
    mixed.step([Row(2, TOKENS[:14])])
    assert used["linear_parts"] and used["skinny_linear"] <= 1, "the output layer alone"
