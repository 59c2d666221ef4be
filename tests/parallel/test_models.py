"""Every decoder of the house, cut into parts and stages, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.errors import ConfigError, UnsupportedModelError
from headway.parallel.mesh import Mesh
from tests.models.tiny import LENGTH, TINY, hf_model, save
from tests.parallel.ranks import logits_of, on_ranks

TOLERANCE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}
ODD = "llama-one-kv-head"
"""Its five heads cannot be dealt out."""
QUICK = ("llama-tied-sharded", "llama-biases", "qwen3-bias-window", "olmo2", "qwen2-upper-window")
"""Of the others one of each family is in test_families.py, against one rank instead of transformers, which is cheaper."""
ONE_LAYER = "llama-no-grouping"
SLOW = [name for name in TINY if name not in (*QUICK, ODD)]


def check(name: str, mesh: Mesh, folder: Path) -> None:
    oracle = hf_model(TINY[name])
    tokens = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        wanted = oracle(torch.tensor([tokens])).logits[0]
    save(oracle, folder, TINY[name].shards)
    found = logits_of(folder, mesh, tokens, [7, 1, 12, 2, 4])
    assert len(found) == mesh.tensor
    for each in found:
        torch.testing.assert_close(each, wanted, **TOLERANCE)
        assert torch.equal(each, found[0]), "all ranks must draw the same tokens"


@pytest.mark.parametrize("name", QUICK)
def test_two_parts(name: str, tmp_path: Path) -> None:
    check(name, Mesh(2, 1), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", SLOW)
def test_two_parts_of_the_others(name: str, tmp_path: Path) -> None:
    check(name, Mesh(2, 1), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in (*QUICK, *SLOW) if name != ONE_LAYER])
@pytest.mark.parametrize("mesh", [Mesh(4, 1), Mesh(1, 2), Mesh(2, 2)], ids=str)
def test_other_meshes_of_all(name: str, mesh: Mesh, tmp_path: Path) -> None:
    check(name, mesh, tmp_path)


@pytest.mark.parametrize("name", ["olmo2", "llama-tied-sharded"])
def test_more_ranks_than_heads_of_keys(name: str, tmp_path: Path) -> None:
    check(name, Mesh(4, 1), tmp_path)


@pytest.mark.parametrize("name", ["gemma3", "llama-tied-sharded", "cohere2", "gpt-neox"])
def test_two_stages(name: str, tmp_path: Path) -> None:
    check(name, Mesh(1, 2), tmp_path)


def test_stages_of_parts(tmp_path: Path) -> None:
    check("olmo3", Mesh(2, 3), tmp_path)


def test_heads_that_cannot_be_dealt_out(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot deal out 5 heads with 1 heads"):
        check(ODD, Mesh(2, 1), tmp_path)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=3 is more than the model's 2 layers"):
        Mesh(1, 3).layers(2)


@pytest.mark.parametrize("pipeline", range(1, 6))
@pytest.mark.parametrize("num_layers", [5, 6, 11])
def test_stages_have_all_layers_in_order(pipeline: int, num_layers: int) -> None:
    ranks = sorted((Mesh(2, pipeline, rank) for rank in range(2 * pipeline)), key=lambda mesh: mesh.stage)
    layers = [layer for mesh in ranks if mesh.tensor_rank == 0 for layer in mesh.layers(num_layers)]
    assert layers == list(range(num_layers))
    assert Mesh(2, pipeline, 0).is_last, "rank 0 draws the tokens"


def test_collectives_agree_bit_by_bit() -> None:
    """Ranks that summed in different orders would drift apart."""

    def work(world: Any) -> torch.Tensor:
        x = torch.randn(5, 301, generator=torch.Generator().manual_seed(world.mesh.rank))
        return torch.cat([world.tensor.all_reduce(x.clone()), world.tensor.all_gather(x).sum(0)])

    found = on_ranks(Mesh(3, 1), work)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0][:5], found[0][5:])
