"""``kv_cache_dtype``: with keys and values in 8 bits engines keep their promises, and logits stay near those of 32 bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.log import logger
from headway.device.base import Device
from headway.engine import boot
from tests.engine.harness import Answer, MakeEngine, request, run
from tests.engine.test_depths import FEATURES, close, requests_for
from tests.engine.tiny_llama import KV_BLOCK_BYTES

BLOCK_BYTES = KV_BLOCK_BYTES // 4
SHARE = 0.2
"""Most that 8 bits may change log-probabilities by, as a share of their spread, both in the mean square; measured: 0.105.

A key's or value's error is at most 1/16, by 3 bits of fraction, and 1/38 in the mean square. Two layers of large weights,
so that tokens vary, make four times that of it. Keys or values that are wrong make 1 of it, and more.
"""


def test_blocks_take_a_byte_a_number(make_engine: MakeEngine) -> None:
    memory = 40 * KV_BLOCK_BYTES
    wide, narrow = (
        make_engine(kv_cache_memory_bytes=memory, kv_cache_dtype=dtype, max_num_seqs=64) for dtype in ("auto", "fp8")
    )
    assert (wide.info.kv_cache_dtype, narrow.info.kv_cache_dtype) == ("float32", "float8_e4m3fn")
    assert narrow.info.num_kv_tokens + 8 == 4 * (wide.info.num_kv_tokens + 8)


def test_a_cpu_says_that_it_is_slow_at_it(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger.name):
        make_engine(kv_cache_dtype="fp8")
    assert "the CPU's own kernels know no 8-bit floats" in caplog.text


@pytest.mark.parametrize("pool_blocks", [None, 18])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_depths_and_preemptions_change_nothing(make_engine: MakeEngine, depth: int, pool_blocks: int | None) -> None:
    batch = requests_for(list(FEATURES.values()), seed=2)
    oracle = run(make_engine(kv_cache_dtype="fp8", enable_prefix_caching=False), batch)
    memory = {} if pool_blocks is None else {"kv_cache_memory_bytes": pool_blocks * BLOCK_BYTES}
    core = make_engine(kv_cache_dtype="fp8", run_ahead=depth, max_num_batched_tokens=24, **memory)
    for request_id, answer in run(core, batch).items():
        close(answer, oracle[request_id])
    assert pool_blocks is None or core.stats().num_preemptions > 0, "the pool was meant to be too small"


def test_a_cached_prefix_changes_nothing(make_engine: MakeEngine) -> None:
    """The first pass reads the keys and values of its own tokens from the cache too, so both see them in 8 bits."""
    core = make_engine(kv_cache_dtype="fp8_e4m3")
    prompt = [(7 * i) % 97 for i in range(50)]
    first, again = (run(core, [request(name, prompt, logprobs=3, temperature=0.0)])[name] for name in ("a", "b"))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    close(first, again)


def test_neighbours_do_not_change_tokens(make_engine: MakeEngine) -> None:
    batch = requests_for(list(FEATURES.values()), seed=3)
    core = make_engine(run_ahead=2, kv_cache_dtype="fp8", enable_prefix_caching=False)
    together = run(core, batch)
    for each in batch:
        close(run(core, [each])[each.request_id], together[each.request_id])


def prompt_logprobs(answer: Answer) -> torch.Tensor:
    """Of the prompt's own tokens."""
    return torch.tensor([values[0] for _, values, _ in answer.prompt_logprobs])


def test_logits_stay_near_those_of_wide_caches(make_engine: MakeEngine) -> None:
    prompts = [[(k * i * i + i) % 97 for i in range(60)] for k in range(1, 21)]
    batch = [request(str(k), prompt, prompt_logprobs=0, max_tokens=1) for k, prompt in enumerate(prompts)]
    wide, narrow = (run(make_engine(kv_cache_dtype=dtype), batch) for dtype in ("auto", "fp8"))
    change = torch.cat([prompt_logprobs(narrow[name]) - prompt_logprobs(wide[name]) for name in wide])
    spread = torch.cat([prompt_logprobs(wide[name]) for name in wide]).std()
    assert 0.0 < float(change.square().mean().sqrt()) < SHARE * float(spread)


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", "nvfp4", "bfloat16", "FP8", ""])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3; got "):
        EngineArgs(kv_cache_dtype=value)


@pytest.mark.parametrize(("capability", "served"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_that_do_not_convert_8_bit_floats_are_refused(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device: Any = cast(Device, SimpleNamespace(torch_device=torch.device("cuda")))
    assert boot._resolve_kv_dtype("auto", torch.bfloat16, device) is torch.bfloat16
    if served:
        assert boot._resolve_kv_dtype("fp8", torch.bfloat16, device) is torch.float8_e4m3fn
        return
    with pytest.raises(
        ConfigError, match=r"compute capability 8\.9 or newer; this one has 8\.\d: use kv_cache_dtype='auto'"
    ):
        boot._resolve_kv_dtype("fp8", torch.bfloat16, device)
