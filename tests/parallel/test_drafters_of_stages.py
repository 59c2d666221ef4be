"""Drafters with a model of their own over stages: the model is on the last stage, and what earlier stages need comes back with
the tokens. Tokens, and drafts that are accepted, are those of one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats
from headway.models.decoder import DecoderModel
from headway.parallel.stage import Stage
from headway.speculative.chain import Chain
from tests.engine.harness import Answer, request
from tests.engine.tiny_llama import CONFIG, HIDDEN, KV_BLOCK_BYTES, VOCAB
from tests.parallel.families import write
from tests.parallel.test_drafters import METHODS, answers_of, arguments, one_rank, requests
from tests.parallel.test_engine import THREADS, all_features, compare, played
from tests.parallel.waits import watched
from tests.speculative.tiny_eagle import save_eagle

TWO: dict[str, Any] = {**THREADS, "distributed_timeout_seconds": 20, "pipeline_parallel_size": 2}
THREE = TWO | {"pipeline_parallel_size": 3}
DEPTHS = (0, 1, 2, 4)
USUAL = (
    ("draft_model", 4), ("eagle", 1), ("eagle3", 0), ("eagle3_reduced", 2), ("dflash", 2), ("dspark", 0), ("glm-4-moe", 0),
    ("v3", 1), ("mimo", 4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "depth"),
    [
        pytest.param(method, depth, marks=[] if (method, depth) in USUAL else pytest.mark.soak)
        for method in METHODS
        for depth in DEPTHS
    ],
)
def test_two_stages_guess_as_one_rank_does(method: str, depth: int) -> None:
    found = answers_of(method, requests(), run_ahead=depth, **TWO)
    compare(found[0], one_rank(method, 0.0)[0])
    assert found[1].num_draft_tokens > 0


@contextmanager
def every_draft(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[int, int, int], int]]:
    """What is drafted within, behind prompts: by the request's seed, its known tokens and the place of the draft."""
    found, draw = dict[tuple[int, int, int], int](), Chain.draw

    def noted(chain: Chain, logits: torch.Tensor, slots: torch.Tensor, link: int, flags: int) -> torch.Tensor:
        drawn = draw(chain, logits, slots, link, flags)
        rows = slots.clamp(min=0)
        seeds = chain._house.arena.view("seeds")[:, 0].index_select(0, rows).tolist()
        known = chain._num_tokens.index_select(0, rows).tolist()
        for slot, seed, number, token in zip(slots.tolist(), seeds, known, drawn.tolist(), strict=True):
            if slot >= 0 and number > len(requests()[seed].prompt_token_ids):
                found[seed, number, link] = token
        return drawn

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "draw", noted)
        yield found


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3_reduced", "dflash", "dspark", "glm-4-moe"])
def test_every_draft_is_that_of_one_rank(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of random weights are seldom right, so all drafts are compared."""
    both = []
    for more in ({}, TWO):
        with every_draft(monkeypatch) as drafts:
            answers_of(method, requests(), enable_prefix_caching=False, **more)
        both.append(drafts)
    common = both[0].keys() & both[1].keys()
    assert len(common) > 60, "which lengths are drafted for depends on what was accepted"
    assert all(both[0][key] == both[1][key] for key in common)


@pytest.mark.parametrize(
    ("depth", "seed"), [(0, None), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((2, 71), (4, 72)))]
)
def test_right_drafts_are_accepted(depth: int, seed: int | None) -> None:
    """The model drafts for itself, so every draft is right: one that came back wrongly would be rejected."""
    model = arguments("eagle")["model"]
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3, "adaptive": False}
    found, stats = answers_of(
        "eagle", requests(), speculative_config=drafts, run_ahead=depth, device="cpu" if seed is None else f"sim:{seed}",
        **TWO,
    )  # fmt: skip
    compare(found, one_rank("eagle", 0.0)[0])
    assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens > 0


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A model of five layers, and a head that reads one of each of three stages."""
    folder, head = tmp_path_factory.mktemp("deep"), tmp_path_factory.mktemp("head")
    write(CONFIG | {"num_hidden_layers": 5}, folder)
    save_eagle(head, third=True)
    config = json.loads((head / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
    (head / "config.json").write_text(json.dumps(config))
    tensors = load_file(head / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    tensors["fc.weight"] = torch.randn(HIDDEN, 3 * HIDDEN, generator=generator) * 0.3
    save_file(tensors, head / "model.safetensors")
    return str(folder), {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "adaptive": False}


def of_deep(
    deep: tuple[str, dict[str, Any]], made: list[AddRequest], **more: Any
) -> tuple[dict[str, Answer], EngineStats]:
    sizes: dict[str, Any] = {
        "model": deep[0], "speculative_config": deep[1], "dtype": "float32", "device": "cpu", "max_model_len": 128,
        "max_num_seqs": 4, "block_size": 8, "max_num_batched_tokens": 32, "run_ahead": 0, "kv_cache_memory_bytes": 2**20,
    }  # fmt: skip
    args = EngineArgs(**sizes | more)
    with watched() as waits:
        found = played(args, made)
        waits.check(args.num_ranks)
    return found


def test_a_head_reads_layers_of_every_stage(deep: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outputs are handed on with the hidden states."""
    both = []
    for more in ({}, THREE):
        with every_draft(monkeypatch) as drafts:
            both.append((of_deep(deep, requests(), **more)[0], drafts))
    (alone, wanted), (found, drafts) = both
    compare(found, alone)
    common = wanted.keys() & drafts.keys()
    assert len(common) > 60 and all(wanted[key] == drafts[key] for key in common)


@pytest.mark.parametrize(("depth", "seed"), [(2, 73), pytest.param(4, 74, marks=pytest.mark.soak)])
def test_three_stages_on_the_simulated_device(
    deep: tuple[str, dict[str, Any]], depth: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, stats = of_deep(deep, requests(), run_ahead=depth, device=f"sim:{seed}", **THREE)
    compare(found, of_deep(deep, requests())[0])
    assert stats.num_draft_tokens > 0 and stats.num_graph_steps


def test_what_a_stage_hands_on(deep: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than what layers so far have made of what the head reads."""
    sent: dict[int, set[int]] = {}
    send = Stage.send

    def noted(stage: Stage, x: torch.Tensor) -> None:
        sent.setdefault(stage.own.start, set()).add(len(x))
        send(stage, x)

    monkeypatch.setattr(Stage, "send", noted)
    of_deep(deep, [request("r", [7, 8, 9, 10, 11, 12], max_tokens=2, ignore_eos=True)], **THREE)
    assert max(sent[0]) == 2 * 8 and max(sent[2]) == 3 * 8, "eight tokens are rehearsed"


@pytest.mark.parametrize(("method", "depth"), [("eagle3_reduced", 2), ("draft_model", 1), ("mimo", 4), ("dspark", 0)])
def test_every_feature(method: str, depth: int) -> None:
    made = all_features()[depth::4]
    compare(answers_of(method, made, run_ahead=depth, **TWO)[0], answers_of(method, made)[0])


@pytest.mark.parametrize(("method", "depth", "layers"), [("eagle3", 2, 2), ("draft_model", 4, 3)])
def test_preemption(method: str, depth: int, layers: int) -> None:
    """Blocks of the last stage are of its own layer and of the drafter's."""
    made, memory = all_features()[::2], 20 * layers * KV_BLOCK_BYTES // 2
    found, stats = answers_of(method, made, run_ahead=depth, kv_cache_memory_bytes=memory, max_num_seqs=8, **TWO)
    compare(found, answers_of(method, made)[0])
    assert stats.num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize(
    ("method", "drawn", "depth"), [("eagle3", "probabilistic", 1), ("draft_model", "probabilistic", 2)]
)
def test_the_drafters_distribution_judges(method: str, drawn: str, depth: int) -> None:
    """On the last stage, where it is."""
    found, stats = answers_of(method, requests(0.8), drawn, run_ahead=depth, **TWO)
    compare(found, one_rank(method, 0.8, drawn)[0])
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("method", "depth"), [("eagle3", 1), ("v3", 2)])
def test_stages_of_parts(method: str, depth: int) -> None:
    """All parts of the last stage take the first one's drafts, and each tells its own column of ranks."""
    found, stats = answers_of(method, requests(), run_ahead=depth, tensor_parallel_size=2, **TWO)
    compare(found, one_rank(method, 0.0)[0])
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("method", "depth", "seed"),
    [("eagle3", 2, 75), *(pytest.param(each, 4, 77, marks=pytest.mark.soak) for each in METHODS)],
)
def test_on_the_simulated_device(method: str, depth: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "run_ahead": depth}
    with watched() as waits:
        found, stats = answers_of(method, requests(), device=f"sim:{seed}", **small, **TWO)
        waits.check(2)
    compare(found, one_rank(method, 0.0)[0])
    assert stats.num_graph_steps and stats.num_draft_tokens > 0


@pytest.mark.parametrize(("method", "needs"), [("eagle", True), ("draft_model", False)])
def test_where_the_embedding_is(method: str, needs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the last stage only for those that read it."""
    rows: dict[int, int] = {}
    finalize = DecoderModel.finalize

    def noted(model: DecoderModel) -> None:
        if model.config.stage is not None:
            rows[model.config.stage.own.start] = model.embedding.rows
        finalize(model)

    monkeypatch.setattr(DecoderModel, "finalize", noted)
    answers_of(method, requests()[:1], **TWO)
    assert rows == {0: VOCAB, 1: VOCAB * needs}
