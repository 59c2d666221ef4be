"""Rotary tables against transformers' own, beyond the lengths the model tests reach, and reading configurations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headway.core.errors import UnsupportedModelError
from headway.kernels.rope_kv_write.reference import rotate
from headway.models.layers.attention import Attention, AttentionSpec
from headway.models.layers.mixer import Site
from headway.models.layers.norm import NormSpec
from headway.models.rope import ROPE_KINDS, RopeConfig, cos_sin_table, read_rope

HEAD_DIM = 24
LONG = {"short_factor": [1.0 + i for i in range(12)], "long_factor": [3.0 + i for i in range(12)]}
CPU = torch.device("cpu")

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4},
    "linear-partial": {"rope_type": "linear", "factor": 4, "partial_rotary_factor": 0.5},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "llama3-no-original": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn-no-band": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e-4, "beta_slow": 1e-4},
    "longrope": {"factor": 8.0, "original_max_position_embeddings": 512} | LONG,
    "proportional": {"partial_rotary_factor": 0.5},
    "longrope-ratio": {"rope_type": "longrope", "original_max_position_embeddings": 256} | LONG,
}


def transformers_table(scaling: dict[str, Any], max_len: int, max_position: int) -> torch.Tensor:
    """What transformers uses for one sequence of max_len tokens, as our layout."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": 5000.0} | scaling,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(max_len)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)


@pytest.mark.parametrize("max_len", [300, 1024, 3000])
@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str, max_len: int) -> None:
    scaling = {"rope_type": name} | SCALINGS[name]
    rope = read_rope(
        {"rope_parameters": {"rope_theta": 5000.0} | scaling}, head_dim=HEAD_DIM, max_position=1024, partial=True
    )
    table = cos_sin_table(rope, max_len, CPU)
    # 3000 radians in float32 are known to 2e-4.
    torch.testing.assert_close(table, transformers_table(scaling, max_len, 1024), atol=5e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("kind", "more"), [("dynamic", {}), ("longrope", {}), ("longrope", {"short_mscale": 1.1, "long_mscale": 1.3})]
)
def test_length_dependent_kinds_are_one_table_for_the_engine(kind: str, more: dict[str, Any]) -> None:
    """Within the original context a larger engine changes nothing; beyond it all positions move together."""
    fields = SCALINGS[kind] | {"original_max_position_embeddings": 1024} | more
    given = {"rope_parameters": {"rope_type": kind} | fields}
    rope = read_rope(given, head_dim=HEAD_DIM, max_position=1024, mscales=True)
    short, full, beyond = (cos_sin_table(rope, n, CPU) for n in (100, 1024, 1025))
    assert torch.equal(short, full[:100])
    assert not torch.allclose(beyond[:100], short, atol=1e-4)


def test_factors_divide_frequencies() -> None:
    factors = [1.0 + 0.5 * i for i in range(12)]
    config = {"rope_theta": 100.0, "rope_scaling": {"rope_type": "factors", "factors": factors}}
    table = cos_sin_table(read_rope(config, head_dim=HEAD_DIM, max_position=64), 64, CPU)
    angle = 37 * 100.0 ** (-2 * 5 / HEAD_DIM) / factors[5]
    assert table[37, 5].item() == pytest.approx(math.cos(angle), abs=1e-5)
    assert table[37, 12 + 5].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_partial_rotation_counts_frequencies_over_the_rotated_part() -> None:
    rope = read_rope(
        {"rope_theta": 100.0, "partial_rotary_factor": 0.25}, head_dim=HEAD_DIM, max_position=64, partial=True
    )
    assert rope.rotary_dim == 6
    table = cos_sin_table(rope, 10, CPU)
    assert table.shape == (10, 6)
    assert table[9, 2].item() == pytest.approx(math.cos(9 * 100.0 ** (-4 / 6)), abs=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_old_and_new_forms_read_the_same(name: str) -> None:
    fields = {key: value for key, value in SCALINGS[name].items() if key != "rope_type"}
    kind = SCALINGS[name].get("rope_type", name)
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": 77.0} | fields}
    old = {"rope_theta": 77.0, "rope_scaling": {"type": kind} | fields}
    read = [read_rope(config, head_dim=HEAD_DIM, max_position=1024, partial=True) for config in (new, old)]
    assert read[0] == read[1]
    assert read[0].kind == kind
    assert read[0].theta == 77.0


def test_original_length_beside_the_rope_fields_wins() -> None:
    config = {
        "original_max_position_embeddings": 128,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    }
    assert read_rope(config, head_dim=HEAD_DIM, max_position=1024).original_len == 128


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_type": "mrope"}, "mrope"),
        ({"rope_type": "default", "mrope_section": [4, 4, 4]}, "mrope_section"),
        ({"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [1.0] * 11}, "long_factor"),
        ({"rope_type": "factors", "factors": [0.0] * 12}, "factors"),
        ({"rope_type": "default", "rope_theta": True}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ({"rope_type": "default", "partial_rotary_factor": 0.3}, "7 of the 24"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "36 of the 24"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_rope({"rope_parameters": fields}, head_dim=HEAD_DIM, max_position=1024, partial=True)


def test_every_kind_is_tested() -> None:
    assert set(ROPE_KINDS) == {fields.get("rope_type", name) for name, fields in SCALINGS.items()} | {"factors"}


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
def test_of_two_original_lengths_the_one_beside_the_fields_counts(kind: str) -> None:
    """As in transformers; one among the fields counts where there is no other, and the whole context where there is none."""
    scaling = {name: value for name, value in SCALINGS[kind].items() if name != "original_max_position_embeddings"}
    for beside, among, wanted in (
        (None, None, 1024),
        (128, None, 128),
        (None, 256, 256),
        (128, 256, 128),
        (256, 128, 256),
    ):
        fields = scaling | {"rope_type": kind} | ({} if among is None else {"original_max_position_embeddings": among})
        config = {"rope_parameters": fields} | ({} if beside is None else {"original_max_position_embeddings": beside})
        assert read_rope(config, head_dim=HEAD_DIM, max_position=1024).original_len == wanted, (beside, among)


@pytest.mark.parametrize("where", ["beside", "among"])
@pytest.mark.parametrize("kind", ["default", "linear"])
def test_part_of_a_head_rotates_where_the_architecture_knows_that(where: str, kind: str) -> None:
    """transformers rotates whole heads, or fails, in families that do not know the field: it is refused there."""
    part = {"partial_rotary_factor": 0.5}
    rope = {"rope_type": kind, "factor": 2.0} | (part if where == "among" else {})
    config = {"rope_parameters": rope} | (part if where == "beside" else {})
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0\.5"):
        read_rope(config, head_dim=HEAD_DIM, max_position=64)
    assert read_rope(config, head_dim=HEAD_DIM, max_position=64, partial=True).rotary_dim == HEAD_DIM // 2


@pytest.mark.parametrize("columns", [0, 8, 20])
def test_what_does_not_turn_has_angles_of_zero(columns: int) -> None:
    rope = RopeConfig(theta=1e4, rotary_dim=8, original_len=64, attention_factor=1.5)
    cos, sin = cos_sin_table(rope, 5, CPU, columns=columns).chunk(2, dim=1)
    own_cos, own_sin = cos_sin_table(rope, 5, CPU).chunk(2, dim=1)
    assert cos.shape == sin.shape == (5, max(columns, 8) // 2)
    assert torch.equal(cos[:, :4], own_cos) and torch.equal(sin[:, :4], own_sin)
    assert (cos[:, 4:] == 1).all() and (sin[:, 4:] == 0).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(12, 4), (12, 8), (12, 12), (13, 6)])
def test_a_part_of_a_head_turns_as_a_whole_one_in_another_order(
    head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    """Each number of a head gets what the definition, number by number, says, wherever it lies."""
    rope = RopeConfig(theta=1e4, rotary_dim=rotary_dim, original_len=64, interleaved=interleaved)
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=head_dim, rope=rope)
    table = cos_sin_table(rope, 9, CPU, columns=spec.turning)
    made = Attention(spec, Site(NormSpec(eps=1e-6), 1, table, 0, torch.float32, CPU))
    order = made.destinations("")["q_proj.weight"].order
    assert (order is None) == (head_dim == rotary_dim and not interleaved)
    x, half = torch.randn(9, 2, head_dim), rotary_dim // 2
    expected = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = torch.arange(9.0)[:, None] * 1e4 ** (-2 * i / rotary_dim)
        expected[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        expected[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    places = torch.arange(2 * head_dim) if order is None else order
    turned = rotate(x.flatten(1)[:, places].view(x.shape), table)
    torch.testing.assert_close(turned.flatten(1), expected.flatten(1)[:, places], rtol=1e-5, atol=1e-5)
