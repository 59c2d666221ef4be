"""Layers for multi-token prediction of gated delta nets: each draft is that of the layer over the whole text, computed in plain
torch around a decoder layer of transformers (which leaves these weights out), and tokens are plain decoding's."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from headway.core.config import EngineArgs, Thresholds
from headway.engine.boot import build_engine
from tests.engine.harness import Answer, run
from tests.recurrent.test_engine import CPU, arguments, engine, requests
from tests.recurrent.test_prefixes import conversation
from tests.recurrent.tiny_hybrids import HYBRIDS, folder_of, hf_model
from tests.sim.harness import simulated
from tests.speculative.test_eagle import compare_drafts

NAMES = ("qwen3-next", "qwen3.5")
ATTENDING = 1
"""The model's layer that the block is like."""
AROUND = {"token": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "norm": "norm", "project": "fc"}


def layer(name: str) -> tuple[Any, torch.nn.Module, dict[str, torch.Tensor]]:
    """The target, the block, and what is around it; norms multiply by 1 + their weight."""
    model = hf_model(HYBRIDS[name])
    block = type(model.model.layers[ATTENDING])(model.config, ATTENDING).eval()
    generator = torch.Generator().manual_seed(5)
    for weight in block.state_dict().values():
        weight.normal_(0.0, 0.25, generator=generator)
    hidden = model.config.hidden_size
    around = {key: 0.3 * torch.randn(hidden, generator=generator) for key in ("token", "hidden", "norm")}
    return model, block, around | {"project": 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)}


@functools.cache
def folder_with_layer(name: str) -> str:
    """The checkpoint of the model with the layer in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"headway-mtp-{name}-")) / "model"
    shutil.copytree(folder_of(name), folder)
    _, block, around = layer(name)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"mtp.layers.0.{key}": value.contiguous() for key, value in block.state_dict().items()}
    tensors |= {f"mtp.{AROUND[key]}.weight": value for key, value in around.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


class Oracle:
    """A model and its layer, on whole texts."""

    def __init__(self, name: str) -> None:
        self._target, self._block, self._around = layer(name)

    @torch.no_grad()
    def drafts(self, tokens: list[int], number: int) -> list[int]:
        """What follows ``tokens``, by the most likely token each."""
        found = self._target(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False)
        hidden, text = found.hidden_states[-1][0], list(tokens)
        for _ in range(number):
            out = self._pass(torch.tensor(text[1:]), hidden)
            text.append(int(self._target.lm_head(out[-1]).argmax()))
            hidden = torch.cat([hidden, out[-1:]])
        return text[len(tokens) :]

    def _pass(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        model = self._target.model
        parts = [self._norm(model.embed_tokens(tokens), "token"), self._norm(hidden, "hidden")]
        x = F.linear(torch.cat(parts, 1), self._around["project"])[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min).triu(1)[None, None]
        turned = model.rotary_emb(x, position_ids=positions)
        made = self._block(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        return self._norm((made[0] if isinstance(made, tuple) else made)[0], "norm")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self._target.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + self._around[name])


def drafting(name: str, number: int) -> dict[str, Any]:
    config = {"method": "mtp", "num_speculative_tokens": number, "adaptive": False}
    return {"model": folder_with_layer(name), "speculative_config": config}


@pytest.mark.parametrize(("name", "number"), [("qwen3-next", 3), ("qwen3.5", 1)])
def test_drafts_are_those_of_the_layer_over_the_whole_text(name: str, number: int) -> None:
    asked = [each for each in requests(6) if each.params.temperature == 0.0]
    core = engine(name)
    expected = run(core, asked)
    core.shutdown()
    oracle, compared = Oracle(name), 0
    changes = CPU | {"enable_prefix_caching": True, "max_num_batched_tokens": 24} | drafting(name, number)
    core = build_engine(EngineArgs(**arguments(name, **changes)), progress=False)
    answers = {each.request_id: Answer() for each in asked}
    for each in asked:
        core.add(each)
    while core.has_work():
        for update in core.step():
            answers[update.request_id].take(update)
        compared += compare_drafts(core, cast(Any, oracle), number)
    assert {key: answer.token_ids for key, answer in answers.items()} == {
        key: answer.token_ids for key, answer in expected.items()
    }
    assert compared > 10
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("name", "number", "depth"), [("qwen3-next", 2, 2)])
def test_on_the_simulated_device(name: str, number: int, depth: int, monkeypatch: Any) -> None:
    """Prompts that share prefixes, with few checkpoints, twice."""
    monkeypatch.setattr("headway.engine.sizes.CHECKPOINTS_PER_SLOT", 0.75)
    asked = conversation()[:3]
    core = engine(name)
    expected = run(core, asked)
    core.shutdown()
    changes = arguments(name, run_ahead=depth, max_num_batched_tokens=48, **drafting(name, number))
    with simulated(8, thresholds=Thresholds(checkpoint_every=24), **changes) as (core, _, _):
        for _ in range(2):
            for key, answer in run(core, asked).items():
                assert answer.token_ids == expected[key].token_ids, key
        assert core.stats().prefix_cache_hits > 0
