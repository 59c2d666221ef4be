"""Loading: every tensor lands once in the right place, and anything amiss is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.kernels.linear_forms.shapes import HEAD_MULTIPLE
from headway.models.decoder import DecoderModel
from headway.models.layers.attention import Attention
from headway.models.load import load_model, parameter_bytes
from headway.weights import Checkpoint, open_checkpoint
from tests.models.harness import DEVICE, Machine, Row
from tests.models.tiny import TINY, hf_model, save

Tensors = list[tuple[str, torch.Tensor]]


class ListedTensors:
    """Tensor files held in memory, so that a test can spoil them."""

    def __init__(self, tensors: Tensors) -> None:
        self.listed = tensors
        self.num_bytes = sum(tensor.nbytes for _, tensor in tensors)

    def names(self) -> set[str]:
        return {name for name, _ in self.listed}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.listed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "llama-tied-sharded", "qwen2")
    return {name: save(hf_model(TINY[name]), tmp_path_factory.mktemp(name)) for name in names}


def load(checkpoint: Checkpoint, **options: Any) -> DecoderModel:
    """Tests that look at weights load float16: the one type whose layout no device changes."""
    defaults: dict[str, Any] = {"dtype": torch.float32, "progress": False, "seed": 0}
    model = load_model(checkpoint, device=DEVICE, max_model_len=16, **defaults | options)
    assert isinstance(model, DecoderModel)
    return model


def spoiled(folder: Path, **changes: Any) -> tuple[Checkpoint, Tensors]:
    """A checkpoint whose tensors the test may change."""
    whole = open_checkpoint(str(folder))
    tensors = [(name, tensor.clone()) for name, tensor in whole.tensors()]
    return Checkpoint(folder, whole.config | changes, {}, ListedTensors(tensors)), tensors


def test_parameters_are_allocated_once_in_the_given_dtype(saved: dict[str, Path]) -> None:
    model = load(open_checkpoint(str(saved["qwen2"])), dtype=torch.float16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert {parameter.device.type for parameter in model.parameters()} == {DEVICE.type}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    tables = {block.mixer.cos_sin for block in model.blocks if isinstance(block.mixer, Attention)}
    assert [(table.dtype, table.shape) for table in tables] == [(torch.float32, (16, 20))], "layers share one"
    assert model.head is not None
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr(), "tied weights are one tensor"
    total = sum(parameter.numel() for parameter in model.parameters())
    padding = model.head.weight.shape[0] - model.config.vocab_size  # no checkpoint fills it
    assert 0 < padding < HEAD_MULTIPLE
    assert parameter_bytes(model.config, torch.float16) == 2 * (total - padding * model.config.hidden_size)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_rows_of_the_output_layer_are_padded(saved: dict[str, Path], name: str) -> None:
    """Tied or not, to a multiple of 8 with zeros; the logits are the vocabulary's, their rows as far apart as those of the
    product."""
    model = load(open_checkpoint(str(saved[name])), dtype=torch.float16)
    assert model.head is not None and model.config.vocab_size == 97
    assert model.head.weight.shape == (104, 40) and not model.head.weight[97:].any() and model.head.weight[:97].any()
    logits = model.logits(torch.ones(3, 40, dtype=torch.float16, device=DEVICE))
    assert logits.shape == (3, 97) and logits.stride() == (104, 1)


def test_missing_and_unexpected_tensors_are_named(saved: dict[str, Path]) -> None:
    checkpoint, tensors = spoiled(saved["llama"])
    tensors[:] = [(n, t) for n, t in tensors if n != "model.layers.1.self_attn.k_proj.weight"]
    tensors.append(("model.layers.2.mlp.up_proj.weight", torch.zeros(2)))
    with pytest.raises(WeightsError) as caught:
        load(checkpoint)
    assert "model.layers.2.mlp.up_proj.weight not expected" in str(caught.value)
    assert "model.layers.1.self_attn.k_proj.weight missing" in str(caught.value)


def test_untied_models_need_their_head(saved: dict[str, Path]) -> None:
    checkpoint, tensors = spoiled(saved["llama"])
    tensors[:] = [(n, t) for n, t in tensors if n != "lm_head.weight"]
    with pytest.raises(WeightsError, match=r"lm_head\.weight missing"):
        load(checkpoint)


def test_long_lists_are_cut(saved: dict[str, Path]) -> None:
    checkpoint, tensors = spoiled(saved["llama"])
    tensors.clear()
    with pytest.raises(WeightsError, match=r"lm_head\.weight, .* and 13 more missing"):
        load(checkpoint)


def test_repeated_tensors_are_named(saved: dict[str, Path]) -> None:
    checkpoint, tensors = spoiled(saved["llama"])
    tensors.append(tensors[3])
    with pytest.raises(WeightsError, match=f"{tensors[3][0]} is in the checkpoint twice"):
        load(checkpoint)


@pytest.mark.parametrize("shape", [(39, 40), (40, 40, 1), (40,), (0, 40), (80, 40)])
def test_wrong_shapes_are_named(saved: dict[str, Path], shape: tuple[int, ...]) -> None:
    """k_proj is [40, 40]: what broadcasts, or would run into the values, is refused all the same."""
    checkpoint, tensors = spoiled(saved["llama"])
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[:] = [(n, torch.zeros(shape) if n == name else t) for n, t in tensors]
    with pytest.raises(WeightsError, match=rf"{name} has shape .*config\.json implies \[40, 40\]"):
        load(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused(saved: dict[str, Path], dtype: torch.dtype) -> None:
    checkpoint, tensors = spoiled(saved["llama"])
    tensors[5] = (tensors[5][0], tensors[5][1].to(dtype))
    with pytest.raises(WeightsError, match=f"{tensors[5][0]} has type {dtype}"):
        load(checkpoint)


def test_known_leftovers_are_ignored(saved: dict[str, Path]) -> None:
    checkpoint, tensors = spoiled(saved["llama-tied-sharded"])
    tensors.append(("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(10)))
    tensors.append(("lm_head.weight", torch.full((131, 40), 9.0)))
    model = load(checkpoint, dtype=torch.float16)
    assert model.head is not None
    assert model.head.weight.abs().max() < 9.0


def test_unsupported_configurations_are_refused_before_any_tensor_is_read(saved: dict[str, Path]) -> None:
    class Unreadable(ListedTensors):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            raise AssertionError("read")

    config = open_checkpoint(str(saved["llama"])).config | {"hidden_act": "hardswish"}
    with pytest.raises(UnsupportedModelError, match="hidden_act"):
        load(Checkpoint(saved["llama"], config, {}, Unreadable([])))


def test_weights_are_copied_not_mapped(saved: dict[str, Path]) -> None:
    checkpoint, tensors = spoiled(saved["llama"])
    model = load(checkpoint)
    assert model.norm is not None
    before = model.norm.weight.clone()
    for _, tensor in tensors:
        tensor.fill_(float("nan"))
    assert torch.equal(model.norm.weight, before)


def test_dummy_weights_are_seeded_and_sane(saved: dict[str, Path]) -> None:
    def dummy(seed: int) -> DecoderModel:
        return load(open_checkpoint(str(saved["qwen2"]), load_format="dummy"), seed=seed, dtype=torch.float16)

    first, again, other = dummy(3), dummy(3), dummy(4)
    for (name, one), two in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert torch.isfinite(one).all(), name
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert first.norm is not None and (first.norm.weight == 1).all()
    assert 0.018 < first.embedding.weight.std().item() < 0.022
    logits = Machine(first).step([Row(0, [1, 2, 3])])[0]
    assert torch.isfinite(logits).all()


def test_the_bar_is_only_for_terminals(
    saved: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(saved["llama"]))
    load(checkpoint, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load(checkpoint, progress=False)
    assert capsys.readouterr().err == ""
    load(checkpoint, progress=True)
    assert "loading weights" in capsys.readouterr().err


@pytest.mark.parametrize("prefixes", [("model.", ""), ("", "language_model."), ("model.", "model.language_model.")])
def test_names_of_a_text_model_taken_from_another(prefixes: tuple[str, str], saved: dict[str, Path]) -> None:
    """Without the trunk's name, or as they were in a model with sight."""
    wanted = load(open_checkpoint(str(saved["llama"])))
    checkpoint, tensors = spoiled(saved["llama"])
    old, new = prefixes
    tensors[:] = [(new + name.removeprefix(old) if name.startswith(old) else name, each) for name, each in tensors]
    rows = [Row(1, [5, 6, 7])]
    assert torch.equal(Machine(load(checkpoint)).step(rows)[0], Machine(wanted).step(rows)[0])
