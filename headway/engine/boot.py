"""Builds an engine: resolves every "auto" against the model and the machine, says what it chose, allocates, warms up."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.core.cache import ALL_LAYERS
from headway.core.config import USUAL_THRESHOLDS, EngineArgs, SchedulerConfig, Thresholds
from headway.core.errors import ConfigError, OutOfMemoryError
from headway.core.ints import cdiv
from headway.core.log import logger
from headway.core.messages import AddRequest
from headway.core.seat import Seat
from headway.device.base import Device
from headway.device.select import select_device
from headway.engine.accord import Accord
from headway.engine.core import EngineCore
from headway.engine.draft_pacer import DraftPacer
from headway.engine.drafts import Drafts, Loading
from headway.engine.extras import Extras, Pooling
from headway.engine.gguf_blocks import block_use
from headway.engine.hearing import alignment_heads, encoder_tables, hears, refuse_drafts
from headway.engine.host_waits import HostWaits
from headway.engine.model_info import model_info
from headway.engine.pacer import Pacer
from headway.engine.pooling import pooling_of
from headway.engine.ranks import lead
from headway.engine.sight import check_drafts, features, scheduled, sees, staged_rows
from headway.engine.sizes import (
    Sizes,
    choose_sizes,
    cpu_kv_bytes,
    cuda_kv_bytes,
    fit_context,
    upload_budget,
    with_states,
)
from headway.engine.states import state_storage
from headway.engine.together import refuse_halves, refuse_together
from headway.engine.warm_up import PhaseTimes, WarmUp, hidden_from
from headway.engine.world import World
from headway.kernels.compiler_process import CompilerProcess
from headway.kernels.cpu.ops import preferred_dtype
from headway.models.interface import Model
from headway.models.load import admitting, load_model
from headway.models.purpose import Wish
from headway.models.registry import read_config
from headway.runner.admission import MAX_STOP_IDS
from headway.runner.config import RunnerConfig
from headway.runner.runner import ModelRunner
from headway.sampling.sampler import Sampler, sampler_tables
from headway.scheduler import OnePassScheduler, Scheduler
from headway.speculative.base import DraftHouse, DraftModel
from headway.state.cache_pool import CachePool, StateStorage, bytes_per_block
from headway.state.media import media_tables
from headway.state.packed_step import segment_ints
from headway.state.slots import SlotArena, core_tables
from headway.state.token_types import type_tables
from headway.weights import Checkpoint, open_checkpoint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8_CAPABILITY = (8, 9)
"""Compute capability from which on GPUs convert 8-bit floats, and Triton has kernels do it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device, and what it was made from. ``kv_dtype`` is that of its cached keys and values, ``draft_model``
    the drafter's own."""

    device: Device
    checkpoint: Checkpoint
    dtype: torch.dtype
    kv_dtype: torch.dtype
    model: Model
    extras: Extras
    storage: StateStorage
    draft_model: DraftModel | None = None

    def states(self, requests: int, checkpoints: int = 0) -> StateStorage:
        """How the model's states are stored, of so many."""
        return replace(self.storage, num_slots=requests + checkpoints, checkpoints=checkpoints)


def build_engine(
    args: EngineArgs,
    *,
    progress: bool = True,
    device: Device | None = None,
    compiler: CompilerProcess | None = None,
    thresholds: Thresholds = USUAL_THRESHOLDS,
    drafts: Drafts | None = None,
    pooling: Pooling | None = None,
    seat: Seat | None = None,
) -> EngineCore:
    """Load the model and make a ready engine.

    Args:
        progress: draw progress bars on a terminal.
        device: run on this one instead of the one that ``args.device`` names.
        compiler: for kernels; without one, a GPU gets one that begins now.
        thresholds: for tests.
        drafts: guess tokens ahead; None: as ``args.speculative_config`` says.
        pooling: take vectors from the hidden states; None: generate.
        seat: which of several replicas this is that share experts; None: it shares none.

    Raises:
        ConfigError, ModelError, OutOfMemoryError: with what would work instead.
    """
    start, times = time.perf_counter(), PhaseTimes()
    extras = Extras(drafts or Drafts.of(args.speculative_config), pooling)
    refuse_together(args, extras, seat)
    with ExitStack() as stack, ExitStack() as owned:
        placement = None
        if args.distributed_executor_backend == "ray" and args.num_ranks > 1:
            from headway.engine.ray_ranks import placed  # late: Ray is an extra

            placement = owned.enter_context(placed(args))
            args = replace(args, device=placement.device)
        if device is None:
            with times.phase("device"):
                device = select_device(args.device)
            owned.callback(device.close)
        if compiler is None and device.torch_device.type == "cuda":
            compiler = stack.enter_context(closing(CompilerProcess()))
        if args.num_ranks > 1 or seat is not None:
            extras = replace(
                extras, world=owned.enter_context(lead(args, device.torch_device, thresholds, seat, placement))
            )
        warm_up = WarmUp(device, times, progress, compiler)
        accord = None
        if seat is not None:
            accord = owned.enter_context(closing(Accord(seat, args)))
        core = _build(args, warm_up, thresholds, extras, accord)
        core.close_at_shutdown(owned.pop_all())
    logger.info("engine ready in %.1f s (%s)", time.perf_counter() - start, times)
    return core


def build_rank(args: EngineArgs, world: World, device: Device, thresholds: Thresholds) -> ModelRunner:
    """The runner of a rank that follows, as the leader has it."""
    extras = Extras(Drafts.of(args.speculative_config), world=world)
    with ExitStack() as stack:
        compiler = stack.enter_context(closing(CompilerProcess())) if device.compiles_kernels else None
        return _ready_runner(args, WarmUp(device, PhaseTimes(), False, compiler), thresholds, extras)[2]


def _ready_runner(
    args: EngineArgs, warm_up: WarmUp, thresholds: Thresholds, extras: Extras
) -> tuple[Loaded, Sizes, ModelRunner]:
    """What every rank has: in the same order on all, since they rehearse together."""
    device = warm_up.device
    with warm_up.times.phase("weights"):
        loaded = _load(args, warm_up.progress, device, extras)
    refuse_halves(args, loaded.model.spec, shares=extras.world.mesh.replicas > 1)
    extras.world.least(0)  # the others have their weights, too
    sizes = choose_sizes(
        args, loaded.model.spec, device.asynchronous, thresholds, 1 + extras.num_drafts, extras.lookahead
    )
    runner, sizes = _build_runner(args, loaded, sizes, warm_up)
    if device.captures_graphs and not args.enforce_eager:
        warm_up.capture(runner, extras.world.least(hidden_from(loaded.model.spec)))
    extras.world.least(0)  # all have compiled what they need
    extras.world.started()
    return loaded, sizes, runner


def _build(
    args: EngineArgs, warm_up: WarmUp, thresholds: Thresholds, extras: Extras, accord: Accord | None
) -> EngineCore:
    device = warm_up.device
    loaded, sizes, runner = _ready_runner(args, warm_up, thresholds, extras)
    if accord is not None:
        accord.begin_with(sizes.max_num_batched_tokens, sizes.max_num_seqs, extras.world)
    if args.num_ranks > 1:
        runner.followers = extras.world
    fills = args.pipeline_parallel_size if device.asynchronous and args.pipeline_parallel_size > 1 else args.run_ahead
    pacer = Pacer(fills if args.run_ahead == "auto" else args.run_ahead, device.asynchronous)
    groups = loaded.model.spec.cache.groups or ALL_LAYERS
    block_size = sizes.block_size if sizes.num_blocks else 0
    config = SchedulerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
        enable_prefix_caching=args.enable_prefix_caching and not runner.needs_whole_prompts,
        max_upload_ints=upload_budget(sizes, loaded.model.spec.vocab_size, loaded.model.spec.cache),
        headroom_divisor=thresholds.headroom_divisor,
        width=sizes.width,
        pools=loaded.extras.pooling is not None,
        lookahead=sizes.lookahead,
        forgets_last_hit=extras.drafts is not None and extras.drafts.forgets_last_hit,
        groups=groups,
        has_states=loaded.model.spec.cache.has_states,
        num_checkpoints=sizes.num_checkpoints,
        checkpoint_every=thresholds.checkpoint_every,
        **scheduled(loaded.model.spec, sizes, args.encoder_step_ratio, loaded.dtype),
        cohorts=args.pipeline_parallel_size,
        aligns=bool(runner.config.alignment),
    )

    def upload_ints(request: AddRequest) -> int:
        return _upload_ints(runner, request, block_size, len(groups))

    scheduler: Scheduler | OnePassScheduler = (
        Scheduler(config, upload_ints) if block_size else _one_pass(loaded, config, upload_ints)
    )
    waits = HostWaits(device) if args.count_host_waits else None
    draft_pacer = DraftPacer(runner.config.widths) if extras.drafts is not None and extras.drafts.adaptive else None
    info = model_info(args, loaded, sizes)
    return EngineCore(scheduler, runner, pacer, info, waits, thresholds.traced_steps, draft_pacer, accord)


def _load(args: EngineArgs, progress: bool, device: Device, extras: Extras) -> Loaded:
    for note in device.notes:  # on a GPU a note names something missed; on a CPU it is how CPUs are
        logger.log(logging.WARNING if device.asynchronous else logging.INFO, "%s", note)
    checkpoint = open_checkpoint(args.model, revision=args.revision, load_format=args.load_format)
    checkpoint.config.update(args.hf_overrides or {})
    folder = checkpoint.path if checkpoint.path.is_dir() else None
    asked = Wish(
        runner=args.runner,
        convert=args.convert,
        pooler_config=args.pooler_config,
        sentence=checkpoint.sentence,
        folder=folder,
        token_heads=checkpoint.token_heads,
    )
    # What a caller of this function brings is on top of a model that generates.
    config = read_config(checkpoint.config, Wish(runner="generate") if extras.pooling is not None else asked)
    config = extras.world.sharded(config, whole_experts=args.enable_expert_parallel, embeds=extras.embeds)
    dtype = _resolve_dtype(args.dtype, checkpoint.config, device, pools=config.pooling is not None)
    kv_dtype = _resolve_kv_dtype(args.kv_cache_dtype, dtype, device)
    longest = args.max_model_len or config.longest_context
    if longest > config.longest_context:
        raise ConfigError(
            f"max_model_len={longest} is more than the model's context of {config.longest_context}; lower it"
        )
    config = admitting(config, longest)
    row = longest + extras.num_drafts + extras.lookahead
    refuse_drafts(config, drafting=extras.drafts is not None)
    model = load_model(
        checkpoint,
        dtype=dtype,
        device=device.torch_device,
        max_model_len=row,
        progress=progress,
        seed=args.seed,
        blocks=block_use(args, checkpoint, dtype, device),
        config=config,
    )
    if model.spec.pooling is not None and extras.pooling is None:
        extras = replace(extras, pooling=pooling_of(model, model.spec.pooling))
    storage = state_storage(args, model.spec, dtype, extras.num_drafts)
    check_drafts(model.spec, reads_prompts=extras.drafts is not None and extras.drafts.load is not None)
    loading = Loading(args=args, target=model, dtype=dtype, longest=row, admitted=longest, progress=progress)
    draft_model = None if extras.drafts is None else extras.drafts.loaded(loading)
    return Loaded(device, checkpoint, dtype, kv_dtype, model, extras, storage, draft_model)


def _resolve_dtype(name: str, config: dict[str, Any], device: Device, *, pools: bool) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if device.torch_device.type == "cpu":
        if pools and stored in ("", "float32"):  # vectors are compared with those that other programs made
            return torch.float32
        chosen = preferred_dtype()
        logger.info("dtype auto: %s is the faster one on this CPU", chosen)
        return chosen
    # Float32 checkpoints are served in bfloat16, as everywhere: half the bytes, and bytes are what decoding costs.
    return _DTYPES["bfloat16" if stored == "float32" else stored] if stored in _DTYPES else torch.bfloat16


def _resolve_kv_dtype(name: str, dtype: torch.dtype, device: Device) -> torch.dtype:
    if name == "auto":
        return dtype
    if device.torch_device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device.torch_device)
        if (major, minor) < FP8_CAPABILITY:
            raise ConfigError(
                f"kv_cache_dtype={name!r} needs a GPU of compute capability 8.9 or newer; this one has {major}.{minor}: "
                "use kv_cache_dtype='auto'"
            )
    elif device.torch_device.type == "cpu":
        logger.warning(
            "kv_cache_dtype %s: the CPU's own kernels know no 8-bit floats, torch's operations attend instead", name
        )
    return torch.float8_e4m3fn


def _build_runner(args: EngineArgs, loaded: Loaded, sizes: Sizes, warm_up: WarmUp) -> tuple[ModelRunner, Sizes]:
    """A runner with its KV pool, and the sizes after the memory had its say."""
    layout = loaded.model.spec.cache
    block_bytes = bytes_per_block(layout, sizes.block_size, loaded.kv_dtype)
    block_bytes = block_bytes or len(layout.groups)  # all keys may be those of other stages
    if loaded.draft_model is not None:
        block_bytes += bytes_per_block(loaded.draft_model.spec.cache, sizes.block_size, loaded.kv_dtype)
    device = loaded.device
    if device.asynchronous and args.kv_cache_memory_bytes is None and not layout.is_empty:
        device.reset_peak()
        before = device.peak_bytes()
        rehearsal = _make_runner(loaded, sizes, 2)
        warm_up.rehearse(rehearsal, sizes)
        budget = cuda_kv_bytes(device, args.gpu_memory_utilization)
        if device.captures_graphs and not args.enforce_eager:
            budget -= device.peak_bytes() - before  # graphs of full steps have memory of their own
        budget += loaded.states(sizes.max_num_seqs).bytes(layout)  # the rehearsal held them, too
        del rehearsal
        gc.collect()
    else:
        budget = args.kv_cache_memory_bytes or cpu_kv_bytes(device)
    sizes, taken = with_states(args, layout, loaded.storage, sizes, budget, loaded.extras.world.least)
    budget = loaded.extras.world.least((budget - taken) // max(block_bytes, 1)) * max(block_bytes, 1)
    sizes = fit_context(sizes, layout, block_bytes, budget, explicit=args.max_model_len is not None)
    if layout.is_empty:
        logger.info("nothing is cached: texts of up to %d tokens are taken whole", sizes.max_model_len)
        runner = _make_runner(loaded, sizes, 0)
        warm_up.rehearse(runner, sizes)
        return runner, sizes
    logger.info(
        "KV cache: %d blocks of %d tokens in %s, %.2f GiB; context %d",
        sizes.num_blocks,
        sizes.block_size,
        _name(loaded.kv_dtype),
        sizes.num_blocks * block_bytes / 2**30,
        sizes.max_model_len,
    )
    try:
        runner = _make_runner(loaded, sizes, sizes.num_blocks)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the KV cache of {sizes.num_blocks * block_bytes / 2**30:.2f} GiB does not fit; "
            "lower kv_cache_memory_bytes, gpu_memory_utilization or max_num_seqs"
        ) from error
    warm_up.rehearse(runner, sizes)
    return runner, sizes


def _make_runner(loaded: Loaded, sizes: Sizes, num_blocks: int) -> ModelRunner:
    vocab_size, device = loaded.model.spec.vocab_size, loaded.device
    layout = loaded.model.spec.cache
    blocks_per_seq = cdiv(max(sizes.longest_row, layout.cross_tokens), sizes.block_size)
    num_groups = max(len(layout.groups), 1)
    core = core_tables(sizes.longest_row, blocks_per_seq, MAX_STOP_IDS, sizes.width - 1, num_groups)
    hidden, extras = loaded.model.spec.hidden_size, loaded.extras
    tables = core + sampler_tables(vocab_size, speech=hears(loaded.model.spec)) + encoder_tables(layout)
    tables += extras.pooling.tables(hidden) if extras.pooling else []
    tables += type_tables(loaded.model.spec.num_token_types, len(loaded.model.spec.adapters))
    if loaded.model.spec.vision is not None:
        tables += media_tables()
    arena = SlotArena(tables, sizes.max_num_seqs, device.torch_device)
    caches = CachePool(
        layout,
        num_blocks=num_blocks,
        block_size=sizes.block_size,
        dtype=loaded.kv_dtype,
        device=device.torch_device,
        states=loaded.states(sizes.max_num_seqs, sizes.num_checkpoints),
        features=features(loaded.model.spec, sizes, loaded.dtype),
    )
    config = RunnerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        vocab_size=vocab_size,
        max_logprobs=sizes.max_logprobs,
        max_upload_ints=2
        * upload_budget(sizes, vocab_size, layout),  # resumed requests take up to 1.3x what they are counted
        max_in_flight=sizes.max_in_flight,
        prompt_logits_chunk=sizes.thresholds.prompt_logits_chunk,
        width=sizes.width,
        widths=(1,) if extras.drafts is None else extras.drafts.widths,
        lookahead=sizes.lookahead,
        edits_per_row=layout.edits_per_row,
        has_states=layout.has_states,
        has_latents=layout.has_latents,
        max_encoder_rows=staged_rows(loaded.model.spec, sizes),
        sees=sees(loaded.model.spec),
        halves_from=sizes.halves_from,
        alignment=alignment_heads(loaded.model, loaded.checkpoint),
        num_stages=1 if loaded.model.spec.stage is None else loaded.model.spec.stage.group.size,
    )
    sampler = Sampler(arena, vocab_size, loaded.model.spec.vocabulary)
    drafter = None
    if extras.drafts is not None:
        house = DraftHouse(
            arena=arena,
            sampler=sampler,
            target=loaded.model,
            model=loaded.draft_model,
            number=extras.drafts.number,
            num_blocks=num_blocks,
            block_size=sizes.block_size,
            kv_dtype=loaded.kv_dtype,
            max_tokens=sizes.max_num_batched_tokens,
            max_rows=sizes.max_num_seqs,
            drawing=extras.drafts.drawing,
        )
        drafter = extras.drafts.on(extras.world.tensor, house)
    pooler = None if extras.pooling is None else extras.pooling.pooler(arena, hidden)
    turns = extras.world.turns(device) if any(sizes.halves_from) else None
    return ModelRunner(device, loaded.model, sampler, arena, caches, config, drafter, pooler, turns)


def _one_pass(loaded: Loaded, config: SchedulerConfig, upload_ints: Callable[[AddRequest], int]) -> OnePassScheduler:
    spec = loaded.model.spec.pooling
    return OnePassScheduler(config, upload_ints, None if spec is None else spec.token_columns())


def _upload_ints(runner: ModelRunner, request: AddRequest, block_size: int, num_groups: int) -> int:
    """What admitting ``request`` takes of the packed step: tables, tokens, block edits (4 ints a block), descriptors.
    ``block_size``: 0 where nothing is cached."""
    num_tokens = len(request.prompt_token_ids)
    if not block_size:
        return runner.admissions.prepare(request) + segment_ints(num_tokens)
    read = sum(cdiv(item.rows, block_size) for item in request.media if item.first < 0)
    num_blocks = num_groups * cdiv(num_tokens, block_size) + read
    return runner.admissions.prepare(request) + segment_ints(num_tokens) + 4 * num_blocks


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
