"""What a start takes is what is measured and told of: walks through models' own tables of forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.kernels.linear_forms import provenance
from headway.kernels.linear_forms.bare import handover
from headway.kernels.linear_forms.provenance import ROWS, describe, spans
from headway.kernels.linear_forms.shapes import DecoderShape, Product
from headway.kernels.linear_forms.tune import usual
from headway.kernels.linear_forms.winners import Form
from headway.kernels.mid_linear.tile import is_early
from headway.kernels.mid_linear.tiles import mid_rows
from headway.kernels.skinny_linear.tiles import fused_rows
from headway.models.decoder import DecoderModel
from headway.models.layers.form_walk import decided, groups
from headway.models.layers.forms import FormTable, Rules
from headway.models.load import products
from headway.models.registry import model_class, read_config
from tests.kernels.measured_alone import measure, tuned
from tests.models.test_launches import SHAPES
from tests.models.tiny import TINY, hf_model
from tests.recurrent import tiny_hybrids

CPU = torch.device("cpu")
GLM: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"], "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 704,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "attention_bias": True, "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}  # fmt: skip
OLMO = {**GLM, "architectures": ["Olmo2ForCausalLM"], "attention_bias": False}
WHOLE = {name: {"num_hidden_layers": 3, "max_position_embeddings": 4096, **fields} for name, fields in SHAPES.items()}
MAMBA = WHOLE["mamba2-780m"]


def table_of(config: Mapping[str, Any]) -> FormTable:
    """As a start on an H200 has it."""
    found = read_config(config)
    model = model_class(found.architecture)(found, dtype=torch.bfloat16, device=torch.device("meta"), max_model_len=64)
    assert isinstance(model, DecoderModel)
    model.finalize()
    model.use_forms(Rules(fused_rows, mid_rows, None, handover))
    return model.forms


def config_of(name: str) -> dict[str, Any]:
    """Of a tiny model."""
    oracle = hf_model(TINY[name]) if name in TINY else tiny_hybrids.hf_model(tiny_hybrids.HYBRIDS[name])
    config: dict[str, Any] = oracle.config.to_dict()
    return config | {"architectures": [type(oracle).__name__]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(provenance, "runs_gluon", lambda device: True)


def told(config: Mapping[str, Any]) -> str:
    """What a start says."""
    return describe(partial(decided, table_of(config)), CPU)


def test_what_is_measured_of_norms_behind_products() -> None:
    """Every product by itself, with its bias, its gate, and what stands around it."""
    found = groups(table_of(GLM))
    bare, gated = (("few", "skinny_linear"), ("meet", "bare_linear")), (("few", "gate_up"), ("meet", "bare_gate_up"))
    assert set(found) == {
        (Product("qkv", 640, 256, (("few", "norm_linear"),), bias=True, place="entering"),),
        (Product("qkv", 640, 256, bare, bias=True),),
        (Product("o", 256, 384, (("few", "skinny_linear"), ("meet", "linear_parts")), place="behind"),),
        (Product("gate_up", 1408, 256, gated, gate="silu"),),
        (Product("down", 256, 704, (("few", "skinny_linear"), ("meet", "linear_parts")), place="behind"),),
        (Product("head", 1000, 256, (("few", "skinny_linear"), ("meet", "mid_linear"))),),
    }
    assert len(found) == len(set(found))
    olmo = [each.place for group in groups(table_of(OLMO)) for each in group]
    assert "entering" not in olmo, "OLMo 2 has no norm before its first product"
    gemma = products(WHOLE["gemma3-1b"])
    assert "gelu_tanh" in {each.gate for group in gemma for each in group}


def test_what_is_measured_of_layers_that_take_their_forms_together() -> None:
    mamba, head = products(MAMBA)
    assert [each.place for each in mamba] == ["", "added"] and head[0].junction == "head"
    assert [dict(each.ops) for each in mamba] == [
        {"few": "norm_linear", "meet": "mid_linear", "parts": "mid_linear"},
        {"few": "linear_add", "meet": "mid_add", "parts": "linear_parts"},
    ]
    norms = products(config_of("starcoder2"))
    assert {each.place for group in norms for each in group} == {"normed", "added", ""}, "a LayerNorm is in no op"


def test_usual_layers_are_measured_whole_and_others_alone() -> None:
    llama = WHOLE["llama-8b"]
    assert usual(llama, products(llama)) == DecoderShape(4096, 14336, 32, 8, 128, 128256)
    assert usual(GLM, products(GLM)) is None and usual(MAMBA, products(MAMBA)) is None
    biased = {**llama, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": True}
    assert usual(biased, products(biased)) is None, "a chain has no biases there"


@pytest.mark.parametrize("name", [*TINY, *tiny_hybrids.HYBRIDS])
def test_no_op_that_a_start_takes_is_left_out(name: str) -> None:
    """Whatever the tables say: each decision of a start for any number of rows is one of those that are measured."""
    table = table_of(config_of(name))
    measured = {(op, *each.size) for group in groups(table) for each in group for _, op in each.ops}
    every = range(1, 257)
    for rules in (
        Rules(lambda *_: 16, lambda *_: every, None, lambda *_: 8),
        Rules(lambda *_: 16, lambda kind, *_: range(0) if kind == "mid_add" else every),
        Rules(lambda *_: 16),
        Rules(lambda *_: 4, lambda *_: range(9, 65)),
    ):
        asked = FormTable(table.layers, table.head, rules)
        for rows in ROWS:
            taken = {(op, *each.size) for each, op in decided(asked, rows).items() if op != "plain"}
            assert taken <= measured, (rows, taken - measured)


def times(product: Product, rows: int, form: Form) -> float:
    """Few rows are faster up to 4, what starts early up to 128."""
    op, _ = form
    if op == "plain":
        return 50.0
    return 10.0 + rows / 4 if is_early(op) and rows <= 128 else 60.0 if is_early(op) else 8.5 + rows / 2


@pytest.mark.parametrize("config", [GLM, OLMO, MAMBA], ids=["glm4", "olmo2", "mamba2"])
def test_a_start_takes_what_was_measured_and_says_so(config: dict[str, Any], cache: None) -> None:
    before = told(config)
    assert "measured" not in before and "tuned" not in before and "chosen by the rule: " in before
    with tuned(measure(products(config), ROWS, times, most=2)):
        text = told(config)
        assert text.startswith("tiles of linear layers tuned on this machine: ") and "rule" not in text
        table = table_of(config)
        for rows in ROWS:
            for product, op in decided(table, rows).items():
                if product.place == "entering" and rows > 4:
                    continue  # its own entries are of few rows; the others' say where these end
                kind = "plain" if rows > 128 else "early" if rows > 4 else "few"
                assert (op if op == "plain" else "early" if is_early(op) else "few") == kind, (rows, product, op)


def test_a_start_says_which_rows_are_guessed(cache: None) -> None:
    """Of Granite's shape an H200 measured sums of squares up to 64 rows, and no parts, which a start takes beyond."""
    text = told(WHOLE["granite-2b"])
    assert "measured on an H200: qkv, o (1 to 64 rows), gate_up, down (1 to 64 rows);" in text
    assert (
        "chosen by the rule: o (128 to 256 rows), down (128 to 256 rows), head; headway tune MODEL measures these"
        in text
    )
    assert told(WHOLE["qwen3-0.6b"]) == "tiles of linear layers measured on an H200: qkv, o, gate_up, down, head"
    gemma = told(WHOLE["gemma3-1b"])
    assert "measured on an H200: head; chosen by the rule: qkv, o, gate_up, down;" in gemma, (
        "others measured behind norms"
    )


def test_rows_that_were_not_measured_are_guessed(cache: None) -> None:
    found = measure(
        products(GLM),
        (1, 16, 64),
        lambda product, rows, form: {"plain": 9.0}.get(form[0], 5.0 + is_early(form[0])),
        most=2,
    )
    with tuned(found):
        text = told(GLM)
    assert "o (1, 16 to 256 rows)" in text and "rule: qkv (2 to 8 rows), o (2 to 8 rows)" in text, text
    assert spans(dict.fromkeys(ROWS, "rule"), "rule") == ""


def test_models_of_several_sizes_have_them_told(cache: None) -> None:
    text = told(WHOLE["gated-delta-net"])
    assert "qkv [12352, 1024]" in text and "qkv [5120, 1024]" in text and "gate_up," in text


def test_nothing_is_said_where_there_is_nothing_to_choose(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe(lambda rows: {}, CPU) == ""
    monkeypatch.setattr(provenance, "runs_gluon", lambda device: False)
    assert told(GLM) == ""


def test_an_entry_of_another_op_does_not_make_a_guess_measured(cache: None) -> None:
    """The hole that this closes: tiles for products that norm their rows say nothing of products that do not."""
    product = Product("qkv", 640, 256, (("few", "skinny_linear"), ("meet", "bare_linear")))
    wrong = replace(product, ops=(("few", "norm_linear"), ("meet", "mid_linear")))
    with tuned(measure([(wrong,)], ROWS, times, most=2)):
        assert "qkv" in told(OLMO | {"attention_bias": False}).split("chosen by the rule: ")[1]


def test_entries_come_back_from_a_file_as_they_were(cache: None) -> None:
    found = measure(products(GLM), ROWS, times, most=2)
    with tuned(found) as path:
        listed = json.loads(path.read_text(encoding="utf-8"))["entries"]
    read: dict[tuple[str, int, int], dict[int, tuple[int, ...]]] = {}
    for op, outputs, inputs, rows, tile in listed:
        read.setdefault((op, outputs, inputs), {})[rows] = tuple(tile)
    assert read == found.entries
