"""What an engine chooses where the user says nothing, and what it refuses where arguments contradict each other or the model:
each rule by itself, each limit from both sides."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.cache import CacheLayout, CacheSpec, keys_and_values
from headway.core.config import USUAL_THRESHOLDS, EngineArgs
from headway.core.encode import BlockCost
from headway.core.errors import ConfigError
from headway.core.media import VisionInfo
from headway.engine import boot
from headway.engine.sight import (
    check_drafts,
    encoder_cache_rows,
    features,
    most_whole,
    scheduled,
    sees,
    staged_rows,
    vision_info,
)
from headway.engine.sizes import (
    Sizes,
    choose_sizes,
    cpu_kv_bytes,
    cuda_kv_bytes,
    kv_tokens,
    longest_whole,
    upload_budget,
)
from headway.engine.states import state_storage
from headway.models.interface import EncoderSpec
from tests.engine.test_sizes import STATE

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KEYS = CacheLayout.of([keys_and_values(1, 4)] * 2, 96)
NOTHING = CacheLayout.of([None, None], 96)
STATES = CacheLayout.of([keys_and_values(1, 4), None], 96, [STATE, None])


def args(**given: Any) -> EngineArgs:
    return EngineArgs(model="nowhere", **given)


def spec(cache: CacheLayout = KEYS, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "cache": cache, "longest_context": 96, "vocab_size": 50, "vision": None, "encoder": None, "architecture": "Tiny",
        "pooling": None, "stage": None, "encodes": True, "layer_weights": 900, "head_weights": 100, "eos_token_ids": (7, 8),
    }  # fmt: skip
    return SimpleNamespace(**fields | more)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_gpu", "rows", "tokens"), [(True, 256, 8192), (False, 64, 1024)])
def test_usual_sizes(on_gpu: bool, rows: int, tokens: int) -> None:
    found = choose_sizes(args(), spec(), on_gpu)
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.block_size) == (rows, tokens, 16)
    assert (found.max_model_len, found.max_logprobs, found.width, found.lookahead) == (96, 20, 1, 0)
    assert (found.halves_from, found.longest_row, found.thresholds) == ((0, 0), 96, USUAL_THRESHOLDS)


def test_sizes_that_are_said() -> None:
    said = {"max_model_len": 40, "max_num_seqs": 3, "max_num_batched_tokens": 17, "block_size": 8, "max_logprobs": 60}
    said |= {"enable_dbo": True, "dbo_decode_token_threshold": 5, "dbo_prefill_token_threshold": 9}
    found = choose_sizes(args(**said), spec(), True, width=4, lookahead=3)
    assert (found.max_model_len, found.max_num_seqs, found.max_num_batched_tokens, found.block_size) == (40, 3, 17, 8)
    assert (found.max_logprobs, found.halves_from) == (50, (5, 9)), "no more than there are tokens"
    assert found.longest_row == 40 + 4 - 1 + 3


@pytest.mark.parametrize("width", [1, 3])
def test_a_step_has_room_for_all_rows(width: int) -> None:
    found = choose_sizes(args(max_num_seqs=500), spec(), False, width=width)
    assert found.max_num_batched_tokens == max(1024, 500 * width)
    assert (
        choose_sizes(args(max_num_seqs=6, max_num_batched_tokens=6 * width), spec(), False, width=width).width == width
    )
    each = "one token" if width == 1 else "3 tokens, drafts included,"
    with pytest.raises(ConfigError, match=f"is less than max_num_seqs=6 take: every running request needs {each}"):
        choose_sizes(args(max_num_seqs=6, max_num_batched_tokens=6 * width - 1), spec(), False, width=width)


def test_texts_that_are_taken_whole_fit_a_step(caplog: pytest.LogCaptureFixture) -> None:
    long = spec(NOTHING, longest_context=3000)
    assert choose_sizes(args(), long, False).max_num_batched_tokens == 3000
    assert choose_sizes(args(), long, True).max_num_batched_tokens == 8192
    caplog.set_level(logging.WARNING, "headway")
    found = choose_sizes(args(max_num_batched_tokens=2999), long, False)
    assert (found.max_model_len, found.max_num_batched_tokens) == (2999, 2999)
    assert "context cut from 3000 to 2999 tokens" in caplog.text
    caplog.clear()
    found = choose_sizes(args(max_num_batched_tokens=3000), long, False)
    assert (found.max_model_len, caplog.text) == (3000, "")
    assert choose_sizes(args(max_num_batched_tokens=500, max_model_len=500), long, False).max_model_len == 500
    with pytest.raises(ConfigError, match="max_num_batched_tokens=499 is less than max_model_len=500"):
        choose_sizes(args(max_num_batched_tokens=499, max_model_len=500), long, False)
    assert choose_sizes(args(max_num_batched_tokens=64), spec(longest_context=3000), False).max_model_len == 3000


PICTURE = EncoderSpec(kind="image", longest=30, words_per_row=2, width=8, patches=4, blocks=(BlockCost(3, 5),))


def sighted(sees: str, **more: Any) -> Any:
    seen: dict[str, Any] = {
        "encoder": PICTURE,
        "longest_context": 6000,
        "vision": VisionInfo(patch=2, token=1, sees=sees, longest=30),
    }
    return spec(**seen | more)


def test_tokens_that_see_each_other_stay_in_one_step() -> None:
    """Of a picture, or of a prompt of up to 4,096 tokens; the other rows decode beside it."""
    assert [longest_whole(sighted(kind), 6000) for kind in ("", "spans", "prompt")] == [0, 30, 4096]
    assert longest_whole(sighted("prompt"), 500) == 500 and longest_whole(spec(), 500) == 0
    few = {"max_num_seqs": 5}
    for kind, width, tokens in (("prompt", 1, 4096 + 5), ("prompt", 2, 4096 + 10), ("spans", 1, 1024), ("", 1, 1024)):
        assert choose_sizes(args(**few), sighted(kind), False, width=width).max_num_batched_tokens == tokens
    for kind in ("spans", "prompt"):
        assert choose_sizes(args(**few, max_num_batched_tokens=35), sighted(kind), False).max_num_batched_tokens == 35
        with pytest.raises(ConfigError, match="is less than a picture's 30 tokens, which see each other, beside 5"):
            choose_sizes(args(**few, max_num_batched_tokens=34), sighted(kind), False)
    assert choose_sizes(args(**few, max_num_batched_tokens=34), sighted(""), False).max_num_batched_tokens == 34


SIZES = Sizes(max_model_len=96, max_num_seqs=5, max_num_batched_tokens=64, block_size=8, max_logprobs=0, width=2)


def test_what_a_model_with_sight_is_given() -> None:
    model, plain = sighted("spans"), spec()
    assert [sees(each) for each in (model, plain)] == ["spans", ""]
    assert most_whole(model, SIZES) == 64 - 4 * 2 and most_whole(plain, SIZES) == most_whole(sighted(""), SIZES) == 0
    assert encoder_cache_rows(model, SIZES) == 4096 and encoder_cache_rows(plain, SIZES) == 0
    large = sighted("prompt", encoder=replace(PICTURE, longest=2000))
    assert encoder_cache_rows(large, SIZES) == 6000
    beside = sighted("", encoder=replace(PICTURE, beside=replace(PICTURE, longest=3000)))
    assert encoder_cache_rows(beside, SIZES) == 9000, "of the longer kind"
    small = replace(SIZES, thresholds=replace(USUAL_THRESHOLDS, encoder_cache_rows=40))
    assert encoder_cache_rows(model, small) == 40
    assert encoder_cache_rows(sighted("", encoder=replace(PICTURE, width=0)), SIZES) == 0
    assert staged_rows(large, SIZES) == 6000, "a prompt that is taken whole brings all its pictures"
    assert staged_rows(sighted("spans", encoder=replace(PICTURE, longest=2000)), SIZES) == 4096
    assert features(model, SIZES, torch.float16) == (4096, 8, torch.float16)
    assert (
        features(sighted("spans", encodes=False), SIZES, torch.float16) is None
        and features(plain, SIZES, torch.float16) is None
    )
    told = vision_info(model, SIZES)
    assert told is not None and (told.cache_rows, told.longest_whole, told.token) == (4096, 56, 1)
    assert vision_info(plain, SIZES) is None and vision_info(sighted("", pooling=object()), SIZES) is None
    check_drafts(model, reads_prompts=False)
    check_drafts(plain, reads_prompts=True)
    with pytest.raises(ConfigError, match="Tiny sees pictures, and a draft model does not"):
        check_drafts(model, reads_prompts=True)


def test_what_an_encoder_may_do_beside_rows_that_decode() -> None:
    """As much as a step computes while it reads the decoder's weights, times the ratio; without a limit all at once."""
    model = sighted(
        "spans", encoder=replace(PICTURE, beside=replace(PICTURE, kind="audio", blocks=(BlockCost(1, 1),) * 2))
    )
    found = scheduled(model, SIZES, 0.5, torch.bfloat16)
    assert (found["encoder_work"], found["media_tokens"]) == (int(0.5 * 1000 * 2 * 120 / 2), 176)
    assert (found["encoder_blocks"], found["sound_blocks"]) == (PICTURE.blocks, (BlockCost(1, 1),) * 2)
    assert (found["max_encoder_rows"], found["encoder_cache_rows"]) == (4096, 4096)
    assert (found["sees"], found["longest_whole"]) == ("spans", 56)
    assert scheduled(model, SIZES, 0.5, torch.float32)["media_tokens"] == 352
    assert scheduled(model, SIZES, 1e-9, torch.bfloat16)["encoder_work"] == 1
    for free in (scheduled(model, SIZES, float("inf"), torch.bfloat16), scheduled(spec(), SIZES, 0.5, torch.bfloat16)):
        assert (free["encoder_work"], free["media_tokens"]) == (0, 0)
    assert scheduled(spec(), SIZES, 0.5, torch.bfloat16)["encoder_blocks"] == ()


@pytest.mark.parametrize(
    ("free", "given"), [(4000, 1000), (16 * 2**30, 4 * 2**30), (16 * 2**30 - 4, 4 * 2**30 - 1), (2**40, 4 * 2**30)]
)
def test_a_cpu_gives_a_quarter_of_what_is_free_and_no_more_than_4_gib(free: int, given: int) -> None:
    device: Any = SimpleNamespace(memory_bytes=lambda: (free, 2**50))
    assert cpu_kv_bytes(device) == given


def test_a_card_gives_what_its_share_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the peak of a step, what other programs hold, and a reserve; what this process has reserved is its own."""
    gib = 2**30
    device: Any = SimpleNamespace(
        memory_bytes=lambda: (60 * gib, 100 * gib), peak_bytes=lambda: 20 * gib, torch_device=CUDA
    )
    for reserved, others in ((40, 0), (25, 15), (50, 0)):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _, held=reserved: held * gib)
        assert cuda_kv_bytes(device, 0.5) == (50 - 20 - others - 1) * gib


def test_tokens_that_a_cache_holds() -> None:
    sizes = replace(SIZES, num_blocks=25, width=1)
    assert kv_tokens(sizes, KEYS) == 24 * 8 and kv_tokens(sizes, NOTHING) == 0
    windows = CacheLayout.of([keys_and_values(1, 4, window=8 * (i % 2)) for i in range(4)], 96)
    assert len(windows.groups) == 2
    each = 96 // 8 + min(96 // 8, (8 + 64) // 8 + 1)
    assert kv_tokens(sizes, windows) == 24 * 96 // each, "of requests of the longest context"


def test_room_for_uploads_grows_with_what_a_request_brings() -> None:
    base = upload_budget(SIZES, 50, KEYS)
    assert upload_budget(replace(SIZES, thresholds=replace(USUAL_THRESHOLDS, upload_ints=77)), 50, KEYS) == 77
    for larger in (
        upload_budget(replace(SIZES, max_model_len=200), 50, KEYS),
        upload_budget(replace(SIZES, max_num_seqs=6), 50, KEYS),
        upload_budget(replace(SIZES, max_num_batched_tokens=65), 50, KEYS),
        upload_budget(replace(SIZES, block_size=4), 50, KEYS),
        upload_budget(SIZES, 50_000, KEYS),
        upload_budget(SIZES, 50, CacheLayout.of([keys_and_values(1, 4, window=8 * (i % 2)) for i in range(4)], 96)),
    ):
        assert larger > base


# -- dtypes ------------------------------------------------------------------------------------------------------------


def on(kind: str) -> Any:
    return SimpleNamespace(torch_device=torch.device(kind), asynchronous=kind != "cpu")


@pytest.mark.parametrize(
    ("kind", "stored", "pools", "chosen"),
    [
        ("cuda", "float32", False, torch.bfloat16), ("cuda", "float16", False, torch.float16),
        ("cuda", "", False, torch.bfloat16), ("cuda", "bfloat16", False, torch.bfloat16),
        ("cuda", "float64", True, torch.bfloat16), ("cuda", "torch.float16", False, torch.float16),
        ("cpu", "float32", True, torch.float32), ("cpu", "", True, torch.float32), ("cpu", "float32", False, torch.float16),
        ("cpu", "bfloat16", True, torch.float16), ("cpu", "", False, torch.float16),
    ],
)  # fmt: skip
def test_dtypes_that_nobody_named(
    kind: str, stored: str, pools: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the CPU is fast at is said by its kernels, here float16."""
    monkeypatch.setattr(boot, "preferred_dtype", lambda: torch.float16)
    for name in ("dtype", "torch_dtype"):
        assert boot._resolve_dtype("auto", {name: stored}, on(kind), pools=pools) == chosen
    assert boot._resolve_dtype("float32", {"dtype": stored}, on(kind), pools=pools) == torch.float32
    assert (
        boot._resolve_dtype("auto", {"dtype": "float16", "torch_dtype": "float32"}, on("cuda"), pools=False)
        == torch.float16
    )


@pytest.mark.parametrize(("capability", "fits"), [((8, 9), True), ((9, 0), True), ((8, 8), False), ((7, 9), False)])
def test_cards_that_convert_8_bit_floats(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert boot._resolve_kv_dtype("auto", torch.float16, on("cuda")) == torch.float16
    if fits:
        assert boot._resolve_kv_dtype("fp8", torch.float16, on("cuda")) == torch.float8_e4m3fn
    else:
        with pytest.raises(ConfigError, match=r"8\.9 or newer"):
            boot._resolve_kv_dtype("fp8", torch.float16, on("cuda"))


# -- states ------------------------------------------------------------------------------------------------------------

PLAIN_STATE = CacheSpec(STATE.kind, STATE.parts[:1])
OTHER_STATE = CacheSpec(STATE.kind, (replace(STATE.parts[1], inputs=0),))


def layout_of(*states: CacheSpec) -> CacheLayout:
    """Layers with keys, and layers with these states."""
    return CacheLayout.of([keys_and_values(1, 4), *[None] * len(states)], 96, [None, *states])


def test_states_are_stored_as_arguments_and_drafts_want() -> None:
    plain = state_storage(args(), spec(STATES), torch.bfloat16, 0)
    assert (plain.dtype, plain.recurrent, plain.drafts, plain.replays) == (torch.bfloat16, None, 0, 0)
    drafting = state_storage(args(), spec(STATES), torch.bfloat16, 3)
    assert (drafting.recurrent, drafting.drafts, drafting.replays) == (torch.float32, 3, 8 + 2 * 3)
    said = state_storage(args(mamba_ssm_cache_dtype="bfloat16", replayssm_buffer_len=5), spec(STATES), torch.float16, 2)
    assert (said.recurrent, said.drafts, said.replays) == (torch.bfloat16, 2, 5 + 2 * 2)
    rings = state_storage(args(replayssm_buffer_len=4), spec(STATES), torch.float16, 0)
    assert (rings.recurrent, rings.replays) == (torch.float32, 4)
    none = state_storage(args(replayssm_buffer_len=0), spec(STATES), torch.float16, 0)
    assert (none.recurrent, none.replays) == (None, 0)
    without = state_storage(args(), spec(), torch.float16, 3)
    assert (without.drafts, without.replays) == (0, 0)
    windows = state_storage(args(), spec(layout_of(PLAIN_STATE)), torch.float16, 3)
    assert (windows.drafts, windows.replays) == (3, 0), "windows need no ring"


@pytest.mark.parametrize(
    ("given", "cache", "drafts", "says", "here"),
    [  # here: an earlier stage may do it all the same, since others may have what it has not
        ({"mamba_ssm_cache_dtype": "float32"}, KEYS, 0, "applies to recurrent states, and Tiny has none", False),
        ({"kv_cache_dtype": "fp8"}, NOTHING, 0, "Tiny caches no keys and values", True),
        ({"replayssm_buffer_len": 4}, KEYS, 0, "replayssm_buffer_len=4 applies to recurrent states", True),
        (
            {"replayssm_buffer_len": 4},
            layout_of(PLAIN_STATE),
            0,
            "replayssm_buffer_len=4 applies to recurrent states",
            True,
        ),
        ({"replayssm_buffer_len": 0}, STATES, 2, "drafts need the ring of inputs", False),
        ({}, layout_of(OTHER_STATE), 2, "cannot be run again from their inputs", False),
        ({"replayssm_buffer_len": 4}, layout_of(STATE, OTHER_STATE), 0, "cannot be run again from their inputs", False),
    ],
)
def test_states_that_cannot_be_stored_so(
    given: Mapping[str, Any], cache: CacheLayout, drafts: int, says: str, here: bool
) -> None:
    with pytest.raises(ConfigError, match=says):
        state_storage(args(**given), spec(cache), torch.float16, drafts)
    with nullcontext() if here else pytest.raises(ConfigError, match=says):
        state_storage(args(**given), spec(cache, stage=object()), torch.float16, drafts)


def test_what_states_are_not_asked_for_is_not_refused() -> None:
    state_storage(args(mamba_ssm_cache_dtype="auto", kv_cache_dtype="fp8"), spec(), torch.float16, 0)
    state_storage(args(), spec(layout_of(OTHER_STATE)), torch.float16, 0)
    state_storage(args(replayssm_buffer_len=0), spec(), torch.float16, 2)
