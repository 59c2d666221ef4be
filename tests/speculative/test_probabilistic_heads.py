"""Heads and drafters of blocks whose drafts are judged by probabilities: tokens are distributed as the model says, which is
computed exactly, over all texts of three tokens; and they obey all that a request asks for. Seeds are fixed, so nothing can
flake."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.engine.harness import request, run
from tests.engine.test_depths import FEATURES, requests_for
from tests.engine.tiny_llama import KV_BLOCK_BYTES, VOCAB
from tests.sim.harness import expected, folder_of_model, simulated
from tests.speculative.test_eagle import on_cpu
from tests.speculative.test_rejection import PROMPT, obeys, tokens
from tests.speculative.tiny_dflash import KINDS, save_dflash
from tests.speculative.tiny_eagle import save_eagle

LEAST = {"eagle": 0.01, "eagle3": 0.1, "dflash": 0.1, "dspark": 0.1}
"""Of rows, the share whose second draft is accepted, too: nearly none if drafts had to be what would be drawn without them."""
soak = pytest.mark.soak
METHODS = ["eagle3", "dflash", *(pytest.param(name, marks=soak) for name in ("eagle", "dspark"))]


@functools.cache
def drafter(method: str) -> str:
    folder = Path(tempfile.mkdtemp(prefix=f"headway-{method}-")) / method
    if method in KINDS:
        save_dflash(folder, KINDS[method])
    else:
        save_eagle(folder, third=method == "eagle3", reduced=method == "eagle3")
    return str(folder)


def drafting(method: str, number: int) -> dict[str, Any]:
    config = {"method": method, "model": drafter(method), "num_speculative_tokens": number}
    return {"speculative_config": config | {"draft_sample_method": "probabilistic", "adaptive": False}}


@functools.cache
@torch.no_grad()
def joint(temperature: float) -> torch.Tensor:
    """f64 [V, V, V], chances of the three tokens behind ``PROMPT``."""
    model = LlamaForCausalLM.from_pretrained(folder_of_model(), dtype=torch.float32).eval()
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))  # [V^2, 2]
    texts = torch.cat([torch.tensor(PROMPT).expand(len(pairs), -1), pairs], 1)
    logits = torch.cat([model(each).logits[:, -3:].double() for each in texts.split(1024)]) / temperature
    first, second, third = logits.view(VOCAB, VOCAB, 3, VOCAB).softmax(-1).unbind(2)
    return first[0, 0][:, None, None] * second[:, 0][:, :, None] * third


def surprise(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Chi-square of counts in cells, in standard deviations above its mean; cells where few are wanted are taken together."""
    wanted = wanted.flatten() / wanted.sum() * found.sum()
    few = wanted < 5
    cells = [torch.cat([each.flatten()[~few], each.flatten()[few].sum()[None]]).double() for each in (found, wanted)]
    chi, degrees = ((cells[0] - cells[1]).square() / cells[1].clamp(min=1e-9)).sum(), len(cells[0]) - 1
    return float((chi - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize(("method", "temperature", "depth"), [
    ("eagle3", 3.0, 2), ("dflash", 3.0, 0), pytest.param("eagle", 10.0, 0, marks=soak),
    pytest.param("dspark", 3.0, 2, marks=soak),
])  # fmt: skip
def test_three_tokens_are_distributed_as_the_model_says(method: str, temperature: float, depth: int) -> None:
    """The first is drawn; the others are drafted and accepted, or drawn from what is left."""
    params: dict[str, Any] = {"temperature": temperature, "max_tokens": 4, "ignore_eos": True}
    core = on_cpu(run_ahead=depth, max_num_seqs=64, **drafting(method, 2) | {"max_num_batched_tokens": 1024})
    answers = run(core, [request(f"r{seed}", PROMPT, seed=seed, **params) for seed in range(2400)])
    stats = core.stats()
    core.shutdown()
    accepted = [count / stats.num_drafts for count in stats.num_accepted_tokens_per_pos]
    print(accepted)
    assert 0.15 < accepted[0] < 0.9 and accepted[1] > LEAST[method], "some drafts are accepted, and some are not"
    found, truth = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64), joint(temperature)
    for answer in answers.values():
        found[tuple(answer.token_ids[:3])] += 1
    bucket = torch.arange(VOCAB) % 4
    coarse = (bucket[:, None, None] * 4 + bucket[:, None]) * 4 + bucket
    for place, rest in enumerate(((1, 2), (0, 2), (0, 1))):
        assert surprise(found.sum(rest), truth.sum(rest)) < 3.5, f"token {place}"
    cells = [
        torch.zeros(64, dtype=torch.float64).index_add_(0, coarse.flatten(), each.flatten()) for each in (found, truth)
    ]
    assert surprise(*cells) < 3.5, "three tokens together"


@pytest.mark.parametrize("method", METHODS)
def test_every_feature_at_every_depth(method: str) -> None:
    """Nothing is preempted: what is computed again is drawn without drafts, with noise of its own."""
    batch = requests_for(list(FEATURES.values()), seed=83)
    truth, found = expected(batch), {}
    for depth in (0, 1, 2, 4):
        core = on_cpu(run_ahead=depth, **drafting(method, 3))
        answers = run(core, batch)
        for each in batch:
            obeys(each, answers[each.request_id], truth[each.request_id])
        assert core.stats().num_accepted_tokens > 0 and core.stats().num_preemptions == 0
        core.check_integrity()
        core.shutdown()
        found[depth] = tokens(answers)
    assert found[0] == found[1] == found[2] == found[4]


@pytest.mark.parametrize("method", ["dflash", pytest.param("eagle3", marks=soak)])
def test_on_the_simulated_device(method: str) -> None:
    batch = requests_for([FEATURES[name] for name in ("temperature", "schema")], seed=92)
    sizes = {
        "max_num_seqs": 2,
        "enforce_eager": True,
        "max_num_batched_tokens": 24,
        "kv_cache_memory_bytes": 24 * 2 * KV_BLOCK_BYTES,
    }
    with simulated(3, run_ahead=2, **drafting(method, 2), **sizes) as (core, _, _):
        answers, truth = run(core, batch), expected(batch)
        for each in batch:
            obeys(each, answers[each.request_id], truth[each.request_id])
