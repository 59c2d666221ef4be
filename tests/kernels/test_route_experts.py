"""``route_experts``: the reference against the formula, the kernels against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headway.kernels.route_experts import norm_route_experts, route_experts
from headway.kernels.testing import TOLERANCE, interpreter_loops, kernel_dtypes, make_random

PLAIN: dict[str, Any] = {
    "top_k": 3, "scoring": "softmax", "renormalise": True, "scale": 1.0, "groups": 1, "kept_groups": 1, "group_best": 1,
    "margin": 0.0, "always": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "renormalised": {},
    "softmax over all": {"renormalise": False, "top_k": 6},
    "sigmoid": {"scoring": "sigmoid", "renormalise": False, "top_k": 1},
    "scaled": {"scoring": "sigmoid", "scale": 2.5},
    "groups": {"scoring": "sigmoid", "groups": 4, "kept_groups": 2, "group_best": 2, "scale": 0.5},
    "sparsemixer": {"scoring": "sparsemixer", "renormalise": False, "margin": 0.9, "top_k": 4},
    "two always": {"always": 2, "scale": 2.0},
    "five always, in groups": {"always": 5, "groups": 4, "kept_groups": 2, "group_best": 1, "renormalise": False},
    "groups by the best": {"groups": 3, "kept_groups": 1, "renormalise": False},
}


def inputs(
    tokens: int,
    experts: int,
    hidden: int,
    *,
    bias: bool,
    correction: bool,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    live = torch.arange(tokens, dtype=torch.int32) * 7
    if tokens > 1:  # one that goes nowhere would say nothing
        live[tokens // 2 :: 5] = -1
    return (
        make_random(tokens, hidden, dtype=dtype, device=device, seed=1),
        make_random(experts, hidden, dtype=dtype, device=device, seed=2) / hidden**0.5,
        make_random(experts, dtype=dtype, device=device, seed=3) if bias else None,
        make_random(experts, dtype=torch.float32, device=device, seed=4) if correction else None,
        live.to(device),
    )


def run(op: Any, given: tuple[Any, ...], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with interpreter_loops():
        ids, weights = op(*given, *(PLAIN | changes).values())
    return ids.cpu(), weights.cpu()


def by_formula(given: tuple[Any, ...], **changes: Any) -> tuple[list[list[int]], list[list[float]]]:
    """In f64, expert by expert; numbers decide between equal ones."""
    rule = PLAIN | changes
    x, router, bias, correction, live = given
    logits = x.double() @ router.double().T + (0 if bias is None else bias.double())
    scores = logits.softmax(1) if rule["scoring"] == "softmax" else 1 / (1 + (-logits).exp())
    if rule["scoring"] == "sparsemixer":
        return by_sparsemixer(logits.tolist(), live.tolist(), rule)
    ranked = scores if correction is None else scores + correction
    size, ids, weights = scores.shape[1] // rule["groups"], [], []
    for own, order, alive in zip(scores.tolist(), ranked.tolist(), live.tolist(), strict=True):
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        best = [sum(sorted(group)[-rule["group_best"] :]) for group in groups]
        kept = sorted(range(len(groups)), key=lambda g: (-best[g], g))[: rule["kept_groups"]]
        allowed = [e for e in range(len(order)) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-order[e], e))[: rule["top_k"]]
        weight = [own[e] for e in chosen]
        total = sum(weight) if rule["renormalise"] else 1.0
        more = list(range(len(order), len(order) + rule["always"]))
        found = [w / total * rule["scale"] for w in weight] + [1.0] * len(more)
        ids.append(chosen + more if alive >= 0 else [-1] * len(found))
        weights.append(found if alive >= 0 else [0.0] * len(found))
    return ids, weights


def by_sparsemixer(
    logits: list[list[float]], live: list[int], rule: dict[str, Any]
) -> tuple[list[list[int]], list[list[float]]]:
    """Each expert's softmax is over those behind it that are near."""
    ids, weights = [], []
    for own, alive in zip(logits, live, strict=True):
        order = sorted(range(len(own)), key=lambda e: (-own[e], e))
        near = [
            [own[f] - own[e] for f in order[k:] if own[e] - own[f] <= rule["margin"] * max(abs(own[f]), own[e])]
            for k, e in enumerate(order[: rule["top_k"]])
        ]
        assert len({len(each) for each in near}) > 1 or len(own) > len(near[0]), "the margin cuts"
        ids.append(order[: rule["top_k"]] if alive >= 0 else [-1] * rule["top_k"])
        weights.append([1 / sum(math.exp(d) for d in each) if alive >= 0 else 0.0 for each in near])
    return ids, weights


@pytest.mark.parametrize("extra", [(False, False), (True, True)], ids=["plain", "bias and correction"])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_follows_the_formula(kind: str, extra: tuple[bool, bool]) -> None:
    corrected = extra[1] and kind != "sparsemixer"
    given = inputs(9, 12, 20, bias=extra[0], correction=corrected, device="cpu")
    ids, weights = run(route_experts.reference, given, **KINDS[kind])
    wanted = by_formula(given, **KINDS[kind])
    assert ids.tolist() == wanted[0]
    torch.testing.assert_close(weights, torch.tensor(wanted[1]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "extra"), [(1, 12, 70, True), (66, 12, 40, False), (3, 84, 300, True)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_reference(
    kind: str, tokens: int, experts: int, hidden: int, extra: bool, dtype: torch.dtype, device: str
) -> None:
    if device == "cpu" and dtype == torch.float16 and tokens > 3:
        pytest.skip("Triton's interpreter takes long")
    corrected = extra and kind != "sparsemixer"
    given = inputs(tokens, experts, hidden, bias=extra, correction=corrected, device=device, dtype=dtype)
    ids, weights = run(route_experts.implementation("cuda"), given, **KINDS[kind])
    wanted = run(route_experts.reference, given, **KINDS[kind])
    assert torch.equal(ids, wanted[0])
    torch.testing.assert_close(weights, wanted[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_a_norm_before_the_product(tokens: int, dtype: torch.dtype, device: str) -> None:
    """As the norm's own kernel rounds it; rows lie apart, and of few tokens the product has it inside."""
    x, *given = inputs(tokens, 12, 70, bias=True, correction=False, device=device, dtype=dtype)
    x = torch.cat([3.0 * x, torch.full_like(x, torch.nan)], dim=1)[:, :70]
    norm = make_random(70, dtype=dtype, device=device, seed=9)
    rule = (PLAIN | {"always": 2}).values()
    with interpreter_loops():
        ids, weights, normed = norm_route_experts.implementation("cuda")(x, norm, 1e-5, *given, *rule)
    wanted = norm_route_experts.reference(x, norm, 1e-5, *given, *rule)
    assert torch.equal(ids, wanted[0]) and (ids >= 0).any()
    torch.testing.assert_close(weights, wanted[1], atol=2e-3, rtol=2e-3)  # a norm may round the other way
    absolute, relative = TOLERANCE[dtype]
    torch.testing.assert_close(normed, wanted[2], atol=absolute, rtol=relative)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_of_equal_scores_the_lower_numbers_are_chosen(where: str, device: str) -> None:
    x = torch.ones(3, 8, device=device if where == "cuda" else "cpu")
    router = torch.zeros(10, 8, device=x.device)
    router[[4, 7]] = 1.0
    live = torch.zeros(3, dtype=torch.int32, device=x.device)
    ids, _ = run(route_experts.implementation(where), (x, router, None, None, live), top_k=5)
    assert ids.tolist() == [[4, 7, 0, 1, 2]] * 3
    changes = {"scoring": "sigmoid", "groups": 5, "kept_groups": 3, "group_best": 2, "top_k": 4}
    ids, _ = run(route_experts.implementation(where), (x, router, None, None, live), **changes)
    assert ids.tolist() == [[4, 7, 0, 1]] * 3


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of sums of both infinities
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_whatever_comes_ids_are_distinct_experts(where: str, groups: int, value: float, device: str) -> None:
    x = torch.full((2, 8), value, device=device if where == "cuda" else "cpu")
    router = make_random(12, 8, dtype=torch.float32, device=str(x.device))
    live = torch.zeros(2, dtype=torch.int32, device=x.device)
    changes = {"groups": groups, "kept_groups": 2 if groups > 1 else 1, "group_best": 2, "scoring": "sigmoid"}
    ids, _ = run(route_experts.implementation(where), (x, router, None, None, live), top_k=4, **changes)
    assert ((ids >= 0) & (ids < 12)).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_meta_gives_shapes() -> None:
    nothing = torch.empty(3, 8, device="meta", dtype=torch.float16)
    ids, weights = route_experts(nothing, torch.empty(5, 8, device="meta"), None, None, nothing, *PLAIN.values())
    assert norm_route_experts.meta(nothing, nothing, 0.0, ids, None, None, nothing, *PLAIN.values())[2].shape == (3, 8)
    assert ids.shape == weights.shape == (3, 3) and (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
