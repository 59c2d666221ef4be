"""What an engine of several ranks, or of steps in halves, cannot do; refused before anything is begun."""

from __future__ import annotations

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.seat import Seat
from headway.device.base import Device
from headway.engine.extras import Extras
from headway.models.interface import ModelSpec


def refuse_together(args: EngineArgs, extras: Extras, seat: Seat | None = None) -> None:
    """Raises ConfigError for what an engine of several ranks, or a replica that shares experts, cannot do."""
    if seat is not None:
        _refuse_shared(args, extras)
    if args.node_rank:
        raise ConfigError("node_rank > 0 is for `headway serve` on the hosts that follow; host 0 has the engine")
    drafts = extras.drafts
    if drafts is not None and args.enable_dbo:
        raise ConfigError("enable_dbo does not cut rows of drafts in two; leave out enable_dbo, or the drafter")
    if args.num_ranks == 1:
        return
    if extras.pooling is not None or (drafts is not None and args.speculative_config is None):
        raise ConfigError("drafters and poolers that are handed in cannot be handed on to other ranks; run on one")
    if args.quantization == "gguf" and args.tensor_parallel_size > 1:
        raise ConfigError("quantization='gguf' insists on blocks, which cannot be cut into columns; use 'auto'")


def _refuse_shared(args: EngineArgs, extras: Extras) -> None:
    if args.pipeline_parallel_size > 1:
        raise ConfigError(
            "stages of several replicas that share experts would wait for each other in turn; leave out "
            "pipeline_parallel_size, or enable_expert_parallel"
        )
    if extras.drafts is not None and (extras.drafts.load is not None or args.speculative_config is None):
        raise ConfigError(
            "a drafter with a model of its own runs steps that other replicas do not; draft with method 'ngram', or leave out "
            "enable_expert_parallel"
        )


def refuse_uneven_halves(args: EngineArgs, device: Device) -> None:
    """Raises ConfigError for halves of steps that differ between replicas that share experts."""
    if args.enable_dbo and (args.enforce_eager or not device.captures_graphs):
        raise ConfigError(
            "enable_dbo halves steps that have one size on all replicas that share experts: those that replay graphs. Leave "
            "out enable_dbo, or enforce_eager, or enable_expert_parallel"
        )


def refuse_halves(args: EngineArgs, spec: ModelSpec) -> None:
    """Raises ConfigError where the steps of a model cannot be cut."""
    if not args.enable_dbo:
        return
    reasons = {
        "takes texts whole": spec.cache.is_empty,
        "has states, whose chunk tables are the whole step's": spec.cache.has_states,
        "caches latents, whose kernels are chosen by the whole step": spec.cache.has_latents,
        "has an encoder, whose outputs belong to whole rows": spec.encoder is not None or spec.cache.cross is not None,
    }
    for why in (why for why, holds in reasons.items() if holds):
        raise ConfigError(f"enable_dbo cuts steps at any token, and {spec.architecture} {why}; leave it out")
