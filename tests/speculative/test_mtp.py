"""Layers for multi-token prediction: every draft is that of the layer over the whole text, and tokens are plain decoding's."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, WeightsError
from headway.core.messages import AddRequest
from headway.core.speculative import read_speculative
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.models.decoder import DecoderConfig
from headway.models.load import describe
from headway.models.registry import read_config
from headway.state.cache_pool import bytes_per_block
from tests.engine.harness import Answer, request, run
from tests.runner.small_shapes import use_few_tails
from tests.sim.harness import folder_of_model, simulated
from tests.speculative.test_eagle import Fickle, compare_drafts
from tests.speculative.tiny_mtp import MODELS, Oracle, folder_of

BLOCK = 8


def arguments(name: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    """Of an engine; ``number``: of drafts, 0 for none."""
    sizes: dict[str, Any] = {
        "model": str(folder_of(name)), "dtype": "float32", "max_model_len": 128, "max_num_seqs": 3, "block_size": BLOCK,
        "max_num_batched_tokens": 20,
    }  # fmt: skip
    if number:
        sizes["speculative_config"] = {"method": "mtp", "num_speculative_tokens": number, "adaptive": False}
    return sizes | changes


def on_cpu(name: str, number: int = 0, **changes: Any) -> EngineCore:
    args = arguments(name, number, device="cpu", **{"run_ahead": 0} | changes)
    return build_engine(EngineArgs(**args), progress=False)


def requests(max_tokens: int = 10, *, greedy: bool = True) -> list[AddRequest]:
    """Prefixes of each other, whole blocks long or not."""
    prompt = [3 + (7 * i) % 90 for i in range(33)]
    prompts = [prompt, prompt[:24], [*prompt[:24], 50, 51], prompt[:25], [*prompt[:16], 9] * 2]
    return [
        request(
            f"r{i}", each, seed=i, temperature=0.0 if greedy or i % 2 else 1.2, ignore_eos=True, max_tokens=max_tokens
        )
        for i, each in enumerate(prompts)
    ]


@functools.cache
def truth(name: str, greedy: bool) -> dict[str, list[int]]:
    """Tokens without drafts."""
    core = on_cpu(name, enable_prefix_caching=False, kv_cache_memory_bytes=2**20)
    found = {key: answer.token_ids for key, answer in run(core, requests(greedy=greedy)).items()}
    core.shutdown()
    return found


@functools.cache
def pool(name: str, blocks: int) -> int:
    """Bytes of so many blocks, those of the layer included."""
    spec = describe(json.loads((folder_of(name) / "config.json").read_text()))
    own = bytes_per_block(spec.cache, BLOCK, torch.float32)
    return blocks * (own + own // spec.num_layers)


@pytest.mark.parametrize(("name", "number"), [
    ("v3", 3), ("v3.2", 2), ("glm-4-moe", 3), pytest.param("glm-4-moe-lite", 1, marks=pytest.mark.soak), ("mimo", 2),
])  # fmt: skip
def test_drafts_are_those_of_the_layer_over_the_whole_text(name: str, number: int) -> None:
    """In chunks, behind prefixes that are found, whole or with another token behind them, and after preemptions."""
    oracle, expected, compared = Oracle(name), truth(name, True), 0
    core = on_cpu(name, number, kv_cache_memory_bytes=pool(name, 20))
    answers = {each.request_id: Answer() for each in requests()}
    for each in requests():
        core.add(each)
    while core.has_work():
        for update in core.step():
            answers[update.request_id].take(update)
        compared += compare_drafts(core, oracle, number)
    assert {key: answer.token_ids for key, answer in answers.items()} == expected
    assert compared > 20 and core.stats().prefix_cache_hits > 0
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("name", "number", "depth", "eager"), [
    ("v3", 2, 2, False), pytest.param("glm-4-moe", 3, 4, True, marks=pytest.mark.soak),
])  # fmt: skip
def test_on_the_simulated_device(
    name: str, number: int, depth: int, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted, at depths, with drafts that come and go."""
    use_few_tails(monkeypatch)
    changes = arguments(
        name,
        number,
        run_ahead=depth,
        enforce_eager=eager,
        kv_cache_memory_bytes=pool(name, 20),
        max_num_batched_tokens=24,
    )
    expected = truth(name, False)
    with simulated(3 + depth, **changes) as (core, _, _):
        if eager:
            core._draft_pacer = Fickle((1, 2, number + 1))
        for key, answer in run(core, requests(greedy=False)).items():
            assert answer.token_ids == expected[key], key
        stats = core.stats()
        assert stats.prefix_cache_hits and (stats.num_graph_steps > 0) is not eager


@pytest.mark.soak
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_at_every_depth(name: str, depth: int) -> None:
    for number in (1, 4):
        changes = arguments(name, number, run_ahead=depth, kv_cache_memory_bytes=pool(name, 20))
        with simulated(11 + depth, **changes) as (core, _, _):
            for key, answer in run(core, requests(greedy=False)).items():
                assert answer.token_ids == truth(name, False)[key], key


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no layer for multi-token prediction"):
        on_cpu("v3", 2, model=str(folder_of_model()))
    with pytest.raises(ConfigError, match="leave model and revision out"):
        config = {"method": "mtp", "model": str(folder_of_model()), "num_speculative_tokens": 2}
        on_cpu("v3", speculative_config=config)
    shutil.copytree(folder_of("v3"), tmp_path / "v3")
    file = tmp_path / "v3" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "eh_proj" not in name}, file)
    with pytest.raises(WeightsError, match=r"eh_proj\.weight missing"):
        on_cpu("v3", 2, model=str(tmp_path / "v3"))
    on_cpu("v3", model=str(tmp_path / "v3")).shutdown()  # who asks for no drafts needs no such layer
    config = json.loads((tmp_path / "v3" / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "v3" / "config.json").write_text(json.dumps(config))
    save_file({name: tensor for name, tensor in tensors.items() if ".layers.2." not in name}, file)
    with pytest.raises(ConfigError, match="no layer for multi-token prediction"):
        on_cpu("v3", 2, model=str(tmp_path / "v3"))


def test_older_names_of_the_method() -> None:
    found = read_speculative({"method": "deepseek_mtp", "num_speculative_tokens": 1})
    assert found is not None and found.method == "mtp"


@pytest.mark.parametrize("number", [1, 3])
def test_layers_that_do_not_draft_are_told(number: int) -> None:
    """Of a checkpoint with several such layers the first drafts, and the log says of how many."""
    config = read_config(
        json.loads((folder_of("v3") / "config.json").read_text()) | {"num_nextn_predict_layers": number}
    )
    assert isinstance(config, DecoderConfig) and config.mtp is not None and config.mtp.layers == number
