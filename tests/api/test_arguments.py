"""What a user may say about an engine, field by field: what it is unless said, the last value taken, the first refused."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any

import pytest

from headway.core.config import EngineArgs, SchedulerConfig, Thresholds
from headway.core.errors import ConfigError, HeadwayError, InvalidRequestError
from headway.core.histogram import Histogram
from headway.core.messages import EngineStats, RequestUpdate
from headway.core.params import PoolingParams, SamplingParams
from headway.core.speculative import SpeculativeConfig
from headway.runner.config import RunnerConfig

NONE = dict.fromkeys
ENGINE: dict[str, Any] = {
    "model": "smollm2", "gpu_memory_utilization": 0.9, "enable_prefix_caching": True, "enforce_eager": False, "seed": 0,
    "skip_tokenizer_init": False, "run_ahead": "auto", "max_logprobs": 20, "count_host_waits": False,
    "encoder_step_ratio": 0.75, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
    "enable_expert_parallel": False, "enable_dbo": False, "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512, "distributed_executor_backend": "mp", "distributed_timeout_seconds": 60, "nnodes": 1,
    "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 29501,
    **dict.fromkeys(("dtype", "quantization", "kv_cache_dtype", "mamba_ssm_cache_dtype", "device", "load_format"), "auto"),
    **dict.fromkeys(("runner", "convert", "generation_config"), "auto"),
    **NONE(("tokenizer", "revision", "replayssm_buffer_len", "max_model_len", "max_num_seqs", "max_num_batched_tokens")),
    **NONE(("kv_cache_memory_bytes", "block_size", "pooler_config", "hf_overrides", "speculative_config", "multiprocess")),
    **NONE(("limit_mm_per_prompt",)),
}  # fmt: skip
SAMPLING: dict[str, Any] = {
    "n": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "bad_words": [], "min_tokens": 0, "max_tokens": 16, "stop": [], "stop_token_ids": [],
    "include_stop_str_in_output": False, "ignore_eos": False, "detokenize": True, "skip_special_tokens": True,
    "disable_spec_decode": False,
    **NONE(("seed", "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs", "logprob_token_ids")),
    **NONE(("structured_outputs",)),
}  # fmt: skip
SCHEDULER: dict[str, Any] = {
    "enable_prefix_caching": True, "max_upload_ints": 2**31 - 1, "headroom_divisor": 100, "width": 1, "lookahead": 0,
    "forgets_last_hit": False, "pools": False, "has_states": False, "num_checkpoints": 0, "checkpoint_every": 2048,
    "max_encoder_rows": 0, "encoder_cache_rows": 0, "encoder_blocks": (), "encoder_work": 0, "media_tokens": 0, "sees": "",
    "longest_whole": 0, "cohorts": 1, "aligns": False, "sound_blocks": (),
}  # fmt: skip
THRESHOLDS: dict[str, Any] = {
    "prompt_logits_chunk": 256, "headroom_divisor": 100, "traced_steps": 64, "checkpoint_every": 2048,
    **NONE(("upload_ints", "encoder_cache_rows", "encoder_rows")),
}  # fmt: skip
RUNNER_NEEDS = dict.fromkeys(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "vocab_size", "max_logprobs", "max_upload_ints",
     "max_in_flight"), 8
)  # fmt: skip
RUNNER: dict[str, Any] = {
    "prompt_logits_chunk": 256, "width": 1, "widths": (1,), "lookahead": 0, "edits_per_row": 1, "has_states": False,
    "has_latents": False, "max_encoder_rows": 0, "sees": "", "num_stages": 1,
    "halves_from": (0, 0), "alignment": (),
}  # fmt: skip
SIZES = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"), 8)
WITH_DEFAULTS: list[tuple[type[Any], dict[str, Any], dict[str, Any]]] = [
    (EngineArgs, {}, ENGINE),
    (SamplingParams, {}, SAMPLING),
    (PoolingParams, {}, NONE([field.name for field in fields(PoolingParams)])),
    (SchedulerConfig, SIZES | {"num_blocks": 99}, SCHEDULER),
    (Thresholds, {}, THRESHOLDS),
    (RunnerConfig, RUNNER_NEEDS, RUNNER),
    (SpeculativeConfig, {"method": "ngram", "num_speculative_tokens": 1}, {"rejection_sample_method": "standard"}),
]


@pytest.mark.parametrize(("kind", "given", "usual"), WITH_DEFAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_not_said(kind: type[Any], given: dict[str, Any], usual: dict[str, Any]) -> None:
    """The promise of the docstrings, and vLLM's: a default that changes is another engine for everybody."""
    made = kind(**given)
    found = {field.name: getattr(made, field.name) for field in fields(kind) if field.name not in given}
    if kind is SpeculativeConfig:
        found = {name: value for name, value in found.items() if value is not None}
    if kind is SchedulerConfig:
        assert len(found.pop("groups")) == 1
    assert found == usual
    assert all(type(found[name]) is type(value) for name, value in usual.items())
    needed = {each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING}
    assert needed == {*given}


TAKEN_AND_REFUSED: list[tuple[str, Any, Any]] = [
    *((name, 1, 0) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes")),
    *((name, 1, 0) for name in ("data_parallel_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold")),
    *((name, 1, 0) for name in ("tensor_parallel_size", "pipeline_parallel_size", "nnodes", "distributed_timeout_seconds")),
    *((name, 1, True) for name in ("master_port", "max_num_seqs", "tensor_parallel_size", "nnodes")),
    *((name, 1, 1.0) for name in ("max_model_len", "data_parallel_size")),
    ("gpu_memory_utilization", 1.0, 1.01), ("gpu_memory_utilization", 0.01, 0.0), ("gpu_memory_utilization", 0.01, math.nan),
    ("replayssm_buffer_len", 64, 65), ("replayssm_buffer_len", 0, -1), ("replayssm_buffer_len", 1, True),
    ("block_size", 8, 4), ("block_size", 256, 512), ("block_size", 16, 24), ("block_size", 8, 0), ("block_size", 64, 64.0),
    ("encoder_step_ratio", 1e-9, 0.0), ("encoder_step_ratio", math.inf, math.nan), ("encoder_step_ratio", 1, True),
    ("max_logprobs", 0, -1), ("max_logprobs", 1, True), ("seed", -3, 0.5), ("run_ahead", 0, -1), ("run_ahead", 8, 9),
    ("run_ahead", "auto", "none"), ("run_ahead", 1, True), ("node_rank", 0, -1), ("node_rank", 0, 1),
    ("device", "cuda:3", "cuda:x"), ("device", "sim:12", "cpu:0"), ("device", "cpu", "tpu"), ("device", "auto", "auto:1"),
    ("device", "cuda", "cuda0"), ("dtype", "float16", "half"), ("quantization", "gguf", "int4"),
    ("kv_cache_dtype", "fp8_e4m3", "fp8_e5m2"), ("mamba_ssm_cache_dtype", "bfloat16", "fp8"), ("load_format", "dummy", "pt"),
    ("generation_config", "vllm", "none"), ("runner", "pooling", "draft"), ("convert", "classify", "score"),
    ("distributed_executor_backend", "ray", "uni"), ("limit_mm_per_prompt", {"image": 0}, {"image": -1}),
    ("limit_mm_per_prompt", {"video": 3}, {"sound": 3}), ("limit_mm_per_prompt", '{"image": 4}', '{"image": true}'),
    ("hf_overrides", '{"a": 1}', "{"), ("hf_overrides", {}, []), ("pooler_config", None, '"mean"'),
]  # fmt: skip


@pytest.mark.parametrize(("field", "taken", "refused"), TAKEN_AND_REFUSED, ids=lambda value: str(value)[:30])
def test_limits(field: str, taken: Any, refused: Any) -> None:
    EngineArgs(**{field: taken})
    with pytest.raises(ConfigError, match=field):
        EngineArgs(**{field: refused})


TOGETHER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"nnodes": 2, "tensor_parallel_size": 4}, {"nnodes": 3}, "does not divide the 4 ranks"),
    ({"nnodes": 2, "pipeline_parallel_size": 2}, {"data_parallel_size": 2}, "behind a load balancer"),
    ({"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}, {"node_rank": 2}, "from 0 to nnodes - 1 = 1"),
    ({"distributed_executor_backend": "ray"}, {"nnodes": 2, "tensor_parallel_size": 2}, "finds hosts by itself"),
    ({"distributed_executor_backend": "ray"}, {"device": "sim:1"}, "knows no simulated device"),
    (
        {"distributed_executor_backend": "ray", "data_parallel_size": 2},
        {"enable_expert_parallel": True},
        "are on one host",
    ),
    ({"distributed_executor_backend": "ray", "enable_expert_parallel": True}, {"data_parallel_size": 2}, "on one host"),
    ({"enable_expert_parallel": True, "data_parallel_size": 2}, {"distributed_executor_backend": "ray"}, "on one host"),
    ({"distributed_executor_backend": "threads", "device": "cpu"}, {"device": "cuda:0"}, "is for cpu and sim devices"),
    ({"distributed_executor_backend": "threads", "device": "sim:3"}, {"device": "auto"}, "is for cpu and sim devices"),
    ({"device": "sim:1"}, {"tensor_parallel_size": 2}, "threads"),
    ({"device": "cpu", "tensor_parallel_size": 2}, {"device": "sim"}, "threads"),
]


@pytest.mark.parametrize(("taken", "change", "says"), TOGETHER)
def test_what_does_not_go_together(taken: dict[str, Any], change: dict[str, Any], says: str) -> None:
    EngineArgs(**taken)
    with pytest.raises(ConfigError, match=says):
        EngineArgs(**(taken | change))


def test_figures_begin_at_nothing() -> None:
    """Of an engine, and of a request's answer: what nobody has counted yet is 0, empty or unknown."""
    update = RequestUpdate(request_id="a", new_token_ids=[])
    for made in (EngineStats(), update):
        found = {name: getattr(made, name) for name in made.__struct_fields__ if name != "request_id"}
        histograms = [found.pop(name) for name, value in [*found.items()] if isinstance(value, Histogram)]
        assert not any(each.total or each.counts for each in histograms)
        assert not {name: value for name, value in found.items() if value}


def test_ranks_of_a_replica() -> None:
    assert EngineArgs(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=5).num_ranks == 6


CACHE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"max_model_len": 64, "num_blocks": 9}, {"num_blocks": 8}, "holds 56 tokens, fewer than max_model_len=64; lower"),
    ({"max_model_len": 64, "num_blocks": 9}, {"max_model_len": 65}, "lower max_model_len to 64"),
    ({"width": 8, "num_blocks": 99}, {"width": 9}, "a decode row has 9 tokens, more than max_num_batched_tokens=8"),
    ({"pools": True, "num_blocks": 0}, {"pools": False}, "can only pool"),
    ({"pools": True, "num_blocks": 0}, {"max_model_len": 9}, "a step must hold max_model_len=9 tokens, not 8"),
]


@pytest.mark.parametrize(("taken", "change", "says"), CACHE)
def test_what_the_cache_must_hold(taken: dict[str, Any], change: dict[str, Any], says: str) -> None:
    SchedulerConfig(**(SIZES | taken))
    with pytest.raises(ConfigError, match=says):
        SchedulerConfig(**(SIZES | taken | change))


POOLING: list[tuple[str, Any, Any]] = [
    ("dimensions", 1, 0), ("dimensions", 2**20, 2**20 + 1), ("dimensions", 5, True), ("truncate_prompt_tokens", -1, -2),
    ("truncate_prompt_tokens", 1, 0), ("truncate_prompt_tokens", 2**31 - 1, 2**31), ("normalize", False, 0),
    ("use_activation", True, "yes"), ("truncation_side", "left", "both"), ("truncation_side", "right", ""),
    ("prompt_name", "x" * 256, "x" * 257), ("task", "x" * 256, "x" * 257), ("task", "", 3),
]  # fmt: skip
SWITCHES = [name for name, value in SAMPLING.items() if isinstance(value, bool)]
SAMPLING_KINDS: list[tuple[str, Any, Any]] = [
    *((name, True, 1) for name in SWITCHES), ("n", 2, True), ("seed", 0, 1.0), ("temperature", 1, math.nan),
    ("temperature", 0.5, "hot"), ("top_p", 0.5, math.inf), ("min_p", 1, True), ("logit_bias", {"5": 1}, {"x": 1}),
    ("logit_bias", {}, [1]), ("logit_bias", {1: -1}, {1: math.nan}), ("stop_token_ids", [], ["a"]), ("stop", "a", ["", "a"]),
    ("stop", None, [3]), ("logprob_token_ids", [1], (1,)), ("structured_outputs", None, {"json": {}}),
    ("allowed_token_ids", [*range(5)], [True]), ("bad_words", ["a"], ["x" * 1025]), ("max_tokens", None, 2.0),
]  # fmt: skip


@pytest.mark.parametrize(("field", "taken", "refused"), POOLING + SAMPLING_KINDS, ids=lambda value: str(value)[:20])
def test_kinds_of_values(field: str, taken: Any, refused: Any) -> None:
    kind: type[Any] = PoolingParams if field in {each.name for each in fields(PoolingParams)} else SamplingParams
    kind(**{field: taken})
    with pytest.raises(InvalidRequestError) as caught:
        kind(**{field: refused})
    assert caught.value.parameter == field


def test_strings_to_stop_at_need_text() -> None:
    SamplingParams(stop=["a"], detokenize=True)
    SamplingParams(stop_token_ids=[1], detokenize=False)
    with pytest.raises(HeadwayError, match="use stop_token_ids"):
        SamplingParams(stop=["a"], detokenize=False)


def test_greedy_ends_where_it_is_said_to() -> None:
    """Below 1e-5, as in vLLM."""
    assert SamplingParams(temperature=0.99e-5).is_greedy and not SamplingParams(temperature=1e-5).is_greedy
