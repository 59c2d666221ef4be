"""``speculative_config``: what is taken, in each of its forms, and what is refused with the way out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.speculative import SpeculativeConfig, read_speculative

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}

SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 4}
MODEL: dict[str, Any] = {"method": "draft_model", "model": "x", "num_speculative_tokens": 4}


def test_a_mapping_its_json_and_the_object_are_the_same() -> None:
    config = SpeculativeConfig(**NGRAM)
    for given in (NGRAM, '{"method": "ngram", "num_speculative_tokens": 4}', config):
        assert EngineArgs(speculative_config=given).speculative_config == config  # type: ignore[arg-type]
    assert EngineArgs().speculative_config is None and read_speculative(None) is None


def test_it_crosses_to_the_engine_process() -> None:
    args = EngineArgs(speculative_config=SpeculativeConfig(**NGRAM, prompt_lookup_min=2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(args), type=EngineArgs) == args


@pytest.mark.parametrize(
    ("given", "lookup"),
    [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2)),
     ({"prompt_lookup_min": 1, "prompt_lookup_max": 7}, (1, 7))],
)  # fmt: skip
def test_lengths_of_a_match_default_as_elsewhere(given: dict[str, Any], lookup: tuple[int, int]) -> None:
    assert SpeculativeConfig(**NGRAM, **given).lookup == lookup


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize(
    ("given", "usual"),
    [
        (NGRAM, True),
        (SUFFIX, True),
        (MODEL, True),
        (MODEL | {"draft_sample_method": "greedy"}, True),
        (MODEL | {"draft_sample_method": "probabilistic"}, False),
        (NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}, False),
        (MODEL | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}, False),
    ],
)
def test_drafts_follow_the_load_where_no_token_depends_on_them(
    given: dict[str, Any], usual: bool, asked: bool | None
) -> None:
    """Unless it is asked for; not even then where tokens are judged by how drafts were drawn."""
    if asked and given.get("draft_sample_method") == "probabilistic":
        with pytest.raises(ConfigError, match="leave adaptive out"):
            SpeculativeConfig(**given, adaptive=asked)
        return
    assert SpeculativeConfig(**given, adaptive=asked).is_adaptive == (usual if asked is None else asked)


def test_suffix_decoding_defaults_as_elsewhere() -> None:
    assert SpeculativeConfig(**SUFFIX).suffix == (20, 10_000, 1.0, 0.1)
    names = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    given: dict[str, Any] = dict(zip((f"suffix_decoding_{name}" for name in names), (5, 0, 0, 0), strict=True))
    assert SpeculativeConfig(**SUFFIX, **given).suffix == (1, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "ngram"}, "lacks num_speculative_tokens"),
        ({"num_speculative_tokens": 2}, "lacks method"),
        (NGRAM | {"method": "medusa"}, "method must be one of ngram, suffix, draft_model"),
        (NGRAM | {"num_speculative_tokens": 0}, "from 1 to 32; got 0"),
        (NGRAM | {"num_speculative_tokens": True}, "got True"),
        (NGRAM | {"num_speculative_tokens": 33}, "from 1 to 32"),
        (NGRAM | {"prompt_lookup_max": 65}, "prompt_lookup_max must be an integer from 1 to 64"),
        (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "lower the one or raise the other"),
        (NGRAM | {"prompt_lookup_mx": 4}, "did you mean 'prompt_lookup_max'"),
        (NGRAM | {"suffix_decoding_max_tree_depth": 9}, "suffix_decoding_max_tree_depth belong to method='suffix'"),
        (SUFFIX | {"prompt_lookup_max": 2}, "belong to method='ngram'"),
        (SUFFIX | {"model": "x"}, "has no model"),
        (SUFFIX | {"suffix_decoding_max_tree_depth": 4}, "no room for a match"),
        (SUFFIX | {"suffix_decoding_max_tree_depth": 129}, "from 1 to 128"),
        (SUFFIX | {"suffix_decoding_max_cached_requests": -1}, "from 1 to 131072"),
        (SUFFIX | {"suffix_decoding_max_spec_factor": -0.5}, "from 0 to 32"),
        (SUFFIX | {"suffix_decoding_min_token_prob": 1.5}, "from 0 to 1; got 1.5"),
        (SUFFIX | {"suffix_decoding_min_token_prob": True}, "got True"),
        ("{", "is not JSON"),
        ("[1]", "must be a mapping"),
        (7, "must be a mapping"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineArgs(speculative_config=given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rejection_sample_method": "synthetic"}, "belong together"),
        ({"synthetic_acceptance_length": 2.0}, "belong together"),
        ({"rejection_sample_method": "fly"}, "must be one of standard, synthetic"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5.1}, "from 1 to 5"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": float("nan")}, "from 1 to 5"),
    ],
)
def test_synthetic_acceptance_is_asked_for_in_full(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineArgs(speculative_config=NGRAM | given)  # type: ignore[arg-type]
