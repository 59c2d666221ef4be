"""Engine arguments as users give them, and the resolved configurations their owners get.

``EngineArgs`` may hold "auto" and None; ``engine.boot`` resolves them against the model and the machine, logs each choice
with its reason, and hands frozen configurations down. Nothing below the engine floor sees an unresolved value.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headway.core.cache import ALL_LAYERS, CacheGroup
from headway.core.errors import ConfigError
from headway.core.ints import cdiv
from headway.core.params import refuse_unknown
from headway.core.speculative import SpeculativeConfig, read_speculative

if TYPE_CHECKING:  # arrays stand in it, and the command line's help needs none
    from headway.core.encode import BlockCost

RunAhead = int | Literal["auto"]
MAX_RUN_AHEAD = 8
MAX_REPLAYS = 64


@refuse_unknown
@dataclass(kw_only=True, slots=True)
class EngineArgs:
    """Everything a user may say about an engine. Names and meanings are vLLM's, plus ``run_ahead``.

    Attributes:
        model: a folder in Hugging Face form, a GGUF file, a hub name, or the built-in name "smollm2".
        tokenizer: folder or hub name to take the tokenizer from instead of the model's own.
        revision: hub revision, pinned for every file.
        dtype: "auto" (the checkpoint's on CUDA; on CPU the faster of bfloat16 and float32), "float32", "bfloat16", "float16".
        quantization: "auto" keeps matrices of GGUF files in their blocks where that is faster: on CPUs with native kernels
            when ``dtype`` is "auto" (activations are rounded to 8 bits in products, to 16 beside outliers) or "float32" (they
            are not); else weights are dequantised. "gguf" insists on blocks and rounded activations, "none" never keeps them.
        kv_cache_dtype: of cached keys and values: "auto" (the model's), or "fp8", also "fp8_e4m3": 8-bit floats without scales,
            which end at +-448. The cache holds twice the tokens of 16 bits, and decoding reads half; attention of prompts takes
            longer. GPUs: from compute capability 8.9 on.
        mamba_ssm_cache_dtype: of recurrent states of models that have some: "auto" (what the model says, else for Mamba the
            model's dtype; float32 for the others and with drafts), "float32", "bfloat16" or "float16": half the bytes a decode
            step moves, at the price of rounding at every token.
        replayssm_buffer_len: tokens for which recurrent states are not written back but made again from a ring of their inputs
            (docs/hybrid.md), 1 to 64; 0: they are written at every step. None: 8 with drafts, which need a ring, else 0.
        device: "auto", "cuda", "cuda:N", "cpu", or "sim:SEED", a slow simulated GPU that finds races and host waits.
        max_model_len: longest prompt + output in tokens; None: the model's, cut to what the memory holds.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens in one step.
        gpu_memory_utilization: share of the card's memory the engine may use.
        kv_cache_memory_bytes: size of the KV cache; overrides gpu_memory_utilization.
        block_size: tokens per KV block, a power of two from 8 to 256.
        enable_prefix_caching: reuse KV blocks of equal prefixes.
        enforce_eager: no CUDA graphs.
        load_format: "auto", "safetensors", "gguf" or "dummy" (random weights, for benchmarks).
        seed: seeds dummy weights and the per-request seeds of requests that bring none.
        runner: what the engine does: "generate", "pooling" (vectors of texts, nothing generated), or "auto": what the model's
            architecture and files say.
        convert: what a pooling engine makes of its model: "none" leaves it as it is, "embed" gives vectors of texts, "classify"
            scores of labels; "auto": what its architecture and files say.
        pooler_config: JSON of what to pool otherwise than the model's files say: "pooling_type" (cls, last, mean, max,
            weighted_mean, mean_sqrt, all), "normalize", "activation" (none, sigmoid, softmax), "step_tag_id",
            "returned_token_ids".
        hf_overrides: JSON of fields of config.json to be read instead of the model's.
        skip_tokenizer_init: token ids in, token ids out.
        run_ahead: steps in flight before the host reads a result; 0 is the synchronous oracle; "auto" adapts.
        max_logprobs: most logprobs a request may ask for.
        generation_config: "auto" takes sampling defaults from the model's generation_config.json, "vllm" from the library.
        count_host_waits: count, at the cost of a microsecond a step, the times the loop waits for the GPU outside of
            back-pressure (``EngineStats.host_waits``); needs CUDA.
        speculative_config: guess tokens ahead and verify several a step: a mapping, on the command line JSON, such as
            {"method": "ngram", "num_speculative_tokens": 4} (docs/speculative.md); None: do not.
        limit_mm_per_prompt: most pictures, videos and recordings in a prompt, {"image": 4}; 32, 4 and 8 by default.
        encoder_step_ratio: how long encoders of pictures, and prompts with pictures, may hold up a step in which others decode,
            in times of such a step; inf: a picture is encoded in one step.
        multiprocess: run the engine in its own process (default: LLM no, AsyncLLM yes).
        tensor_parallel_size: ranks that each layer is cut into (docs/parallel.md).
        pipeline_parallel_size: stages that the layers are cut into.
        data_parallel_size: replicas of the model behind one door.
        enable_expert_parallel: deal out the experts of a mixture whole, over tensor ranks and replicas; refused where there are
            none.
        enable_dbo: run long steps as two micro-batches (docs/parallel.md).
        dbo_decode_token_threshold: tokens from which on steps of decode rows alone are halved.
        dbo_prefill_token_threshold: the same of steps with prompts.
        distributed_executor_backend: what ranks are: "mp", processes; "ray", processes that Ray places; or "threads" of one
            process, for CPUs and the simulated device.
        distributed_timeout_seconds: after which a rank that is silent, or that others wait for, is given up.
        nnodes: hosts; each runs this command with its own ``node_rank``, and all have one secret in HEADWAY_RANK_SECRET.
        node_rank: which host this is; 0 leads.
        master_addr: address of host 0, on which it listens for the others.
        master_port: its port.
    """

    model: str = "smollm2"
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    replayssm_buffer_len: int | None = None
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    load_format: str = "auto"
    seed: int = 0
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | None = None
    skip_tokenizer_init: bool = False
    run_ahead: RunAhead = "auto"
    max_logprobs: int = 20
    generation_config: str = "auto"
    count_host_waits: bool = False
    speculative_config: SpeculativeConfig | None = None
    encoder_step_ratio: float = 0.75
    multiprocess: bool | None = None
    limit_mm_per_prompt: dict[str, Any] | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_dbo: bool = False
    dbo_decode_token_threshold: int = 32
    dbo_prefill_token_threshold: int = 512
    distributed_executor_backend: str = "mp"
    distributed_timeout_seconds: int = 60
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        for name in ("pooler_config", "hf_overrides", "limit_mm_per_prompt"):
            setattr(self, name, _json_object(name, getattr(self, name)))
        self.speculative_config = read_speculative(self.speculative_config)
        for name, limit in (self.limit_mm_per_prompt or {}).items():
            if name not in ("image", "video", "audio") or not _is_count(limit, 0):
                raise ConfigError(
                    f'limit_mm_per_prompt may have {{"image": integer >= 0, "video": ...}}; got {{{name!r:.40}: {limit!r:.40}}}'
                )
        self._check_choices()
        self._check_numbers()
        self._check_ranks()

    def _check_ranks(self) -> None:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes")
        thresholds = ("dbo_decode_token_threshold", "dbo_prefill_token_threshold")
        for name in (*sizes, *thresholds, "distributed_timeout_seconds", "master_port"):
            if not _is_count(getattr(self, name), 1):
                raise ConfigError(f"{name} must be a positive integer; got {getattr(self, name)!r}")
        backend = self.distributed_executor_backend
        if backend not in ("mp", "ray", "threads"):
            raise ConfigError(f"distributed_executor_backend must be mp, ray or threads; got {backend!r}")
        if backend == "ray" and (self.nnodes > 1 or self.device.startswith("sim")):
            raise ConfigError(
                "distributed_executor_backend='ray' finds hosts by itself, and knows no simulated device; leave out nnodes and "
                "device"
            )
        if backend == "ray" and self.enable_expert_parallel and self.data_parallel_size > 1:
            raise ConfigError(
                "replicas that share experts are on one host, and Ray may place them on several; set "
                "distributed_executor_backend='mp'"
            )
        if backend == "threads" and self.device.partition(":")[0] not in ("cpu", "sim"):
            raise ConfigError(f"distributed_executor_backend='threads' is for cpu and sim devices, not {self.device!r}")
        if backend == "mp" and self.num_ranks > 1 and self.device.startswith("sim"):
            raise ConfigError("ranks on the simulated device are threads: set distributed_executor_backend='threads'")
        if not _is_count(self.node_rank, 0) or self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank must be from 0 to nnodes - 1 = {self.nnodes - 1}; got {self.node_rank!r}")
        if self.num_ranks % self.nnodes:
            raise ConfigError(f"nnodes={self.nnodes} does not divide the {self.num_ranks} ranks of a replica evenly")
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ConfigError(
                "replicas on several hosts are separate servers behind a load balancer; leave out nnodes or data_parallel_size"
            )

    def _check_choices(self) -> None:
        choices = {
            "dtype": ("auto", "float32", "bfloat16", "float16"),
            "quantization": ("auto", "gguf", "none"),
            "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3"),
            "mamba_ssm_cache_dtype": ("auto", "float32", "bfloat16", "float16"),
            "load_format": ("auto", "safetensors", "gguf", "dummy"),
            "generation_config": ("auto", "vllm"),
            "runner": ("auto", "generate", "pooling"),
            "convert": ("auto", "none", "embed", "classify"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        kind, _, index = self.device.partition(":")
        numbered = kind in ("cuda", "sim") and index.isdigit()
        if kind not in ("auto", "cpu", "cuda", "sim") or (index and not numbered):
            raise ConfigError(f"device must be auto, cpu, cuda, cuda:N or sim:SEED; got {self.device!r}")
        if self.run_ahead != "auto" and not (_is_count(self.run_ahead, 0) and self.run_ahead <= MAX_RUN_AHEAD):
            raise ConfigError(
                f'run_ahead must be "auto" or an integer from 0 to {MAX_RUN_AHEAD}; got {self.run_ahead!r}'
            )

    def _check_numbers(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and not _is_count(value, 1):
                raise ConfigError(f"{name} must be a positive integer; got {value!r}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1]; got {self.gpu_memory_utilization!r}")
        ring = self.replayssm_buffer_len
        if ring is not None and (not _is_count(ring, 0) or ring > MAX_REPLAYS):
            raise ConfigError(f"replayssm_buffer_len must be an integer from 0 to {MAX_REPLAYS}; got {ring!r}")
        size = self.block_size
        if size is not None and (not _is_count(size, 8) or size > 256 or size & (size - 1)):
            raise ConfigError(f"block_size must be a power of two from 8 to 256; got {size!r}")
        ratio = self.encoder_step_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not ratio > 0.0:
            raise ConfigError(f"encoder_step_ratio must be a number above 0; got {ratio!r}")
        if not _is_count(self.max_logprobs, 0):
            raise ConfigError(f"max_logprobs must be an integer >= 0; got {self.max_logprobs!r}")
        if not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer; got {self.seed!r}")


def _json_object(name: str, value: object) -> dict[str, Any] | None:
    """``value``, or what it is the JSON of (a command line has text)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name} is not JSON: {error}") from None
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object such as {{}}; got {value!r:.60}")
    return value


def _is_count(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Sizes beyond which an engine does something another way. Users have no use for them, so they are no ``EngineArgs``; tests
    set them small, because a tiny model would never reach them (docs/thresholds.md).

    Attributes:
        prompt_logits_chunk: prompt positions whose logits exist at once: bounds the memory that prompt_logprobs takes.
        headroom_divisor: while others run, an admission leaves one block in so many free, so that it is not preempted at once.
        upload_ints: int32 values of new requests that a step may carry; None: what the largest request may need, and more.
        traced_steps: latest steps whose times are kept.
        checkpoint_every: tokens between checkpoints of the states of a long prompt.
        encoder_cache_rows: rows of the encoder cache; None: several of the largest pictures.
        encoder_rows: rows that a step encodes; None: as many as take about as long as a step of decode rows.
    """

    prompt_logits_chunk: int = 256
    headroom_divisor: int = 100
    upload_ints: int | None = None
    traced_steps: int = 64
    checkpoint_every: int = 2048
    encoder_cache_rows: int | None = None
    encoder_rows: int | None = None


USUAL_THRESHOLDS = Thresholds()


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """What the scheduler needs to know; plain integers.

    Attributes:
        num_blocks: KV blocks in the pool; block 0 is the null block and never handed out. 0: the model caches nothing, its
            texts are not cut, and all that it does is pool (``OnePassScheduler``).
        max_upload_ints: most int32 values of new-request state (tokens, tables) one step may carry.
        headroom_divisor: see ``Thresholds``.
        width: most tokens of a decode row, drafts included.
        lookahead: places behind a row's last token that the drafter writes keys to.
        forgets_last_hit: a drafter's keys of a block's last token depend on the token behind it, which may differ where the
            block is found again: so of a prefix that is found the last block is computed once more.
        pools: requests end with their prompts.
        groups: of layers whose blocks are dealt out together.
        has_states: prefixes can be hit only where there is a checkpoint of states.
        num_checkpoints: of those there are so many; their slots follow those of requests.
        checkpoint_every: see ``Thresholds``.
        max_encoder_rows: most encoder outputs that a step makes, but for a single item that has more; a quarter of it in
            steps with rows that decode, so that these keep their pace, where the encoder is not cut.
        encoder_cache_rows: of the encoder cache; 0: the model reads no outputs in place of tokens.
        encoder_blocks: what each block of the encoder costs; (): it is not cut over steps.
        sound_blocks: the same of the encoder that hears, where there is one beside it.
        encoder_work: multiply-adds of the encoder in a step with rows that decode, but for a single block that has more; 0: an
            item is encoded in one step.
        media_tokens: most tokens beside rows that decode of a prompt's row with pictures, but for tokens that see each other;
            0: as many as there is room for.
        sees: see ``VisionInfo``.
        longest_whole: most tokens that see each other; 0: none do.
        cohorts: rows that decode take turns in so many consecutive steps, so that as many stages have work.
        aligns: see ``HearingInfo``.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    max_upload_ints: int = 2**31 - 1
    headroom_divisor: int = USUAL_THRESHOLDS.headroom_divisor
    width: int = 1
    lookahead: int = 0
    forgets_last_hit: bool = False
    pools: bool = False
    groups: tuple[CacheGroup, ...] = ALL_LAYERS
    has_states: bool = False
    num_checkpoints: int = 0
    checkpoint_every: int = USUAL_THRESHOLDS.checkpoint_every
    max_encoder_rows: int = 0
    encoder_cache_rows: int = 0
    encoder_blocks: tuple[BlockCost, ...] = ()
    sound_blocks: tuple[BlockCost, ...] = ()
    encoder_work: int = 0
    media_tokens: int = 0
    sees: str = ""
    longest_whole: int = 0
    cohorts: int = 1
    aligns: bool = False

    def __post_init__(self) -> None:
        if not self.num_blocks:
            if not self.pools or self.max_num_batched_tokens < self.max_model_len:
                raise ConfigError(
                    "a model without a cache can only pool, and takes each text whole: a step must hold "
                    f"max_model_len={self.max_model_len} tokens, not {self.max_num_batched_tokens}"
                )
            return
        if self.blocks_for(self.max_model_len) >= self.num_blocks:
            usable = longest_that_fits(self.blocks_for, self.num_blocks, self.max_model_len)
            raise ConfigError(
                f"the KV cache holds {usable} tokens, fewer than max_model_len={self.max_model_len}; "
                f"lower max_model_len to {usable} or give the cache more memory"
            )
        if self.max_num_batched_tokens < self.width:
            raise ConfigError(
                f"a decode row has {self.width} tokens, more than max_num_batched_tokens={self.max_num_batched_tokens}; "
                "raise it, or draft fewer tokens"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks, over all groups, that one request of ``num_tokens`` holds at once."""
        room = most_step_tokens(self.max_num_batched_tokens, self.width) + self.lookahead
        row = num_tokens + self.width - 1 + self.lookahead
        return sum(group.peak_blocks(row, self.block_size, room) for group in self.groups)

    @property
    def max_blocks_per_seq(self) -> int:
        """Drafts may lie behind the last token that a sequence can have."""
        return cdiv(self.max_model_len + self.width - 1 + self.lookahead, self.block_size)


def most_step_tokens(max_num_batched_tokens: int, width: int) -> int:
    """Most tokens by which a row's last one may be ahead of what is certain: those of a step, or drafts in flight."""
    return max(max_num_batched_tokens, width * (MAX_RUN_AHEAD + 2))


def longest_that_fits(blocks_for: Callable[[int], int], num_blocks: int, most: int) -> int:
    """The largest number of tokens, up to ``most``, for which ``blocks_for`` is less than ``num_blocks``; 0: none."""
    return bisect_left(range(1, most + 1), num_blocks, key=blocks_for)
