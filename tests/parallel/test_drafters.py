"""Drafters with a model of their own beside a model that several ranks share: the tokens, and the drafts that are accepted, are
those of one rank."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats
from headway.parallel.group import Group
from headway.speculative.agreed import AgreedDrafter
from headway.speculative.chain import Chain
from headway.speculative.rejection import Rejection
from tests.engine.harness import Answer, request
from tests.engine.tiny_llama import save_tiny_llama
from tests.parallel.test_engine import HALVES, THREADS, all_features, compare, played
from tests.sim.harness import folder_of_model
from tests.speculative import tiny_mtp
from tests.speculative.tiny_dflash import KINDS, save_dflash
from tests.speculative.tiny_eagle import save_eagle

TWO: dict[str, Any] = {**THREADS, "distributed_timeout_seconds": 20, "tensor_parallel_size": 2}
LAYERS = ("glm-4-moe", "mimo", "v3")
"""Models with a layer for multi-token prediction whose heads two ranks can share."""
METHODS = ("draft_model", "eagle", "eagle3", "eagle3_reduced", "dflash", "dspark", *LAYERS)


@cache
def arguments(method: str) -> dict[str, Any]:
    """Of the model, and of what drafts for it."""
    if method in LAYERS:
        config: dict[str, Any] = {"method": "mtp"}
        return {"model": str(tiny_mtp.folder_of(method)), "speculative_config": config | {"num_speculative_tokens": 2}}
    folder = Path(mkdtemp(prefix=f"headway-{method}-")) / method
    if method in KINDS:
        save_dflash(folder, KINDS[method])
    elif method == "draft_model":
        folder.mkdir()
        save_tiny_llama(folder, rms_norm_eps=0.5)  # a stranger to the model, but not much of one
    else:
        save_eagle(folder, third=method != "eagle", reduced=method == "eagle3_reduced")
    config = {"method": method.partition("_reduced")[0], "model": str(folder), "num_speculative_tokens": 3}
    return {"model": str(folder_of_model()), "speculative_config": config}


def answers_of(
    method: str, made: list[AddRequest], drawn: str | None = None, **more: Any
) -> tuple[dict[str, Answer], EngineStats]:
    """Of an engine of its own, with drafts in all steps."""
    sizes: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "block_size": 8,
        "max_num_batched_tokens": 32, "run_ahead": 0, "kv_cache_memory_bytes": 2**20,
    }  # fmt: skip
    args = arguments(method)
    drafts = args["speculative_config"] | {"adaptive": False}
    drafts |= {} if drawn is None else {"draft_sample_method": drawn}
    return played(EngineArgs(**args | sizes | {"speculative_config": drafts} | more), made)


def requests(temperature: float = 0.0) -> list[AddRequest]:
    prompts = [[3 + (7 * i + 5 * j) % 80 for i in range(6 + 11 * j)] for j in range(5)]
    return [
        request(f"r{j}", prompt, seed=j, max_tokens=12, ignore_eos=True, temperature=temperature)
        for j, prompt in enumerate(prompts)
    ]


@cache
def one_rank(method: str, temperature: float, drawn: str | None = None) -> tuple[dict[str, Answer], EngineStats]:
    return answers_of(method, requests(temperature), drawn)


USUAL = (
    ("draft_model", 2), ("eagle", 0), ("eagle3", 4), ("eagle3_reduced", 1), ("dflash", 1), ("dspark", 2), ("glm-4-moe", 1),
    ("v3", 2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "depth"),
    [
        pytest.param(method, depth, marks=[] if (method, depth) in USUAL else pytest.mark.soak)
        for method in METHODS
        for depth in (0, 1, 2, 4)
    ],
)
def test_two_ranks_guess_as_one_does(method: str, depth: int) -> None:
    """What is drafted depends on the depth, since some steps are begun in vain; so one rank has the same."""
    found = answers_of(method, requests(), run_ahead=depth, **TWO)
    alone = one_rank(method, 0.0) if not depth else answers_of(method, requests(), run_ahead=depth)
    compare(found[0], alone[0])
    assert found[1].num_accepted_tokens == alone[1].num_accepted_tokens
    assert found[1].num_draft_tokens == alone[1].num_draft_tokens > 0


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mimo"])
def test_every_draft_is_that_of_one_rank(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted ones are few where heads are random, so all are compared, of the first rank, which is this thread."""
    drawn: list[list[int]] = []
    draw = Chain.draw

    def noted(chain: Chain, logits: torch.Tensor, slots: torch.Tensor, link: int, flags: int) -> torch.Tensor:
        found = draw(chain, logits, slots, link, flags)
        if threading.current_thread() is threading.main_thread():
            drawn.append(found[slots >= 0].tolist())
        return found

    monkeypatch.setattr(Chain, "draw", noted)
    both = []
    for more in (TWO, {}):
        drawn.clear()
        answers_of(method, requests(), **more)
        both.append([each for each in drawn if each])
    assert both[0] == both[1] and len(both[0]) > 20


@pytest.mark.parametrize(("method", "depth"), [("eagle3_reduced", 2), ("draft_model", 1)])
def test_every_feature(method: str, depth: int) -> None:
    made = all_features()[depth::3]
    compare(answers_of(method, made, run_ahead=depth, **TWO)[0], answers_of(method, made)[0])


@pytest.mark.parametrize(
    ("method", "depth"),
    [("eagle3", 0), ("draft_model", 2), pytest.param("dflash", 2, marks=pytest.mark.soak), ("v3", 2)],
)
def test_steps_in_halves(method: str, depth: int) -> None:
    """Drafters read hidden states, of several layers and of all tokens, that two halves have made."""
    found = answers_of(method, requests(), run_ahead=depth, **TWO | HALVES)
    alone = answers_of(method, requests(), run_ahead=depth)
    compare(found[0], alone[0])
    assert found[1].num_accepted_tokens == alone[1].num_accepted_tokens
    assert found[1].num_draft_tokens == alone[1].num_draft_tokens > 0


@pytest.mark.parametrize("method", ["glm-4-moe", "v3"])
def test_a_layer_whose_experts_are_dealt_out(method: str) -> None:
    found = answers_of(method, requests(), enable_expert_parallel=True, **TWO)
    compare(found[0], one_rank(method, 0.0)[0])
    assert found[1].num_accepted_tokens == one_rank(method, 0.0)[1].num_accepted_tokens


def second_rank_errs(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[int]:
    """Tokens that ``owner.name`` gives are others on the second rank; gives where those who did so are noted."""
    ranks: dict[int, int] = {}
    made, own, made_agreed = list[int](), getattr(owner, name), AgreedDrafter.__init__

    def known(drafter: AgreedDrafter, arena: Any, number: int, inner: Any, group: Group) -> None:
        made_agreed(drafter, arena, number, inner, group)
        ranks[id(inner._chain if owner is Chain else inner._chain.rejection)] = group.rank

    def wrong(self: Any, *arguments: Any) -> Any:
        found = own(self, *arguments)
        rank = ranks.get(id(self), 0)
        if not rank or found is None:
            return found
        made.append(rank)
        if not callable(found):
            return (found + 1) % 90

        def judge(token_ids: torch.Tensor, logits: torch.Tensor) -> None:
            found(token_ids, logits)
            token_ids.copy_((token_ids + 1) % 90)

        return judge

    monkeypatch.setattr(AgreedDrafter, "__init__", known)
    monkeypatch.setattr(owner, name, wrong)
    return made


def test_the_first_rank_has_the_say_on_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards that differ round otherwise; here the second rank's drafts are all others."""
    made = second_rank_errs(monkeypatch, Chain, "draw")
    found = answers_of("eagle3", requests(), **TWO)
    assert made
    compare(found[0], one_rank("eagle3", 0.0)[0])
    assert found[1].num_accepted_tokens == one_rank("eagle3", 0.0)[1].num_accepted_tokens


def test_the_first_rank_has_the_say_on_what_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = one_rank("eagle3", 0.8, "probabilistic")
    made = second_rank_errs(monkeypatch, Rejection, "judge")
    found, stats = answers_of("eagle3", requests(0.8), "probabilistic", **TWO)
    assert made and stats.num_accepted_tokens > 0
    compare(found, wanted)


@pytest.mark.parametrize(
    ("method", "depth", "seed"),
    [("eagle3", 2, 41), *(pytest.param(each, 4, 42, marks=pytest.mark.soak) for each in METHODS)],
)
def test_on_the_simulated_device(method: str, depth: int, seed: int) -> None:
    small: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 12, "run_ahead": depth}
    found = answers_of(method, requests(), device=f"sim:{seed}", **small, **TWO)
    compare(found[0], one_rank(method, 0.0)[0])
    assert found[1].num_graph_steps and found[1].num_accepted_tokens > 0
