"""What ranks, replicas and halves of steps cannot do together, where ranks run, what drafters need of the engine, and what a
model that hears says of itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.cache import CacheLayout, CacheSpec, keys_and_values
from headway.core.errors import ConfigError
from headway.core.media import VisionInfo
from headway.core.seat import Seat
from headway.core.speculative import SpeculativeConfig
from headway.engine import world
from headway.engine.drafts import Drafts
from headway.engine.extras import Extras, Pooling
from headway.engine.hearing import encoder_info, encoder_tables, hears, refuse_drafts
from headway.engine.together import refuse_halves, refuse_together
from headway.models.interface import EncoderSpec
from headway.parallel.mesh import Mesh
from tests.engine.test_choices import KEYS, NOTHING, PICTURE, STATES, args, spec

# -- ranks and halves --------------------------------------------------------------------------------------------------

SEAT = Seat(0, 2, "/nowhere")
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
HANDED_IN = Extras(Drafts(2, lambda house: object()))  # type: ignore[arg-type, return-value]


POOLING: Any = Pooling((), lambda *_: None)  # type: ignore[arg-type]
POOLS = Extras(pooling=POOLING)
THREADS, RAY = {"distributed_executor_backend": "threads"}, {"distributed_executor_backend": "ray"}


def drafting(**more: Any) -> Extras:
    drafts = Drafts.of(NGRAM)
    assert drafts is not None
    return Extras(replace(drafts, **more))


@pytest.mark.parametrize(
    ("given", "extras", "seat", "says"),
    [
        ({"node_rank": 1, "nnodes": 2, "tensor_parallel_size": 2}, Extras(), None, "node_rank > 0"),
        ({"tensor_parallel_size": 2}, HANDED_IN, None, "cannot be handed on to other ranks"),
        ({"pipeline_parallel_size": 2}, POOLS, None, "cannot be handed on"),
        ({"tensor_parallel_size": 2, "quantization": "gguf"}, Extras(), None, "cannot be cut into columns"),
        ({"pipeline_parallel_size": 2}, Extras(), SEAT, "stages of several replicas"),
        (
            {"speculative_config": NGRAM},
            drafting(load=lambda loading: object()),
            SEAT,
            "runs steps that other replicas do not",
        ),
        ({}, HANDED_IN, SEAT, "runs steps that other replicas do not"),
        ({"enable_dbo": True, "speculative_config": NGRAM}, drafting(), SEAT, "leave out enable_dbo, the drafter, or"),
    ],
)
def test_what_ranks_cannot_do_together(given: dict[str, Any], extras: Extras, seat: Seat | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse_together(args(**given), extras, seat)


@pytest.mark.parametrize(
    ("given", "extras", "seat"),
    [
        ({}, HANDED_IN, None), ({"enable_dbo": True}, Extras(), None), ({"speculative_config": NGRAM}, drafting(), SEAT),
        ({"enable_dbo": True, "speculative_config": NGRAM}, drafting(), None), ({"enable_dbo": True}, Extras(), SEAT),
        ({"tensor_parallel_size": 2, "speculative_config": NGRAM}, drafting(), None),
        ({"tensor_parallel_size": 2}, Extras(), SEAT),
        ({"pipeline_parallel_size": 2, "quantization": "gguf"}, Extras(), None), ({"quantization": "gguf"}, Extras(), None),
        ({"tensor_parallel_size": 2, "quantization": "auto"}, Extras(), None), ({}, POOLS, None),
    ],
)  # fmt: skip
def test_what_ranks_can_do_together(given: dict[str, Any], extras: Extras, seat: Seat | None) -> None:
    refuse_together(args(**given), extras, seat)


CROSS = CacheSpec(keys_and_values(1, 4).kind.CROSS, keys_and_values(1, 4).parts, tokens=12)
SIGHT, SPANS = (VisionInfo(patch=2, token=1, sees=sees, longest=30) for sees in ("", "spans"))


def test_models_whose_steps_cannot_be_cut() -> None:
    """Their tokens see later ones: always, or where steps have pictures, which other replicas do not know."""
    halves = args(enable_dbo=True)
    with pytest.raises(ConfigError, match=r"Tiny takes texts whole, whose tokens see later ones; leave it out"):
        refuse_halves(halves, spec(NOTHING), shares=False)
    with pytest.raises(ConfigError, match=r"pictures in Tiny do, .*; leave out enable_dbo, or enable_expert_parallel"):
        refuse_halves(halves, spec(vision=SPANS), shares=True)
    refuse_halves(args(), spec(NOTHING), shares=False)
    refuse_halves(args(), spec(vision=SPANS), shares=True)


@pytest.mark.parametrize("shares", [False, True])
def test_models_whose_steps_can_be_cut(shares: bool) -> None:
    crossed = spec(CacheLayout.of([keys_and_values(1, 4), CROSS], 96), encoder=PICTURE)
    for model in (spec(), spec(STATES), crossed, spec(vision=SIGHT)):
        refuse_halves(args(enable_dbo=True), model, shares=shares)
    refuse_halves(args(enable_dbo=True), spec(vision=SPANS), shares=False)


@pytest.mark.parametrize(
    ("given", "rank", "device"),
    [
        ({"device": "cpu"}, 1, "cpu"), ({"device": "cuda"}, 1, "cuda:1"), ({"device": "cuda:2"}, 3, "cuda:5"),
        ({"device": "sim", **THREADS}, 2, "sim:2"), ({"device": "sim:4", **THREADS}, 1, "sim:5"),
        ({"device": "cuda:1", "nnodes": 2}, 3, "cuda:2"), ({"device": "cuda", **RAY}, 3, "cuda:0"),
        ({"device": "cuda:2", **RAY}, 0, "cuda:2"), ({"device": "auto"}, 1, "cpu"),
    ],
)  # fmt: skip
def test_each_rank_has_its_device(
    given: dict[str, Any], rank: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert world.device_of(args(tensor_parallel_size=4, **given), rank) == device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert world.device_of(args(tensor_parallel_size=4, device="auto"), 2) == "cuda:2"


@pytest.mark.parametrize(
    ("given", "need"), [({"device": "cuda"}, 4), ({"device": "cuda:2"}, 6), ({"device": "cuda", "nnodes": 2}, 2)]
)
def test_as_many_cards_as_ranks(given: dict[str, Any], need: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = args(tensor_parallel_size=2, pipeline_parallel_size=2, **given)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: need)
    world.check_devices(wanted)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: need - 1)
    with pytest.raises(ConfigError, match=f"and there are {need - 1}; lower them"):
        world.check_devices(wanted)
    world.check_devices(args(tensor_parallel_size=4, device="cpu"))


def test_the_leaders_place() -> None:
    assert world.mesh_of(args(tensor_parallel_size=2, pipeline_parallel_size=3), None) == Mesh(2, 3)
    assert world.mesh_of(args(), Seat(1, 3, "x")) == Mesh(replica=1, replicas=3)


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "lookahead", "forgets", "has_model", "embeds"),
    [
        ("ngram", 0, False, False, False), ("suffix", 0, False, False, False), ("draft_model", 3, False, True, False),
        ("eagle", 3, True, True, True), ("eagle3", 3, True, True, True), ("mtp", 3, True, True, True),
        ("dflash", 4, False, True, True), ("dspark", 4, False, True, True),
    ],
)  # fmt: skip
def test_what_each_drafter_needs_of_the_engine(
    method: str, lookahead: int, forgets: bool, has_model: bool, embeds: bool
) -> None:
    """Places behind a row's last token, the last block of a hit anew, a model, the target's embedding."""
    model: dict[str, Any] = {"model": "x"} if has_model and method != "mtp" else {}
    for adaptive, widths in ((True, (1, 2, 4)), (False, (1, 4))):
        config = SpeculativeConfig(method=method, num_speculative_tokens=3, adaptive=adaptive, **model)
        drafts = Drafts.of(config)
        assert drafts is not None and (drafts.number, drafts.widths) == (3, widths)
        assert (drafts.load is not None, drafts.adaptive, drafts.drawing) == (has_model, adaptive, None)
        extras = Extras(drafts)
        assert (extras.lookahead, drafts.forgets_last_hit, extras.embeds) == (lookahead, forgets, embeds)
        assert extras.num_drafts == 3
    if model:
        greedy = Drafts.of(
            SpeculativeConfig(method=method, num_speculative_tokens=3, draft_sample_method="greedy", **model)
        )
        assert greedy is not None and greedy.drawing == "greedy"


def test_an_engine_without_drafts() -> None:
    assert Drafts.of(None) is None
    plain = Extras()
    assert (plain.lookahead, plain.num_drafts, plain.embeds) == (0, 0, False) and plain.world.is_alone
    with pytest.raises(ConfigError, match="there is nothing to draft"):
        Extras(Drafts.of(NGRAM), POOLING)
    pools, plain_config = SimpleNamespace(pooling=object()), SimpleNamespace(pooling=None)
    refuse_drafts(pools, drafting=False)
    refuse_drafts(plain_config, drafting=True)
    with pytest.raises(ConfigError, match="an engine that pools generates nothing"):
        refuse_drafts(pools, drafting=True)


# -- models that hear --------------------------------------------------------------------------------------------------

AUDIO = EncoderSpec(kind="audio", longest=12, words_per_row=2, sizes=(80, 24))
READS = CacheLayout.of([keys_and_values(1, 4), CROSS], 96)
SAID: dict[str, Any] = {
    "decoder_start_token_id": 40, "forced_bos_token_id": 41, "lang_to_id": {"<|en|>": 21, "<|de|>": 22},
    "task_to_id": {"transcribe": 31, "translate": 32}, "no_timestamps_token_id": 45, "prev_sot_token_id": 43,
    "suppress_tokens": [1, 49, 50, -1, "x"], "begin_suppress_tokens": [2], "max_initial_timestamp_index": 9,
}  # fmt: skip


def told(model: Any, said: dict[str, Any], aligns: bool = False, **config: Any) -> dict[str, Any]:
    checkpoint: Any = SimpleNamespace(config=config, generation_config=said)
    return encoder_info(model, checkpoint, aligns=aligns)


def test_what_a_model_that_hears_says_of_itself() -> None:
    model = spec(READS, encoder=AUDIO)
    assert (
        hears(model) and not hears(spec(encoder=AUDIO)) and not hears(spec(READS, encoder=replace(AUDIO, kind="text")))
    )
    found = told(model, SAID, aligns=True, decoder_start_token_id=39)
    assert (found["encoder"], found["decoder_start"], found["max_encoder_tokens"]) == ("audio", [40, 41], 12)
    info = found["hearing"]
    assert (info.mel_bins, info.frames, info.outputs, info.start, info.end) == (80, 24, 12, 40, 7)
    assert (info.previous, info.no_timestamps, info.first_timestamp, info.no_speech) == (43, 45, 46, 44)
    assert (info.languages, info.tasks) == ({"en": 21, "de": 22}, {"transcribe": 31, "translate": 32})
    assert (info.suppress, info.begin_suppress, info.max_initial, info.aligns) == ([1, 49], [2], 9, True)


def test_what_a_model_that_hears_leaves_out() -> None:
    model = spec(READS, encoder=AUDIO, eos_token_ids=())
    bare = told(model, {}, decoder_start_token_id=5)
    info = bare["hearing"]
    assert bare["decoder_start"] == [5] and (info.start, info.end, info.previous) == (5, -1, -1)
    assert (info.no_timestamps, info.first_timestamp, info.no_speech, info.max_initial) == (-1, -1, -1, -1)
    assert (info.languages, info.tasks, info.suppress, info.aligns) == ({}, {}, [], False)
    old = told(model, {"no_timestamps_token_id": 45, "decoder_start_token_id": 0})["hearing"]
    assert (old.start, old.previous) == (0, 43), "its place in every vocabulary of Whisper's"
    for start in (True, None, "5"):
        assert (
            "hearing" not in (found := told(model, {"decoder_start_token_id": start})) and found["decoder_start"] == []
        )
    reader = spec(READS, encoder=replace(AUDIO, kind="text"))
    assert "hearing" not in told(reader, SAID) and told(reader, SAID)["encoder"] == "text"
    assert told(spec(), SAID) == told(spec(encoder=PICTURE), SAID) == {}
    assert [len(encoder_tables(layout)) for layout in (READS, KEYS)] == [1, 0]
