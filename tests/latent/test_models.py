"""Every model with latent attention against transformers, however the sequence is cut into steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import GlmMoeDsaConfig

from headway.core.errors import UnsupportedModelError
from headway.models.decoder import DecoderConfig
from headway.models.deepseek import index_kinds
from headway.models.fields import Fields
from headway.models.registry import read_config
from tests.latent.tiny_latents import LATENTS, LENGTH, folder_of, pair
from tests.models.harness import Machine, Row

# float32 on both sides: differences are orders of summation. Logits have a deviation of 1 to 5.
TOLERANCE: dict[str, Any] = {"atol": 5e-4, "rtol": 2e-4}

cases = pytest.mark.parametrize("name", LATENTS)


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of five tokens are long, and contexts come in pieces of 16."""
    monkeypatch.setattr("headway.core.latents.SHORT_ROW", 4)
    monkeypatch.setattr("headway.core.latents.SMALL_STEP", 4)
    monkeypatch.setattr("headway.attention.mla.PIECE_BYTES", 0)


@cases
def test_logits_of_uneven_steps(name: str) -> None:
    check_logits(name, [7, 1, 12, 2, 1, 3, 44])


@pytest.mark.parametrize("name", ["v2-lite", "v3-yarn", "v3.2"])
@pytest.mark.parametrize("sizes", [[LENGTH], [2] + [1] * (LENGTH - 2)], ids=["whole", "single"])
def test_logits_of_one_step_and_of_many(name: str, sizes: list[int]) -> None:
    check_logits(name, sizes)


@cases
@pytest.mark.soak
@pytest.mark.parametrize("sizes", [[LENGTH], [2] + [1] * (LENGTH - 2)], ids=["whole", "single"])
def test_logits_of_all_models(name: str, sizes: list[int]) -> None:
    check_logits(name, sizes)


def check_logits(name: str, sizes: list[int]) -> None:
    case = pair(name)
    logits = Machine(case.model).in_chunks(case.tokens, sizes)
    torch.testing.assert_close(logits, case.logits, **TOLERANCE)


@cases
def test_mixed_batch_with_zombie_and_padding(name: str) -> None:
    """Decode rows, zombies and rows of many tokens keep apart; nobody writes where he must not."""
    case = pair(name)
    tokens, wanted = case.tokens, case.logits
    machine = Machine(case.model)
    machine.step([Row(3, tokens[:10]), Row(0, tokens[:20]), Row(1, tokens[:33])])
    owned = {slot: machine.owned(slot) for slot in (0, 2, 3)}
    before = [cache.clone() for cache in machine.cached]
    rows = [
        Row(3, tokens[10:11], 10),
        Row(0, [5], 20, alive=False),
        Row(4, tokens[:9]),
        Row(2, [7] * 6, 4, alive=False),
        Row(1, tokens[33:50], 33),
    ]
    decode, _, prefill, _, more = machine.step(rows, pad_rows=2, pad_tokens=3)
    torch.testing.assert_close(decode, wanted[10:11], **TOLERANCE)
    torch.testing.assert_close(prefill, wanted[:9], **TOLERANCE)
    torch.testing.assert_close(more, wanted[33:50], **TOLERANCE)
    for old, new in zip(before, machine.cached, strict=True):
        for slot in (0, 2):
            assert torch.equal(old[owned[slot]], new[owned[slot]]), "a zombie row wrote latents"
        assert not new[0].any(), "the null block was written"
        assert not torch.equal(old[owned[3]], new[owned[3]])


@cases
def test_last_tokens_alone(name: str) -> None:
    case = pair(name)
    machine = Machine(case.model)
    machine.step([Row(1, case.tokens[:4])])
    logits = machine.last_step([Row(1, case.tokens[4:20], 4), Row(3, case.tokens[:9])], pad_rows=1, pad_tokens=2)
    torch.testing.assert_close(logits, case.logits[[19, 8]], **TOLERANCE)


@pytest.mark.parametrize("name", ["v3.2", "glm-dsa-shared"])
def test_tokens_are_scored_by_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens at once, of contexts of up to 80."""
    monkeypatch.setattr("headway.attention.mla_index.SCORES", 250)
    check_logits(name, [30, 1, 39])


@pytest.mark.parametrize("name", ["v3.2", "glm-dsa-shared"])
def test_tokens_of_many_rows_are_scored_by_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever part a token is in, it is scored against its own row's text."""
    monkeypatch.setattr("headway.attention.mla_index.SCORES", 250)
    test_mixed_batch_with_zombie_and_padding(name)
    test_last_tokens_alone(name)


def test_config_is_refused_by_name() -> None:
    config = json.loads((folder_of("v3.2") / "config.json").read_text())
    lite = json.loads((folder_of("v2-lite") / "config.json").read_text())
    for field, value, base in [
        ("num_key_value_heads", 2, lite),
        ("q_lora_rank", None, config),
        ("index_head_dim", 4, config),
        ("layer_types", ["full_attention"] * 3, config),
        ("mlp_layer_types", ["dense"], config),
        ("norm_topk_prob", True, lite | {"first_k_dense_replace": 1}),
        ("topk_method", "noaux_tc", lite | {"first_k_dense_replace": 1, "num_experts_per_tok": 2}),
        ("scoring_func", "softmax", config | {"mlp_layer_types": ["sparse"] * 3}),
    ]:
        with pytest.raises(UnsupportedModelError, match=field):
            read_config(base | {field: value})


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    config = json.loads((folder_of("v3-yarn") / "config.json").read_text())
    found = read_config(config | {"num_nextn_predict_layers": 1})
    assert isinstance(found, DecoderConfig)
    assert found.unused == ("layers.3.",)


def test_architectures_that_are_not_there_say_why() -> None:
    with pytest.raises(UnsupportedModelError, match=r"DeepseekV4ForCausalLM.*: its .*Take a DeepseekV32ForCausalLM"):
        read_config({"architectures": ["DeepseekV4ForCausalLM"]})


@pytest.mark.parametrize("offset", [None, 1, 2, 3])
@pytest.mark.parametrize("every", [None, 1, 2, 4])
def test_layers_that_share_an_indexer(every: int | None, offset: int | None) -> None:
    """By numbers alone, as transformers' own configuration makes them out."""
    given = {"index_topk_freq": every, "index_skip_topk_offset": offset}
    given = {name: value for name, value in given.items() if value is not None}
    for layers in (1, 2, 7, 12):
        kinds = GlmMoeDsaConfig(num_hidden_layers=layers, **given).indexer_types
        assert index_kinds(Fields({"num_hidden_layers": layers, **given})) == tuple(kinds)
